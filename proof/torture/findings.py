"""What the torture tests of real devices find, and the silence in which they inject failures."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sidestream_kv.kv.pool import FencedPool

_TOLD = 20


@dataclass(slots=True)
class Findings:
    """Errors of a run: their number, and the first ones as sentences."""

    wrong: int = 0
    findings: list[str] = field(default_factory=list)

    def find(self, text: str, count: int = 1) -> None:
        """Add an error, which counts as `count`."""
        self.wrong += count
        if len(self.findings) < _TOLD:
            self.findings.append(text)

    def check_pools(self, pools: Iterable[FencedPool]) -> None:
        """Add the blocks that are in use though all work has ended."""
        for pool in pools:
            pool.check()
            if pool.num_used:
                self.find(f"{pool.num_used} of {pool.name} are still in use though all has ended")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Do not log injected failures."""
    logger = logging.getLogger("sidestream")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
