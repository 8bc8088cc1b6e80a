"""An engine with the toy model and tiny pools, and a client that keeps its outputs.

Every wait has a bound and says what it waited for. `Rig.close` checks that everything came back to where it started.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from proof.faults import FaultyTier, Hold
from proof.memory_store import MemoryStore
from proof.tokenizer import ToyTokenizer
from proof.toy import ToyModel
from sidestream.client.front_end import OutputProcessor
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import Engine, Handle, build_engine
from sidestream.engine.build_plan import all_layers_bytes, block_layout
from sidestream.speculate import Proposer
from sidestream.types import CachedTokens, Delta, TokenLogprob
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.host import HostFence, HostStream
from sidestream_kv.offload.pacing import TO_DEVICE, TO_HOST
from sidestream_kv.offload.tiers.base import PersistentTier, TierContext
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes

PATIENCE_S = 20.0
# How long something that must not happen is given to happen. A pass never depends on it, a catch does.
SILENCE_S = 0.1


class Reply:
    """Everything that one request's client is told; `samples` deltas with a finish reason end it.

    read   what a front end makes of a delta before the client sees it; None: nothing
    """

    def __init__(
        self,
        samples: int = 1,
        on_delta: Callable[[Delta], None] | None = None,
        read: Callable[[Delta], Delta | None] = lambda delta: delta,
    ) -> None:
        self.deltas: list[Delta] = []
        self.handle: Handle | None = None
        self._left = samples
        self._on_delta = on_delta
        self._read = read
        self._news = threading.Condition()

    def __call__(self, told: Delta) -> None:
        if (delta := self._read(told)) is None:
            return
        with self._news:
            self.deltas.append(delta)
            self._left -= delta.finish_reason is not None
            self._news.notify_all()
        if self._on_delta is not None:
            self._on_delta(delta)

    def wait(self) -> Reply:
        with self._news:
            assert self._news.wait_for(lambda: self._left <= 0, PATIENCE_S), f"no end after {self.deltas}"
        return self

    def wait_for_tokens(self, count: int) -> Reply:
        with self._news:
            assert self._news.wait_for(lambda: len(self.token_ids()) >= count, PATIENCE_S), (
                f"not {count} tokens: {self.deltas}"
            )
        return self

    def is_silent(self) -> bool:
        """Whether no news comes for a while."""
        with self._news:
            count = len(self.deltas)
            return not self._news.wait_for(lambda: len(self.deltas) > count, SILENCE_S)

    def of(self, index: int) -> list[Delta]:
        return [delta for delta in self.deltas if delta.index == index]

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for delta in self.of(index) for token in delta.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.of(index))

    def logprobs(self, index: int = 0) -> list[TokenLogprob]:
        return [logprob for delta in self.of(index) for logprob in delta.logprobs]

    def reasons(self, index: int = 0) -> list[str]:
        return [delta.finish_reason for delta in self.of(index) if delta.finish_reason is not None]

    @property
    def reason(self) -> str:
        (reason,) = self.wait().reasons()
        return reason

    @property
    def error(self) -> str | None:
        return self.wait().deltas[-1].error

    @property
    def cached(self) -> CachedTokens:
        return self.wait().deltas[-1].cached


class Rig:
    """`blocks` and `slots` are sizes of the device pool and of the host tier (0: no offload), which is that of a cache
    process if `shared_memory` names its socket. `store`: there is a tier in it.
    """

    def __init__(
        self,
        *,
        blocks: int = 24,
        slots: int = 0,
        disk: Path | None = None,
        disk_blocks: int = 512,
        model: ToyModel | None = None,
        tokenizer: Any = None,
        load_deadline_s: float = 10.0,
        always_load: bool = True,
        write_policy: str = "all",
        proposer: Proposer | None = None,
        grammars: Any = None,
        store: MemoryStore | None = None,
        shared_memory: Path | None = None,
        read_weights: Any = None,
        **options: Any,
    ) -> None:
        self.model = model or ToyModel()
        self.tokenizer = tokenizer or ToyTokenizer()
        layout = block_layout(self.model)
        host = slots * layout.block_bytes
        tier = {"load_deadline_s": load_deadline_s, "write_policy": write_policy, "shared_memory": shared_memory}
        offload = OffloadConfig(host, **tier) if slots else None  # type: ignore[arg-type]
        self.disk: FaultyTier | None = None
        if disk is not None:
            capacity = disk_blocks * entry_bytes(layout)
            self.disk = FaultyTier(
                DiskTier.open(disk, layout=layout, fingerprint=self.model.fingerprint, capacity_bytes=capacity)
            )
        tiers: dict[str, PersistentTier] = {"disk": self.disk} if self.disk is not None else {}
        if store is not None:
            tiers |= {"redis": store.tier(TierContext(layout, self.model.fingerprint))}
        sizes = {
            "block_tokens": layout.block_tokens,
            "chunk_tokens": 16,
            "token_budget": 24,
            "max_running": 4,
            **options,
        }
        config = EngineConfig(
            kv_memory=blocks * all_layers_bytes(self.model), offload=offload, compute_threads=1, **sizes
        )
        self.engine: Engine = build_engine(
            self.model,
            config,
            eos_ids=self.tokenizer.eos_ids,
            tiers=tiers or None,
            proposer=proposer,
            grammars=grammars,
            read_weights=read_weights,
        )
        if always_load and self.engine.parts.costs is not None:
            self.engine.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # no test hangs on measured speeds
        self._holds: list[Hold] = []
        self._making = threading.Lock()
        self._make_stream, self.device.stream = self.device.stream, self._stream  # type: ignore[method-assign]

    # ------------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 8,
        *,
        on_delta: Callable[[Delta], None] | None = None,
        **params: Any,
    ) -> Reply:
        priority, cache_salt = params.pop("priority", 0), params.pop("cache_salt", "")
        name = params.pop("name", "")
        chosen = SamplingParams(max_tokens=max_tokens, **params)
        output = OutputProcessor(self.tokenizer, chosen)
        submitted = threading.Lock()

        def read(told: Delta) -> Delta | None:
            delta = output.read(told)
            if delta is not None and delta.finish_reason is not None and told.finish_reason is None:
                with submitted:
                    assert reply.handle is not None
                self.engine.abort(reply.handle.sample(delta.index), reason=delta.finish_reason)
            return delta

        reply = Reply(chosen.n, on_delta, read)
        with submitted:
            reply.handle = self.engine.submit(
                prompt, chosen, reply, priority=priority, cache_salt=cache_salt, name=name
            )
        return reply

    def ask(self, prompt: Sequence[int], max_tokens: int = 8, **params: Any) -> Reply:
        """Submit, wait, and compare with what the model draws without any pool."""
        reply = self.submit(prompt, max_tokens, **params)
        self.expect(reply, prompt, max_tokens)
        return reply

    def expect(self, reply: Reply, prompt: Sequence[int], max_tokens: int = 8) -> None:
        assert reply.wait().token_ids() == self.model.expected(list(prompt), max_tokens), reply.deltas
        assert reply.reason == "length"

    def abort(self, reply: Reply) -> None:
        assert reply.handle is not None
        self.engine.abort(reply.handle)

    # ------------------------------------------------------------------ the engine's insides

    @property
    def device(self) -> CpuDevice:
        assert isinstance(self.engine.parts.device, CpuDevice)
        return self.engine.parts.device

    def _stream(self, name: str) -> HostStream:
        """The stream of that name: one that a test made earlier, or a new one."""
        with self._making:
            return self.device._streams.get(name) or self._make_stream(name)

    def hold(self, stream: str) -> Hold:
        """Keep a stream from going on; `"store"` and `"load"` are all streams of their direction."""
        lanes = {"store": TO_HOST, "load": TO_DEVICE}
        names = [f"{stream}-{number}" for number in range(lanes[stream].streams)] if stream in lanes else [stream]
        hold = Hold(*map(self._stream, names))
        self._holds.append(hold)
        return hold

    def turn(self) -> None:
        """Let the loop go round at least once."""
        self.engine.call(lambda: None)
        self.engine.call(lambda: None)

    def turn_until(self, happened: Callable[[], bool]) -> None:
        """Until something holds that the engine thread brings about; looked at from here, so it must be safe to look
        at.
        """
        until = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < until, "it never happened"
            time.sleep(0.001)  # a thread that never sleeps keeps the engine thread from the interpreter lock

    def settle(self) -> None:
        """Until no transfer is on its way."""
        assert self.engine.flush(timeout_s=PATIENCE_S), "transfers do not end"

    def forget_device(self) -> None:
        """As if other requests had pushed everything out of the device pool."""
        self.engine.call(self.engine.parts.blocks.forget_all)

    def forget_host(self) -> None:
        assert self.engine.parts.tiers is not None
        self.engine.call(self.engine.parts.tiers.host.pool.forget_all)

    def counted(self, name: str, *labels: str) -> int:
        return int(self.engine.parts.metrics.value(name, *labels))

    def sizes(self) -> dict[str, int]:
        """How many things the engine keeps by request, transfer or step."""
        parts = self.engine.parts
        kept = {"output streams": len(self.engine.streams), **parts.scheduler.sizes()}
        return kept if parts.transfers is None else kept | parts.transfers.sizes()

    def check_idle(self) -> None:
        """Everything is back where it was at the start."""
        parts = self.engine.parts
        assert self.engine.unfinished == 0
        assert set(self.sizes().values()) == {0}, self.sizes()
        pools = [parts.blocks, parts.scheduler.slots, parts.executor._mailbox._pool]
        if parts.tiers is not None:
            pools.append(parts.tiers.host.pool)
        for pool in pools:
            pool.check()
            assert pool.num_used == 0, f"{pool.num_used} {pool.name} are still in use"
        if self.disk is not None:
            assert len(self.disk.index._idle) == len(self.disk.index), "an entry on disk is still pinned"
        assert set(self.device.host_waits()) <= {"step", "new weights"}

    def close(self, **options: Any) -> None:
        for hold in self._holds:
            hold.release()
        self.engine.close(**options)


def passed(rig: Rig, stream: str) -> None:
    """Wait until a stream has passed what it was given so far."""
    fence = rig.device._streams[stream].submit(lambda: None)
    assert isinstance(fence, HostFence)
    assert fence.block(PATIENCE_S), f"stream {stream} is stuck"


def prompts(seed: int, count: int, *, longest: int = 30, shared: int = 0, vocab: int = 97) -> list[list[int]]:
    """Random prompts; each starts with a part (maybe all) of one shared run."""
    rng = random.Random(seed)
    run = [rng.randrange(1, vocab) for _ in range(shared)]
    return [
        run[: rng.randint(0, shared)] + [rng.randrange(1, vocab) for _ in range(rng.randint(1, longest))]
        for _ in range(count)
    ]


@contextlib.contextmanager
def serving(**options: Any) -> Any:
    """A rig that must come back to its start."""
    rig = Rig(**options)
    try:
        yield rig
    finally:
        rig.close()
    rig.check_idle()
