from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_fixtures import keys, open_tier, store
from transfer_rig import Rig

from sidestream_kv.offload import pacing
from sidestream_kv.types import Key


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Device and host only. At the end, everything that a transfer held must have come back."""
    yield from _checked(Rig())


@pytest.fixture
def disk_rig(tmp_path: Path) -> Iterator[Rig]:
    """Device, host and disk."""
    yield from _checked(Rig(tmp_path))


@pytest.fixture(params=["host", "host before a disk", "disk"])
def full_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Rig, Callable[[Key], bool]]]:
    """Room for eight blocks in one tier, and whether that tier holds a key."""
    if request.param == "disk":
        rig = Rig(tmp_path, num_slots=16, disk_blocks=8)
        assert rig.disk is not None
        holds = rig.disk.index.__contains__
    else:
        rig = Rig(tmp_path if request.param == "host before a disk" else None, num_slots=8)
        holds = rig.host_holds
    for checked in _checked(rig):
        yield checked, holds


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The directory of a disk tier that holds three blocks and is closed."""
    tier = open_tier(tmp_path / "tier")
    store(tier, *keys(1, 2, 3))
    tier.close()
    return tmp_path / "tier"


@pytest.fixture
def one_block_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the offload worker begins one block: each block of a store or load is a piece of its own."""
    monkeypatch.setattr(pacing, "BLOCKS_PER_TURN", 1)
    monkeypatch.setattr(pacing, "LOAD_PIECE_BYTES", 0)
    monkeypatch.setattr(pacing, "LAST_PIECE_BYTES", 0)


def _checked(rig: Rig) -> Iterator[Rig]:
    try:
        yield rig
    finally:
        rig.close()
    rig.check_nothing_is_held()
