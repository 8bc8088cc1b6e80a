"""A lost device, and one without memory: errors that clients get, and blocks that survive on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import PATIENCE_S, Reply

from proof.toy import ToyModel
from sidestream.attention.paged import PagedBatch
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import Engine, build_engine
from sidestream.errors import DeviceLost, EngineStopped, OutOfDeviceMemory
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.channel import Bell
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.host import HostFence, HostStream
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes
from sidestream_kv.offload.worker import OffloadWorker
from sidestream_kv.types import Accesses, Fence

FIRST = list(range(1, 30))
OTHERS = [list(range(first, first + 25)) for first in (40, 41, 42)]
WHY = "the GPU is lost: injected: an illegal memory access was encountered; restart the process"


class MortalStream(HostStream):
    """Once its device is lost, it takes nothing, and says to no host thread of a fence that was not seen done that it
    ever will be.
    """

    device: MortalDevice

    def submit(self, work: Callable[[], None], accesses: Accesses = lambda: (), *, label: str = "") -> Fence:
        self.device.check("submit")
        return super().submit(work, accesses, label=label)

    def has_passed(self, fence: HostFence) -> bool:
        self.device.check("poll")
        return super().has_passed(fence)

    def block_until(
        self, tick: int, timeout_s: float | None, bell: Bell | None = None
    ) -> bool:  # nobody rings while it looks so often
        if self.device.runs_on(threading.current_thread()):
            return super().block_until(
                tick, timeout_s
            )  # a stream waits for a stream: on a GPU no host thread does, and none is told
        until = time.monotonic() + (PATIENCE_S if timeout_s is None else timeout_s)
        while not super().block_until(tick, 0.001):
            self.device.check("poll")
            if time.monotonic() > until:
                return False
        return True


class MortalDevice(CpuDevice):
    """`lost_to` says which calls fail: all that a lost GPU fails, or some, to see each by itself."""

    def __init__(self) -> None:
        super().__init__(compute_threads=1)
        self.lost_to: frozenset[str] = frozenset()

    def check(self, call: str) -> None:
        if call in self.lost_to:
            raise DeviceLost(WHY)

    def lose(self, *calls: str) -> None:
        self.lost_to = frozenset(calls or ("submit", "poll"))
        for thread in self._threads:
            thread.wake()

    def stream(self, name: str) -> HostStream:
        stream = MortalStream(name, threads=1, timeline=None, tracer=None, on_pass=self._passed)
        stream.device = self
        self._streams[name] = stream
        return stream

    def runs_on(self, thread: threading.Thread) -> bool:
        return any(isinstance(stream, MortalStream) and stream._thread is thread for stream in self._streams.values())

    def worker(self, name: str) -> HostStream:
        return super().stream(name)  # of the host, which is not lost


class Slow(ToyModel):
    """Its steps begin only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.fault: BaseException | None = None

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, logit_rows: torch.Tensor, **more: Any
    ) -> torch.Tensor:  # type: ignore[override]
        assert self.gate.wait(PATIENCE_S)
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return super().forward(tokens, positions, batch, logit_rows, **more)


def start(device: CpuDevice, model: ToyModel, directory: Path) -> Engine:
    layout = model.layout
    config = EngineConfig(
        kv_memory=64 * layout.block_bytes,
        block_tokens=layout.block_tokens,
        chunk_tokens=16,
        token_budget=24,
        max_running=4,
        offload=OffloadConfig(host=64 * layout.block_bytes),
    )
    disk = DiskTier.open(
        directory, layout=layout, fingerprint=model.fingerprint, capacity_bytes=256 * entry_bytes(layout)
    )
    engine = build_engine(model, config, device=device, tiers={"disk": disk})
    assert engine.parts.costs is not None
    engine.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # no test hangs on measured speeds
    return engine


def ask(engine: Engine, prompt: list[int], max_tokens: int = 4) -> Reply:
    reply = Reply()
    reply.handle = engine.submit(prompt, SamplingParams(max_tokens=max_tokens), reply)
    return reply


def serve_first(engine: Engine, model: ToyModel) -> None:
    """Answer one prompt and have it on disk."""
    assert ask(engine, FIRST).wait().token_ids() == model.expected(FIRST, 4)
    assert engine.flush(timeout_s=PATIENCE_S)


def expect_on_disk(model: ToyModel, directory: Path) -> None:
    """Another process, with another device, finds what was complete."""
    engine = start(CpuDevice(compute_threads=1), model, directory)
    reply = ask(engine, FIRST)
    assert reply.wait().token_ids() == model.expected(FIRST, 4)
    assert reply.cached.disk == 28
    engine.close()


@pytest.mark.parametrize("calls", [(), ("submit",), ("poll",)], ids=["all calls", "launches", "polls"])
def test_a_lost_device_ends_the_engine_and_every_client_gets_an_error(calls: tuple[str, ...], tmp_path: Path) -> None:
    device, model = MortalDevice(), Slow()
    engine = start(device, model, tmp_path)
    serve_first(engine, model)
    model.gate.clear()
    replies = [ask(engine, prompt, 60) for prompt in OTHERS * 2]
    device.lose(*calls)
    model.gate.set()

    assert [reply.reason for reply in replies] == ["error"] * 6
    assert {reply.error for reply in replies} == {f"the engine failed: {WHY}"}
    assert (engine.health().status, engine.health().detail) == ("failed", f"DeviceLost: {WHY}")
    with pytest.raises(EngineStopped, match="the engine is failed: DeviceLost: the GPU is lost"):
        ask(engine, FIRST)

    engine.close()
    engine.close()
    assert engine.health().status == "failed"
    assert not any(stream._thread.is_alive() for stream in device._streams.values())
    expect_on_disk(model, tmp_path)


def test_an_engine_whose_device_is_lost_during_close_still_closes(tmp_path: Path) -> None:
    device, model = MortalDevice(), Slow()
    engine = start(device, model, tmp_path)
    serve_first(engine, model)
    gate = threading.Event()
    stores = [stream for name, stream in device._streams.items() if name.startswith("store")]
    for stream in stores:
        HostStream.submit(stream, lambda: gate.wait(PATIENCE_S) and None)
    ask(engine, OTHERS[0]).wait()
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert engine._thread is not None
    engine._thread.join(PATIENCE_S)
    device.lose()
    gate.set()
    closing.join(PATIENCE_S)

    assert not closing.is_alive()
    assert engine.health().status == "failed"
    assert "the GPU is lost" in engine.health().detail
    expect_on_disk(model, tmp_path)


def test_an_offload_worker_that_fails_ends_the_engine_and_every_client_gets_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, model = MortalDevice(), Slow()
    engine = start(device, model, tmp_path)
    serve_first(engine, model)
    submit = OffloadWorker._submit
    failures = [RuntimeError("injected: a bug")]

    def fail_once(self: OffloadWorker, command: Any) -> int:
        if failures:
            raise failures.pop()
        return submit(self, command)

    monkeypatch.setattr(OffloadWorker, "_submit", fail_once)
    model.gate.clear()  # nobody stores anything before all have asked
    replies = [ask(engine, prompt, 60) for prompt in OTHERS]
    model.gate.set()
    assert [(reply.reason, reply.error) for reply in replies] == [("error", "the engine failed: injected: a bug")] * 3
    assert engine.health().detail == "RuntimeError: injected: a bug"

    engine.close()
    expect_on_disk(model, tmp_path)


def test_a_step_without_device_memory_ends_its_requests_only(tmp_path: Path) -> None:
    device, model = MortalDevice(), Slow()
    engine = start(device, model, tmp_path)
    model.gate.clear()
    doomed = ask(engine, OTHERS[0], 20)
    model.fault = OutOfDeviceMemory("out of device memory: injected; lower the KV memory or the batch")
    model.gate.set()

    assert doomed.reason == "error"
    assert doomed.error == "the forward pass failed: out of device memory: injected; lower the KV memory or the batch"
    assert engine.health().status == "ok"
    assert ask(engine, OTHERS[0]).wait().token_ids() == model.expected(OTHERS[0], 4)
    engine.close()
    assert engine.parts.blocks.num_used == 0
