"""Tensor parallelism with real processes on a CPU: what users see of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rank_that_ends
from adapter_rig import edit_adapter, make_adapter
from rank_that_ends import is_rank

from proof.disk_slots import DiskSlots
from proof.tiny_models import tiny_model_dir
from sidestream import LLM, ConfigError, ModelError, OffloadConfig, SamplingParams, SpeculativeConfig
from sidestream.config import EngineConfig
from sidestream.errors import OutOfDeviceMemory, ProcessFailed, RequestError, RequestRejected
from sidestream.ranks.worker_pool import RankProcesses

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

PROMPTS = [[(7 * at + 3 * token) % 90 + 1 for token in range(60)] for at in range(6)]
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_running": 4, "compute_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("ranks") / "llama", 0)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> tuple[list[Sequence[int]], list[float], list[str]]:
    """Tokens, log-probabilities and the tier that the prompts came from."""
    outputs = llm.generate(prompts, PARAMS)
    tiers = sorted({tier for output in outputs for tier in output.cached.by_tier})
    return (
        [tuple(output.token_ids) for output in outputs],
        [entry.logprob for output in outputs for entry in output.completions[0].logprobs],
        tiers,
    )


def test_two_ranks_equal_one_with_offload_preemption_and_drafts(model: Path, tmp_path: Path) -> None:
    """Few blocks, so that requests are preempted and come back from the host tier; then from disk."""
    options = OPTIONS | {"speculative": SpeculativeConfig("ngram", max_drafts=2)}
    with LLM(model, kv_memory="200KiB", **options) as llm:
        expected, expected_logprobs, _ = answers(llm)
        assert llm.metrics.value("preemptions_total") > 0
    options["kv_memory"] = "100KiB"  # of each rank, with half of the heads
    offload = OffloadConfig(host="4MiB", disk=tmp_path / "kv")
    for tier in ("host", "disk"):
        with LLM(model, tensor_parallel=2, offload=offload, **options) as llm:
            for _ in range(2 if tier == "host" else 1):
                tokens, logprobs, found = answers(llm)
                assert tokens == expected
                assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
            assert tier in found
            assert llm.metrics.value("preemptions_total") > 0 or tier == "disk"
            assert sum(map(is_rank, children())) == 1
        assert not any(is_rank(pid) for pid in children())
        disks = [DiskSlots(tmp_path / "kv" / f"rank-{rank}-of-2") for rank in range(2)]
        entries = sorted(disks[0].slots)
        assert entries == sorted(disks[1].slots)
        for disk, entry in zip(disks, (entries[0], entries[-1]), strict=True):
            disk.table.void(disk.slots[entry])  # as if a kill -9 had come between two writes
    with pytest.raises(ConfigError, match="rank-0-of-2"):
        LLM(model, offload=offload, **options)
    with pytest.raises(ConfigError, match=r"holds rank-0-of-2, which 4 ranks cannot use|cannot divide"):
        LLM(model, tensor_parallel=4, offload=offload, **options)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_hybrids_on_two_ranks_equal_one_from_every_tier(family: str, tmp_path: Path) -> None:
    """KV and recurrent states of both ranks are one entry: on disk, both ranks hold the same entries."""
    model = tiny_model_dir(family, tmp_path / family, 0)
    options = OPTIONS | {"chunk_tokens": 16, "speculative": SpeculativeConfig("ngram", max_drafts=2)}
    with LLM(model, kv_memory="4MiB", **options) as llm:
        expected, expected_logprobs, _ = answers(llm, PROMPTS[:4])
    offload = OffloadConfig(host="8MiB", disk=tmp_path / "kv")
    for tier in ("host", "disk"):
        with LLM(model, tensor_parallel=2, offload=offload, kv_memory="1MiB", **options) as llm:
            for _ in range(2 if tier == "host" else 1):
                tokens, logprobs, found = answers(llm, PROMPTS[:4])
                assert tokens == expected
                assert logprobs == pytest.approx(expected_logprobs, abs=5e-3)
                if tier == "host":
                    llm.flush()
                    llm.reset_prefix_cache("device")
            assert tier in found
        entries = [sorted(DiskSlots(tmp_path / "kv" / f"rank-{rank}-of-2").slots) for rank in range(2)]
        assert entries[0] == entries[1] != []


def test_adapters_on_two_ranks_give_the_tokens_of_one(model: Path, tmp_path: Path) -> None:
    adapters = [make_adapter(model, tmp_path / name, seed) for seed, name in enumerate("ab", start=1)]
    damaged = make_adapter(model, tmp_path / "damaged", 3)
    edit_adapter(damaged, lambda name, tensor: None if "layers.2.self_attn.o_proj.lora_B" in name else tensor)
    asked = [dataclasses.replace(PARAMS, adapter=name) for name in ("", "a", "b", "a", "", "b")]
    options = OPTIONS | {"max_loras": 2, "chunk_tokens": 16}
    found = []
    for ranks, memory in ((1, "4MiB"), (2, "2MiB")):
        offload = OffloadConfig(host="8MiB")
        with LLM(model, tensor_parallel=ranks, kv_memory=memory, offload=offload, **options) as llm:
            llm.adapters.load("a", str(adapters[1]))  # is replaced
            llm.adapters.unload("a")
            for name, path in zip("ab", adapters, strict=True):
                llm.adapters.load(name, str(path))
            llm.generate(PROMPTS, asked)
            llm.flush()
            llm.reset_prefix_cache("device")
            with pytest.raises(RequestRejected, match="all 2 slots are in use"):
                llm.adapters.load("c", str(adapters[0]))
            llm.adapters.unload("b")
            with pytest.raises(RequestRejected, match="only one of the matrices"):
                llm.adapters.load("c", str(damaged))
            llm.adapters.load("b", str(adapters[1]))
            outputs = llm.generate(PROMPTS, asked)
            assert all(output.cached.host > 0 for output in outputs)
            found.append([tuple(output.token_ids) for output in outputs])
    assert found[0] == found[1]
    assert len({*found[0]}) > 3


def test_pins_hold_and_drops_reach_the_tiers_of_two_ranks(model: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"kv_memory": "100KiB", "offload": OffloadConfig(host="256KiB", disk=tmp_path / "kv")}
    with LLM(model, tensor_parallel=2, **options) as llm:
        (before,) = llm.generate(PROMPTS[:1], PARAMS)
        llm.flush()
        pinned = llm.pin_prefix(PROMPTS[0], ttl_s=60)
        first = dataclasses.replace(PARAMS, max_tokens=1)
        for salt in map(str, range(12)):
            llm.generate(PROMPTS[1:], first, cache_salt=salt)
        (again,) = llm.generate(PROMPTS[:1], PARAMS)
        assert again.token_ids == before.token_ids
        assert again.cached.host == pinned.tokens > 0
        assert min(llm.drop_prefix(PROMPTS[0]).values()) > 0
        (computed,) = llm.generate(PROMPTS[:1], PARAMS)
        assert (computed.token_ids, computed.cached.total) == (before.token_ids, 0)


def children() -> list[str]:
    pid = os.getpid()
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_killed_rank_ends_the_engine_with_its_reason(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, tensor_parallel=2, kv_memory="4MiB", **OPTIONS)
    try:
        (rank,) = [int(pid) for pid in children() if is_rank(pid)]
        llm.generate([PROMPTS[0]], PARAMS)
        os.kill(rank, signal.SIGUSR1)  # it prints its stacks, and goes on
        llm.generate([PROMPTS[0]], PARAMS)
        assert "most recent call first" in capfd.readouterr().err
        assert llm._loaded._processes is not None
        aborted = threading.Event()  # on a GPU, rank 0 would wait for the killed rank in a collective
        monkeypatch.setattr(llm._loaded._processes.group, "abort", aborted.set)
        os.kill(rank, signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(RequestError, match=r"rank 1 of 2 is lost: it was killed by SIGKILL"):
            llm.generate([PROMPTS[1]], SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
        assert time.monotonic() - start_s < 10.0  # 0.1 s on a quiet machine
        assert llm.health().status == "failed"
        assert aborted.is_set()
    finally:
        llm.close()
    assert not any(is_rank(pid) for pid in children())


def test_options_that_ranks_lack_are_refused_before_any_process_starts(model: Path) -> None:
    with pytest.raises(ModelError, match="3 ranks cannot divide: choose one of 1, 2"):
        LLM(model, tensor_parallel=3, **OPTIONS)
    with pytest.raises(ConfigError, match="the proposer mtp does not run on 2 ranks yet: use ngram, or one rank"):
        LLM(model, tensor_parallel=2, speculative=SpeculativeConfig("mtp"), **OPTIONS)
    with pytest.raises(ConfigError, match="tensor_parallel is 0: it must be a whole number of 1 or more"):
        LLM(model, tensor_parallel=0, **OPTIONS)
    assert not any(is_rank(pid) for pid in children())


def test_a_rank_that_ends_during_the_start_ends_all_with_its_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_that_ends.start_with_it(monkeypatch)
    began_s = time.monotonic()
    with pytest.raises(OutOfDeviceMemory, match="out of device memory on rank 1; lower the KV memory or the batch"):
        LLM(model, tensor_parallel=2, **OPTIONS)
    assert time.monotonic() - began_s < 120.0
    assert not any(is_rank(pid) for pid in children())


def test_a_rank_that_ends_before_it_joins_the_others_ends_the_start(model: Path) -> None:
    config = EngineConfig(device="cpu", tensor_parallel=2)
    began_s = time.monotonic()
    with pytest.raises(ProcessFailed, match="rank 1 of 2 ended while it started: it exited with status 3"):
        RankProcesses(str(model), config, program=rank_that_ends.program(early=True))
    assert time.monotonic() - began_s < 60.0  # without a look at the other ranks, it would wait for 600 s


def test_rank_0_leaves_its_collectives_when_a_rank_ends_at_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would wait in a collective for minutes. Gloo ends by itself, so the group is a fake."""

    class Group:
        def __init__(self) -> None:
            self.aborted = threading.Event()

        def abort(self) -> None:
            self.aborted.set()

        def close(self) -> None:
            pass

    group = Group()
    monkeypatch.setattr("sidestream.ranks.worker_pool.open_group", lambda *given, **how: group)
    config = EngineConfig(device="cpu", tensor_parallel=2)
    processes = RankProcesses(str(model), config, program=rank_that_ends.program(early=True))
    try:
        assert group.aborted.wait(20.0)
    finally:
        processes.kill()
