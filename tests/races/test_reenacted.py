"""Published races in miniature: without its protection each is caught soon, and with it never."""

from __future__ import annotations

import pytest
from test_all_orders import TOO_MANY

from proof.miniatures import MINIATURES, Miniature, Outcome, run_miniature
from sidestream_order.checker import simulated

# How many random schedules show it, and the oracles that notice.
CAUGHT = {
    "store before compute": (5, "checker", "tokens"),
    "tokens behind a store": (5, "order"),
    "graph replayed during a load": (5, "checker", "tokens"),
    "queue of one stream full": (2, "checker", "order"),
    "pageable copy": (1, "checker", "order"),
    "block reused under a store": (10, "checker", "tokens"),
    "wait for an event not yet recorded": (5, "checker", "tokens"),
    "load under the old owner's step": (5, "checker", "tokens"),
    "zero-fill after a load": (5, "checker", "tokens"),
    "layer read before its load": (30, "checker", "tokens"),
    "two movers of one block": (5, "checker", "tokens"),
    "consumer before producer": (1, "checker", "tokens"),
    "early part of a dependent launch": (12, "checker", "tokens"),
    "source read in any order": (12, "checker", "tokens"),
    "slot freed by a timer": (2, "checker", "tokens"),
    "key published before its bytes": (5, "checker", "tokens"),
    "store that survives new weights": (1, "tokens"),
    "failed write that stays visible": (1, "checker", "tokens"),
    "load that lands after its deadline": (2, "checker", "tokens"),
    "key without identity": (1, "tokens"),
    "block of which a part is missing": (1, "checker", "tokens"),
    "done before its references are dropped": (1, "order"),
    "token read when the step was counted": (5, "checker", "tokens"),
    "row reused under its last step": (5, "checker", "tokens"),
    "released before the second run": (5, "checker", "tokens"),
    "staging refilled under a copy": (5, "checker", "tokens"),
    "padded row of a graph": (1, "tokens"),
    "state published by a late worker": (10, "checker", "accept length"),
    "flag read twice": (10, "accept length"),
    "state kept as a view": (1, "accept length"),
    "ranks that decide alone": (10, "tokens"),
    "abort while a step is in flight": (1, "checker", "balance"),
    "release left to a worker that has gone": (5, "checker", "balance"),
    "token of a chunk that is not the last": (1, "tokens"),
    "preempted before it ran": (1, "order"),
    "frames that two threads hand over": (5, "tokens"),
    "frame sent again after a timeout": (5, "tokens"),
    "frame overwritten before it was read": (5, "tokens"),
    "stream number used again": (5, "tokens"),
    "abort that crosses the finish": (5, "tokens"),
    "place of a front end that has died": (5, "tokens"),
    "requests of a process that has gone": (5, "balance"),
    "outputs for a reader that does not read": (10, "order"),
}
POLICIES = ("random", "late", "early", "pct:2", "pct:4")
ACTORS = ("host", "compute", "store", "worker", "engine", "front end", "connection", "timer", "reader")
STARVING = tuple(f"starve:{name}" for name in ACTORS)
BY_NAME = {miniature.name: miniature for miniature in MINIATURES}
EACH = pytest.mark.parametrize("miniature", MINIATURES, ids=lambda miniature: f"{miniature.hazard} {miniature.name}")


@EACH
def test_without_its_protection_a_miniature_is_caught_by_its_oracles_alone(miniature: Miniature) -> None:
    within, *oracles = CAUGHT[miniature.name]
    first: dict[str, int] = {}
    for seed in range(within):
        caught = run_miniature(miniature, "random", seed, protected=False)
        for oracle in caught.oracles if caught is not None else ():
            first.setdefault(oracle, seed)
    assert set(first) == set(oracles), f"noticed first by seed {first}"


@EACH
def test_with_its_protection_a_miniature_is_never_caught(miniature: Miniature) -> None:
    """The slow `test_all_orders` tries all orders but of those that have too many: of these, more are tried here."""
    many = miniature.name in TOO_MANY
    for policy in (*POLICIES, *STARVING) if many else POLICIES:
        for seed in range(2):
            assert run_miniature(miniature, policy, seed, protected=True) is None, (policy, seed)


@pytest.mark.parametrize("name", ["state published by a late worker", "flag read twice"])
def test_a_stale_draft_state_changes_accept_lengths_but_not_the_text(name: str) -> None:
    def play(*, protected: bool) -> Outcome:
        device, _ = simulated("random", 0)
        try:
            return BY_NAME[name].run(device, protected)
        finally:
            device.kill()

    stale, right = play(protected=False), play(protected=True)
    assert stale.output == stale.expected == right.output
    assert sum(stale.accept_lengths) < sum(right.accept_lengths) == sum(stale.expected_accept_lengths)
