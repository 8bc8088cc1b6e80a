from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Device and host only. At the end, everything that a transfer held must have come back."""
    yield from _checked(Rig())


@pytest.fixture
def disk_rig(tmp_path: Path) -> Iterator[Rig]:
    """Device, host and disk."""
    yield from _checked(Rig(tmp_path))


def _checked(rig: Rig) -> Iterator[Rig]:
    try:
        yield rig
    finally:
        rig.close()
    rig.check_nothing_is_held()
