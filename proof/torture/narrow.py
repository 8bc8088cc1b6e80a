"""Reduces the limits of copy streams ("lanes"), so that even small transfers are cut into several pieces and slices,
which may finish out of order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from sidestream_kv.offload import pacing
from sidestream_kv.offload.pacing import Pace


@contextlib.contextmanager
def narrow_lanes(*, in_flight: int = 3, turn_blocks: int = 2) -> Iterator[None]:
    """Affects the transfer engines that are built in this context. A slice has one segment, `in_flight` slices run at a
    time, and a piece has `turn_blocks` blocks. With three slices in flight, a copy of an earlier layer may fail after
    all slices were submitted.
    """
    pieces = {"BLOCKS_PER_TURN": turn_blocks, "LOAD_PIECE_BYTES": 0, "LAST_PIECE_BYTES": 0}
    lanes = {name: getattr(pacing, name) for name in ("TO_HOST", "TO_DEVICE", "TO_DEVICE_BESIDE_COPIES")}
    kept = lanes | {name: getattr(pacing, name) for name in pieces}
    vars(pacing).update(pieces | {name: _narrow(pace, in_flight) for name, pace in lanes.items()})
    try:
        yield
    finally:
        vars(pacing).update(kept)


def _narrow(pace: Pace, in_flight: int) -> Pace:
    return replace(pace, slice_segments=1, segments_in_flight=in_flight)
