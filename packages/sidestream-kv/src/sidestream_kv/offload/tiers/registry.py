"""The known tiers, fastest first. To add a tier, write its module, and add a row to `_KINDS` or call `register`."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from sidestream_kv.config import OffloadConfig, parse_bytes, unknown_name
from sidestream_kv.errors import ConfigError
from sidestream_kv.offload.tiers import disk
from sidestream_kv.offload.tiers.base import PersistentTier, TierContext, TierKind
from sidestream_kv.types import DEVICE, HOST

_KINDS: list[TierKind] = [disk.KIND]


def register(kind: TierKind) -> None:
    """Add a persistent tier after the known tiers, for engines that this process builds later.

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

    Raises ConfigError if a tier cannot be opened or is unknown; tiers that were opened before are closed again.
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


def share_of_rank(config: OffloadConfig, rank: int, size: int) -> OffloadConfig:
    """The tier options of one of `size` ranks: its share of the bytes, and its own disk directory under `config.disk`.

    Raises ConfigError if the directory holds blocks of another number of ranks, or if `config` asks for a tier other
    than the disk: Sidestream cannot divide the options of such a tier.
    """
    if size == 1:
        return config
    if config.tiers:
        raise ConfigError(
            f"tier {next(iter(config.tiers))} cannot be used with {size} ranks, because only host memory and the disk "
            "can be divided among ranks: remove the tier, or use one rank"
        )
    disk = None
    if config.disk is not None:
        root = Path(config.disk).expanduser()
        names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
        if strange := next((name for name in names if not name.endswith(f"-of-{size}")), None):
            raise ConfigError(
                f"disk directory {root} holds {strange}, which {size} ranks cannot use, because a directory is for one "
                "number of ranks: give another directory, or empty this one"
            )
        disk = root / f"rank-{rank}-of-{size}"
    return dataclasses.replace(
        config,
        host=config.host_bytes // size,
        disk=disk,
        disk_capacity=parse_bytes(config.disk_capacity, option="offload disk_capacity") // size,
    )
