"""The known tiers, fastest first. To add a tier, write its module, and add a row to `_KINDS` or call `register`."""

from __future__ import annotations

import contextlib

from sidestream.config import OffloadConfig, unknown_name
from sidestream.errors import ConfigError
from sidestream.offload.tiers import disk
from sidestream.offload.tiers.base import PersistentTier, TierContext, TierKind
from sidestream.types import DEVICE, HOST

_KINDS: list[TierKind] = [disk.KIND]


def register(kind: TierKind) -> None:
    """Add a persistent tier after the known ones, for engines of this process that are built later.

    Raises ConfigError if a tier with that name is known already.
    """
    if kind.name in names():
        raise ConfigError(f"a tier {kind.name} is known already: give the tier another name")
    _KINDS.append(kind)


def names() -> tuple[str, ...]:
    """Names of all known tiers, fastest first: the device, host memory, the persistent tiers."""
    return (DEVICE, HOST, *(kind.name for kind in _KINDS))


def open_tiers(config: OffloadConfig, context: TierContext) -> dict[str, PersistentTier]:
    """The persistent tiers that `config` asks for, by name, fastest first.

    Raises ConfigError if a tier cannot be opened or is unknown; then the others are closed.
    """
    known = {kind.name for kind in _KINDS}
    for name in config.tiers:
        if name not in known:
            raise ConfigError(unknown_name("tier", name, known))
    with contextlib.ExitStack() as undo:
        opened: dict[str, PersistentTier] = {}
        for kind in _KINDS:
            if (tier := kind.open(config, context)) is not None:
                undo.callback(tier.close)
                opened[kind.name] = tier
        undo.pop_all()
    return opened
