"""The parts of an engine. `build_engine` makes them; afterwards the engine owns them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidestream.config import SamplingDefaults
from sidestream.engine.inbox import Inbox
from sidestream.engine.kv_events import KVEvents
from sidestream.grammar import Grammars
from sidestream.ranks.leader import Ranks
from sidestream.runner.executor import Executor
from sidestream.schedule.limits import Bounds
from sidestream.schedule.scheduler import Scheduler
from sidestream_kv.device.base import Device
from sidestream_kv.kv.layout import BlockLayout, KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.kv.state_layout import StateRegion
from sidestream_kv.metrics import Metrics, Timeline
from sidestream_kv.offload.connector import OffloadConnector
from sidestream_kv.offload.loads import CostModel
from sidestream_kv.offload.tiers.stack import TierStack

if TYPE_CHECKING:  # importing transformers takes seconds
    from sidestream.models.lora import Adapters


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one engine.

    eos_ids       token ids that end an answer
    defaults      sampling options for requests that leave them out
    bounds        upper bounds of requests
    asynchronous  whether a step is launched before the previous step is committed
    salt          salt of the block keys
    proposer      name of the proposer of drafts, for metrics; empty: no speculative decoding
    states        the pool of recurrent states; None: the model has none
    state_region  location of the states in the memory of the blocks
    ranks         the other ranks of tensor parallelism; None: the engine has one rank
    kv_events     publishes which blocks can be reused; None: no events
    self_check    share of steps that run twice
    grammars     compiles the forms of answers; None: the engine has no tokenizer, and refuses structured outputs
    adapters     matrices of the model's LoRA adapters; None: it has none
    read_weights  reads a checkpoint, and returns work for the compute stream that takes its weights, and its
                  fingerprint. None: the engine was built without a checkpoint
    watchdog_timeout_s  seconds after which a turn of the engine thread counts as hanging
    """

    device: Device
    scheduler: Scheduler
    executor: Executor
    blocks: FencedPool
    layout: KVLayout
    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults
    metrics: Metrics
    bounds: Bounds
    inbox: Inbox
    asynchronous: bool
    salt: str = ""
    transfers: OffloadConnector | None = None
    tiers: TierStack | None = None
    costs: CostModel | None = None
    proposer: str = ""
    max_drafts: int = 0
    timeline: Timeline | None = None
    states: FencedPool | None = None
    state_region: StateRegion | None = None
    ranks: Ranks | None = None
    kv_events: KVEvents | None = None
    self_check: float = 0.0
    grammars: Grammars | None = None
    adapters: Adapters | None = None
    read_weights: Callable[[str], tuple[Callable[[], None], str]] | None = None
    watchdog_timeout_s: float = math.inf

    @property
    def key_layout(self) -> BlockLayout:
        """The layout on which the keys of blocks depend: that of the tiers, whose blocks come back to the device."""
        return self.layout if self.tiers is None else self.tiers.host.layout
