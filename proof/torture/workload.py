"""The inputs of a schedule as plain values: requests, pool sizes, events and faults. Seeds draw them (`drawing.py`).

Times are counted in engine steps; delays of operations are in the device's virtual seconds. Every request fits into the
block pool with all of its outputs, so it may have to wait, but is never rejected (except if a workload limits the
queue).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from proof.mutations import Feature
from sidestream.errors import ConfigError

BLOCK_TOKENS = 4
VOCAB = 97
LARGE_VOCAB = 70_001
"""A vocabulary whose ids do not fit into 16 bits."""
LONGEST_PROMPT = 40
# Longest time that a request waits for a load from disk.
LOAD_DEADLINE_S = 1e-3

HEADER_PART, BLOCK_PART = 52 / 4288, 192 / 4288
"""Share of the header's fields, and of the block, in the file of a toy model's block."""

NEUTRAL = (1.0, 0.0, 0.0)
"""Repetition, presence and frequency penalty that change nothing."""

EventKind = Literal["reset", "weights", "crash", "restart", "hang_up", "device_lost", "copies_lost", "rank_lost"]
"""Kinds of events:

reset         the cache is reset
weights       the weights are updated
crash         the process is killed, and a new engine opens the same disk
restart       the engine is closed, and a new engine opens the same disk
hang_up       a front end dies, and is replaced
device_lost   the device refuses all work, so the engine fails, and a new engine opens the same disk
copies_lost   the device refuses the work of the offload worker, with the same consequence
rank_lost     a rank other than 0 is killed, so the engine fails, and a new engine with all ranks opens the same disks
"""

Operation = Literal["read", "write", "store", "load", "forward", "heads", "get", "put"]
"""Operations that faults affect. On the disk tier: read and write. On the device: `store` (copy to the host), `load`
(copy from the host) and a forward pass. On the shared store: `heads` (look for blocks), `get` and `put`.
"""

FaultKind = Literal["slow", "late", "lost", "torn", "full", "truncated", "flipped", "swapped", "nan", "emptied"]
"""Effect of a fault on an operation:

slow        the operation starts late
late        the bytes are copied immediately, but the operation's end is signalled much later
lost        no byte is copied, and the operation fails
torn        half of the bytes are copied, then the operation fails
full        the operation fails, because no space is left
truncated   the file loses its end: before the operation if it is a read, after it if it is a write
flipped     one bit of the file changes: before the operation if it is a read, after it if it is a write
swapped     the names of this file and of another entry's file are exchanged: before a read, after a write
nan         the logits are NaN, and the step writes wrong KV
emptied     the store has lost all values before the operation, as after a restart

Of the store, the first values are damaged; `swapped` exchanges their blocks, but not their headers.
"""

FAULTS_OF: Mapping[Operation, tuple[FaultKind, ...]] = {
    "read": ("slow", "late", "lost", "torn", "truncated", "flipped", "swapped"),
    "write": ("slow", "late", "lost", "full", "truncated", "flipped", "swapped"),
    "store": ("slow", "late", "lost", "torn"),
    "load": ("slow", "late", "lost", "torn"),
    "forward": ("slow", "late", "lost", "nan"),
    "heads": ("slow", "lost", "emptied"),
    "get": ("slow", "lost", "emptied", "truncated", "flipped", "swapped"),
    "put": ("slow", "lost", "full", "emptied", "truncated", "flipped", "swapped"),
}

OF_STORE: tuple[Operation, ...] = ("heads", "get", "put")
"""Operations on the shared store."""

DAMAGE: tuple[FaultKind, ...] = ("truncated", "flipped", "swapped")
"""Faults that damage files, or values of the store."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    at         the request arrives before this step
    abort_at   the client aborts the request before this step; None: never
    hot        True: temperature 20, so that tokens also depend on random numbers and penalties; False: greedy
    penalties  repetition, presence, frequency; None: none
    bias       tokens, each with the number that is added to its logit
    salt       cache salt: KV is shared only between requests with the same salt
    grammar    the form of its answers (`ToyGrammars`); empty: any
    """

    at: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    priority: int = 0
    abort_at: int | None = None
    hot: bool = False
    penalties: tuple[float, float, float] | None = None
    bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    salt: str = ""
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """An event that affects the whole engine, before step `at`."""

    at: int
    kind: EventKind


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the operation with number `first` (from 0, counted for each kind of operation), and of every
    `every`-th operation after it; 0: of no other.

    seconds   the delay
    place     for damage to a file: position of the flipped byte, or length of the kept part, as a share of the file's
              length; 1.0: the last byte is flipped or lost
    entries   number of files that are damaged: those that were used last
    """

    operation: Operation
    kind: FaultKind
    first: int
    every: int = 0
    seconds: float = 0.0
    place: float = 1.0
    entries: int = 1

    def hits(self, number: int) -> bool:
        """Whether the fault affects operation `number`."""
        return number == self.first or (
            self.every > 0 and number > self.first and (number - self.first) % self.every == 0
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """All inputs of a schedule except the policy.

    blocks, slots, disk_blocks   sizes of the device pool, the host tier (0: none) and the disk tier (0: none)
    eos_every                    about one in this many tokens is the end of sequence; 0: none
    layer_groups                 load blocks layer by layer, and cut every copy into slices
    large_groups                 with layer groups: two of them, the last one with fewer layers. False: up to four
    turn_blocks                  with layer groups: blocks of a piece of a store. If it is 1, a piece may end before the
                                 next one begins
    captured                     capture CUDA graphs of forward passes in a few shapes, also of passes that wait for
                                 loads
    drafts                       draft tokens per row and step; 0: no speculation
    hidden                       draft from hidden states, which are kept for each row and in each block
    closes_at                    close the engine before this step, with requests running; None: at the end
    flush_s                      seconds that a close waits for transfers; transfers that have not started by then are
                                 dropped
    pin_s                        virtual seconds until all slots of the host tier are ready; 0: from the start
    pin_lag                      how many times longer this takes on the ranks other than 0
    meanwhile                    requests arrive and abort in the middle of a step, between launch and commit, if the
                                 engine runs a step
    front_ends                   front ends between clients and engine, on in-memory connections; 0: clients call the
                                 engine directly
    states                       recurrent states on the device, of a model that keeps one for each request; 0: none
    waiting                      with front ends: maximum number of waiting requests; more are rejected
    ranks                        number of ranks (tensor parallelism); each has its own streams, memories and disk tier
    self_check                   share of steps that run twice, and of blocks in host memory that have a checksum
    vocab                        number of tokens of the model
    window                       tokens of the sliding windows of some layers; 0: no layer has one
    store                        there is a tier in a store, where another engine has stored some blocks
    shared_memory                the host tier is memory of a cache process, which a neighbour uses, too
    shared_disk                  a neighbour uses the directory of the disk tier, too
    """

    seed: int
    requests: tuple[Asked, ...]
    events: tuple[Event, ...] = ()
    faults: tuple[Fault, ...] = ()
    blocks: int = 24
    slots: int = 0
    disk_blocks: int = 0
    max_running: int = 3
    chunk_tokens: int = 8
    eos_every: int = 0
    asynchronous: bool = True
    layer_groups: bool = True
    large_groups: bool = False
    turn_blocks: int = 2
    captured: bool = False
    drafts: int = 0
    hidden: bool = False
    closes_at: int | None = None
    flush_s: float = 30.0
    meanwhile: bool = False
    pin_s: float = 0.0
    pin_lag: float = 1.0
    front_ends: int = 0
    waiting: int = 1024
    states: int = 0
    ranks: int = 1
    self_check: float = 0.0
    window: int = 0
    vocab: int = VOCAB
    store: bool = False
    shared_memory: bool = False
    shared_disk: bool = False

    def __post_init__(self) -> None:
        largest = max((blocks_for(asked) for asked in self.requests), default=0)
        if self.blocks < largest:
            raise ConfigError(
                f"the workload's pool has {self.blocks} blocks, its largest request takes {largest}: give it as many"
            )
        if self.disk_blocks and not self.slots:
            raise ConfigError("the workload has a disk tier, but no host tier: blocks go to disk through host memory")
        if not self.slots and (self.store or self.shared_memory):
            raise ConfigError("the workload shares a store or host memory, but has no host tier: give it slots")
        if self.shared_disk and not self.disk_blocks:
            raise ConfigError("the workload shares a disk tier, but has none: give it disk_blocks")

    @property
    def leaves_hidden(self) -> bool:
        """Whether KV blocks also hold hidden states."""
        return self.drafts > 0 and self.hidden

    @property
    def has_twins(self) -> bool:
        """Whether two prompts with the same salt have a block of equal tokens at the same position after different
        prefixes.
        """
        size, before = BLOCK_TOKENS, dict[tuple[object, ...], tuple[int, ...]]()
        for asked in self.requests:
            for start in range(size, len(asked.prompt) - size, size):
                block = (asked.salt, start, asked.prompt[start : start + size])
                if before.setdefault(block, asked.prompt[:start]) != asked.prompt[:start]:
                    return True
        return False

    @property
    def features(self) -> frozenset[Feature]:
        """Names of the `FEATURES` that the workload exercises."""
        return frozenset(name for name, holds in FEATURES.items() if holds(self))


def _befalls(*pairs: tuple[Operation, FaultKind]) -> Callable[[Workload], bool]:
    return lambda workload: any((fault.operation, fault.kind) in pairs for fault in workload.faults)


def _happens(*kinds: EventKind) -> Callable[[Workload], bool]:
    return lambda workload: any(event.kind in kinds for event in workload.events)


FEATURES: Mapping[Feature, Callable[[Workload], bool]] = {
    "abort": lambda w: any(asked.abort_at is not None for asked in w.requests),
    "captured": lambda w: w.captured,
    "bad_logits": _befalls(("forward", "nan")),
    "border": lambda w: w.front_ends > 0,
    "cache_salts": lambda w: len({asked.salt for asked in w.requests}) > 1,
    "close": lambda w: w.closes_at is not None or any(event.kind == "restart" for event in w.events),
    "corrupt_tier": lambda w: any(f.kind in DAMAGE and f.operation not in OF_STORE for f in w.faults),
    "device_loss": _happens("device_lost", "copies_lost"),
    "disk": lambda w: w.disk_blocks > 0,
    "failing_copy": _befalls(("store", "lost"), ("store", "torn"), ("load", "lost"), ("load", "torn")),
    "failing_step": _befalls(("forward", "lost")),
    "failing_load": _befalls(("load", "lost"), ("load", "torn")),
    "failing_tier": _befalls(("read", "lost"), ("read", "torn"), ("write", "lost"), ("write", "full")),
    "flipped_block": lambda w: any(
        f.kind == "flipped" and f.operation not in OF_STORE and 1.0 - BLOCK_PART <= f.place < 1.0 for f in w.faults
    ),
    "full_queue": lambda w: w.front_ends > 0 and w.waiting + w.max_running < sum(asked.n for asked in w.requests),
    "grammar": lambda w: any(asked.grammar for asked in w.requests),
    "growing_tier": lambda w: w.slots > 1 and w.pin_s > 0,
    "hang_up": lambda w: w.front_ends > 0 and any(event.kind == "hang_up" for event in w.events),
    "hidden_states": lambda w: w.leaves_hidden,
    "layer_groups": lambda w: w.layer_groups,
    "logprobs": lambda w: len({asked.logprobs is None for asked in w.requests}) > 1,
    "meanwhile": lambda w: w.meanwhile,
    "min_tokens": lambda w: any(asked.min_tokens for asked in w.requests),
    "offload": lambda w: w.slots > 0,
    "penalties": lambda w: any(asked.penalties not in (None, NEUTRAL) for asked in w.requests),
    "preempt": lambda w: w.max_running > 1 and w.blocks < sum(blocks_for(asked) * asked.n for asked in w.requests),
    "rank_loss": _happens("rank_lost"),
    "ranks": lambda w: w.ranks > 1,
    "priority": lambda w: len({asked.priority for asked in w.requests}) > 1,
    "reset": _happens("reset"),
    "restart": _happens("crash", "restart"),
    "sampling": lambda w: any(asked.penalties is not None or asked.bias or asked.min_tokens for asked in w.requests),
    "self_check": lambda w: w.self_check > 0,
    "shared_disk": lambda w: w.shared_disk,
    "shared_memory": lambda w: w.shared_memory,
    "slow_load": _befalls(("load", "slow"), ("load", "late")),
    "slow_tier": _befalls(("read", "slow"), ("read", "late"), ("write", "slow"), ("write", "late")),
    "speculative": lambda w: w.drafts > 0,
    "states": lambda w: w.states > 0,
    "store": lambda w: w.store,
    "swapped_files": _befalls(("read", "swapped"), ("write", "swapped")),
    "twins": lambda w: w.has_twins,
    "weights": _happens("weights"),
    "window": lambda w: w.window > 0,
}
"""Feature name → test of a workload. Mutations (`proof.mutations`) name the features that they need."""


def blocks_for(asked: Asked) -> int:
    """Largest number of device blocks that one sample of a request needs."""
    return -(-(len(asked.prompt) + asked.max_tokens) // BLOCK_TOKENS)


# ------------------------------------------------------------------ JSON


def plain(workload: Workload) -> dict[str, Any]:
    """The workload as JSON values."""
    return dataclasses.asdict(workload)


def from_plain(values: object) -> Workload:
    """The workload from the result of `plain`. Raises ConfigError if the value is not such a result."""
    try:
        return _workload(values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"the workload cannot be read: {error}") from error


def _workload(values: Any) -> Workload:
    workload = msgspec.convert(values, Workload)
    parts = [(values, workload)]
    for name in ("requests", "events", "faults"):
        parts += zip(values[name], getattr(workload, name), strict=True)
    for given, part in parts:
        for name, value in given.items():
            if name not in type(part).__dataclass_fields__:
                raise ValueError(f"unknown field {name}")
            if isinstance(value, int | float) and name != "priority" and value < 0:
                raise ValueError(f"{name} is {value!r}: it must not be negative")
    for asked in workload.requests:
        if not asked.prompt or not all(0 < token < workload.vocab for token in asked.prompt):
            raise ValueError(f"a prompt is {[*asked.prompt]}, not a list of tokens from 1 to {workload.vocab - 1}")
    for fault in workload.faults:
        if fault.kind not in FAULTS_OF[fault.operation]:
            raise ValueError(f"no {fault.operation} is {fault.kind}")
    return workload
