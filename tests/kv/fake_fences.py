"""Streams whose work ends when the test says so."""

from __future__ import annotations

from dataclasses import dataclass


class FakeStream:
    """Hands out fences in order; `finish` completes them in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tick = 0
        self.done_tick = 0

    def record(self) -> FakeFence:
        self.tick += 1
        return FakeFence(self, self.tick)

    def finish(self, *, up_to: int | None = None) -> None:
        self.done_tick = self.tick if up_to is None else up_to


@dataclass(frozen=True, slots=True, eq=False)
class FakeFence:
    on: FakeStream
    tick: int
    failure: BaseException | None = None

    @property
    def stream(self) -> str:
        return self.on.name

    def poll(self) -> bool:
        return self.on.done_tick >= self.tick
