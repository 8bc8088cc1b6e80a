"""The options of a persistent tier behind another engine's own offload. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidestream_kv.config import OffloadConfig, options_checked, parse_bytes
from sidestream_kv.errors import ConfigError
from sidestream_kv.kv.layout import BlockLayout
from sidestream_kv.offload.tiers.base import PersistentTier, TierContext
from sidestream_kv.offload.tiers.stack import open_tiers


@options_checked(ConfigError)
@dataclass(frozen=True, slots=True)
class TierOptions:
    """What a user gives for a tier. The first four are those of OffloadConfig.

    disk             directory of the disk tier; each engine, or each rank of one, has a subdirectory
    disk_capacity    bytes that each subdirectory may take
    load_deadline_s  seconds after which a load that has not begun is given up, and its KV computed
    tiers            instead of `disk`: options of another persistent tier, by its name
    threads          reads, and writes, at the same time
    max_pending      bytes of host memory that may wait to be written; blocks beyond are not stored
    fingerprint      name of the weights; None: hash of the checkpoint's files and the configuration
    """

    disk: str | None = None
    disk_capacity: int | str = "10GiB"
    load_deadline_s: float = 10.0
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    threads: int = 4
    max_pending: int | str = "1GiB"
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.threads, int) or not 1 <= self.threads <= 64:
            raise ConfigError(f"threads is {self.threads!r}: give a whole number from 1 to 64")
        if bool(self.disk) + len(self.tiers) != 1:
            raise ConfigError(
                f"a tier has one medium, not {[*filter(None, [self.disk]), *self.tiers]}: give `disk`, a directory, or "
                "one of `tiers` (for vLLM, a second medium is another entry of secondary_tiers)"
            )
        parse_bytes(self.max_pending, option="max_pending")

    @property
    def max_pending_bytes(self) -> int:
        """`max_pending` in bytes."""
        return parse_bytes(self.max_pending, option="max_pending")

    def open(self, subdirectory: str, layout: BlockLayout, fingerprint: str) -> PersistentTier:
        """Open the medium. `subdirectory` tells engines and ranks apart, whose blocks of one key may differ. Raises
        ConfigError if another engine uses the medium or another model made it.
        """
        config = OffloadConfig(
            disk=None if self.disk is None else Path(self.disk) / subdirectory,
            disk_capacity=self.disk_capacity,
            load_deadline_s=self.load_deadline_s,
            tiers=self.tiers,
        )
        if self.disk is None:
            fingerprint = f"{fingerprint} {subdirectory}"  # rule: rank-has-its-part-of-a-store
        (tier,) = open_tiers(config, TierContext(layout, fingerprint)).values()
        return tier
