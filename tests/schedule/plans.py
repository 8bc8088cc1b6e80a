"""Prompts, small pools and checks of plans. Blocks hold 4 tokens, chunks 8, and four rows share 16 blocks unless a test
says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_world import World

from sidestream.schedule.limits import Limits
from sidestream.schedule.request import Request, State
from sidestream.types import RowPlan, StepPlan


def prompt(length: int, *, beginning: int = 1) -> list[int]:
    """Prompts of one beginning are prefixes of one another."""
    return [beginning + position % 7 for position in range(length)]


def small_limits(**changes: int | bool) -> Limits:
    return Limits(**{"block_tokens": 4, "chunk_tokens": 8, "token_budget": 12, **changes})  # type: ignore[arg-type]


def spans(plan: StepPlan, request: Request) -> list[tuple[int, int]]:
    return [(row.min_start, row.stop) for row in plan.batch.rows if row.request_id == request.id]


def row_of(plan: StepPlan, request: Request) -> RowPlan:
    [row] = [row for row in plan.batch.rows if row.request_id == request.id]
    return row


def states(requests: Iterable[Request]) -> list[State]:
    return [request.state for request in requests]


def steps_until(world: World, condition: object, *, at_most: int = 50) -> int:
    """Step until `condition()`; how many steps it took."""
    for taken in range(at_most + 1):
        if condition():  # type: ignore[operator]
            return taken
        world.step()
    raise AssertionError(f"not within {at_most} steps")


def row_epochs(rows: Iterable[RowPlan], request: Request) -> list[int]:
    return [row.epoch for row in rows if row.request_id == request.id]


def crowded_world(*, limits: Limits | None = None) -> tuple[World, Request, Request]:
    """Two talkers that do not fit together: the older one's growth will cost the younger one its room."""
    world = World(num_blocks=8, limits=limits)
    old, young = world.submit(prompt(9), outputs=13), world.submit(prompt(9, beginning=21), outputs=13)
    return world, old, young


def promoting(world: World) -> Request:
    request = world.submit(prompt(18))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "disk")
    world.step()
    assert request.state is State.LOADING
    return request


def loading(world: World) -> Request:
    request = world.submit(prompt(18))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    world.step()
    assert request.state is State.RUNNING and not world.tickets[0].fence.poll()
    return request
