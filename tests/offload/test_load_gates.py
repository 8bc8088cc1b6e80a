"""Which fences of a load a layer waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from sidestream_kv.offload.connector import _Load
from sidestream_kv.offload.tickets import LoadSubmitted, Part
from sidestream_kv.types import LoadPlan


def test_a_layer_waits_for_the_last_slice_of_earlier_pieces_and_of_its_group() -> None:  # H5
    fences: Any = [object() for _ in range(8)]
    first, second, of_group_0, of_group_1 = (Part(tuple(fences[at : at + 2]), 64) for at in range(0, 8, 2))
    load = _Load(LoadPlan(1, 0, (), (), ()), LoadSubmitted(1, (first, second), (of_group_0, of_group_1)))
    assert load.gates(0) == (fences[1], fences[3], fences[5])
    assert load.gates(1) == (fences[1], fences[3], fences[7])


@dataclass(frozen=True)
class Settled:
    """A fence whose state the test chooses."""

    done: bool
    failure: BaseException | None = None
    stream: str = "load"
    tick: int = 1

    def poll(self) -> bool:
        return self.done


FAILED, GOOD, LATE = Settled(True, OSError("injected")), Settled(True), Settled(False)


@pytest.mark.parametrize("done", [0, 1, 31, 32, 200, 255, 256])
def test_few_slices_are_polled_to_tell_how_much_of_a_load_has_arrived(
    done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled: list[int] = []
    monkeypatch.setattr(Settled, "poll", lambda self: polled.append(self.tick) or self.done)  # type: ignore[func-returns-value]
    slices: Any = [Settled(at < done, tick=at) for at in range(256)]
    parts = [Part(tuple(slices[at : at + 32]), 64) for at in range(0, 256, 32)]
    load = LoadSubmitted(1, tuple(parts[:4]), tuple(parts[4:]))
    left = load.bytes_left()
    assert left == [max(0, min(64, (32 * (at + 1) - done) * 2)) for at in range(8)]
    assert len(polled) <= 6 * (done // 32 + 1)


@pytest.mark.parametrize(
    ("fences", "has_failed"),
    [
        ((GOOD, GOOD), False),
        ((GOOD, LATE), False),
        ((GOOD, FAILED), True),
        ((FAILED, LATE), True),
        ((GOOD, Settled(False, OSError("injected"))), False),  # its bytes may still move
    ],
)
def test_a_load_has_failed_if_one_of_its_slices_ended_with_an_error(
    fences: tuple[Settled, Settled], has_failed: bool
) -> None:
    load = _Load(LoadPlan(1, 0, (), (), ()))
    assert not load.has_failed(), "no slice was submitted yet"
    load.submitted = LoadSubmitted(1, (Part(fences[:1], 1),), (Part(fences[1:], 1),))
    assert load.has_failed() is has_failed
    load.reported = True
    assert not load.has_failed(), "the failure was reported"
