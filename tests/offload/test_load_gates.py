"""Which fences of a load a layer waits for."""

from __future__ import annotations

from typing import Any

from sidestream.offload.connector import _Load
from sidestream.offload.messages import LoadSubmitted, Part
from sidestream.types import LoadPlan


def test_layer_waits_for_the_last_slice_of_all_earlier_pieces_and_of_its_own_group() -> None:  # H5
    fences: Any = [object() for _ in range(8)]
    first, second, of_group_0, of_group_1 = (Part(tuple(fences[at : at + 2]), 64) for at in range(0, 8, 2))
    load = _Load(LoadPlan(1, 0, (), (), ()), LoadSubmitted(1, (first, second), (of_group_0, of_group_1)))
    assert load.gates(0) == (fences[1], fences[3], fences[5])
    assert load.gates(1) == (fences[1], fences[3], fences[7])
