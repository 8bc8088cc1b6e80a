"""What the processes of a crash test share: paths, requests, and the right answers and blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proof.torture.contents import Contents, contents_of
from proof.torture.oracle import SALT, reference_of, toy_of
from proof.torture.script import ScriptedModel
from proof.torture.workload import BLOCK_TOKENS, VOCAB, Asked, Workload
from sidestream.config import EngineConfig
from sidestream_kv.config import OffloadConfig
from sidestream_kv.offload.tiers.disk import entry_bytes
from sidestream_kv.offload.tiers.store_tier import value_bytes

_PROMPTS, _MAX_TOKENS = 24, 4
# Too few for all prompts, so that engines evict each other's blocks all the time.
_BLOCKS, _SLOTS, _DISK_BLOCKS, _VALUES = 12, 16, 24, 48
# A store that stalls must not make a request slow.
_STORE_TIMEOUT_S = 0.2


@dataclass(frozen=True, slots=True)
class Place:
    """Paths, requests, and what is right.

    store_url   a Redis server's; empty: there is no store
    answers     the tokens that each request must receive
    contents    the bytes of each key's block
    """

    root: Path
    store_url: str
    workload: Workload
    answers: Sequence[Sequence[int]]
    contents: Contents

    @classmethod
    def make(cls, root: Path, store_url: str, seed: int) -> Place:
        """Draw prompts, many of which begin alike, and compute their answers and blocks."""
        rng = random.Random(f"sidestream crash {seed}")
        trunks = [_tokens(rng, 12) for _ in range(4)]
        prompts = [
            rng.choice(trunks)[: rng.choice((4, 8, 12))] + _tokens(rng, rng.randint(3, 12)) for _ in range(_PROMPTS)
        ]
        workload = Workload(seed, tuple(Asked(0, prompt, _MAX_TOKENS) for prompt in prompts))
        reference = reference_of(workload)
        answers = [reference.samples[0][number, 0].tokens for number in range(_PROMPTS)]
        return cls(root, store_url, workload, answers, contents_of(workload, reference))

    @property
    def disk(self) -> Path:
        """The shared directory."""
        return self.root / "disk"

    @property
    def socket(self) -> Path:
        """Where the cache process listens."""
        return self.root / "cache"

    def model(self) -> ScriptedModel:
        """The model of every engine."""
        return ScriptedModel(toy_of(self.workload))

    def config(self, model: ScriptedModel) -> EngineConfig:
        """The options of every engine."""
        layout = model.layout
        store = {"url": self.store_url, "timeout_s": _STORE_TIMEOUT_S, "capacity": _VALUES * value_bytes(layout)}
        return EngineConfig(
            kv_memory=_BLOCKS * layout.block_bytes,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=2 * BLOCK_TOKENS,
            token_budget=4 * BLOCK_TOKENS,
            max_running=3,
            salt=SALT,
            compute_threads=1,
            offload=OffloadConfig(
                _SLOTS * layout.block_bytes,
                shared_memory=self.socket,
                disk=self.disk,
                disk_capacity=_DISK_BLOCKS * entry_bytes(layout),
                tiers={"redis": store} if self.store_url else {},
                write_policy="all",
            ),
        )


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCAB) for _ in range(count))
