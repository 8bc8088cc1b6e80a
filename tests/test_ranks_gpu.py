"""Tensor parallelism on GPUs: two ranks answer like one, from every tier, and a rank that is killed ends all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_that_ends
import torch
from rank_that_ends import is_rank

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, OffloadConfig, SamplingParams, SpeculativeConfig
from sidestream.errors import OutOfDeviceMemory, RequestError
from sidestream.llm import RequestOutput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

DEVICE = "cuda"
PROMPTS = [[(7 * at + 3 * token) % 90 + 1 for token in range(300)] for at in range(6)]
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
OPTIONS: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "max_running": 4}
NEAR = 5e-3  # see test_cuda_engine.py
END_S = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("qwen3", tmp_path_factory.mktemp("ranks") / "qwen3", 0, num_key_value_heads=2)


def check(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for output, wanted in zip(outputs, expected, strict=True):
        for got, right in zip(output.completions[0].logprobs, wanted.completions[0].logprobs, strict=True):
            assert got.logprob == pytest.approx(right.logprob, abs=NEAR)


def always_load(llm: LLM) -> LLM:
    """Without measured times of prefill, KV in a tier is loaded and never computed."""
    assert llm.engine.parts.costs is not None
    llm.engine.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]
    return llm


def rank_of(llm: LLM) -> int:
    """The process id of rank 1."""
    processes = llm._loaded._processes
    assert processes is not None
    return processes.pids[0]


def settle(llm: LLM) -> None:
    assert llm.engine.flush(timeout_s=30.0)
    llm.engine.call(llm.engine.parts.blocks.forget_all)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "captured"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_two_ranks_give_the_answers_of_one_from_every_tier(
    model: Path, tmp_path: Path, eager: bool, drafts: int
) -> None:
    options = OPTIONS | {"eager": eager}
    if drafts:
        options["speculative"] = SpeculativeConfig("ngram", max_drafts=drafts)
    with LLM(model, kv_memory="16MiB", **options) as llm:
        expected, layout = llm.generate(PROMPTS, PARAMS), llm.engine.parts.layout
    few = 2 * (layout.num_blocks_for(len(PROMPTS[0])) + 1)  # two requests run until one has to leave
    offload = OffloadConfig(host="16MiB", disk=tmp_path / "kv")
    kv_memory = few * layout.block_bytes // 2  # a rank has half of the heads
    sizes = {"kv_memory": kv_memory, "tensor_parallel": 2, "offload": offload}
    with always_load(LLM(model, **options, **sizes)) as llm:
        check(llm.generate(PROMPTS, PARAMS), expected)
        assert llm.metrics.value("preemptions_total") > 0
        settle(llm)
        again = llm.generate(PROMPTS, PARAMS)
        check(again, expected)
        assert any(output.cached.host for output in again)
        waits = llm.engine.parts.device.host_waits()
        assert {reason for reason, count in waits.items() if count} <= {"step", "start"}, waits
    with always_load(LLM(model, **options, **sizes)) as llm:
        restarted = llm.generate(PROMPTS, PARAMS)
        check(restarted, expected)
        assert any(output.cached.disk for output in restarted)


def test_a_rank_killed_during_a_load_ends_the_engine_and_leaves_the_disk_intact(model: Path, tmp_path: Path) -> None:
    options = OPTIONS | {
        "kv_memory": "64MiB",
        "tensor_parallel": 2,
        "offload": OffloadConfig(host="256MiB", disk=tmp_path / "kv"),
    }
    errors: list[BaseException] = []
    llm = always_load(LLM(model, **options))
    try:
        expected = llm.generate(PROMPTS, PARAMS)
        settle(llm)
        transfers = llm.engine.parts.transfers
        assert transfers is not None

        def ask() -> None:
            try:
                while True:
                    llm.generate(PROMPTS, replace(PARAMS, max_tokens=1))
                    llm.engine.call(llm.engine.parts.blocks.forget_all)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until_s = time.monotonic() + 30.0
        while not transfers.sizes()["loads"] and time.monotonic() < until_s:
            pass
        os.kill(rank_of(llm), signal.SIGKILL)
        killed_s = time.monotonic()
        thread.join(30.0)
        assert not thread.is_alive()
        assert time.monotonic() - killed_s < END_S
        assert isinstance(errors[0], RequestError) and "rank 1 of 2 is lost" in str(errors[0])
        assert llm.health().status == "failed"
    finally:
        llm.close()
    with always_load(LLM(model, **options)) as llm:
        restarted = llm.generate(PROMPTS, PARAMS)
        check(restarted, expected)
        assert any(output.cached.disk for output in restarted)


def test_a_rank_that_ends_during_the_start_ends_all_with_its_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_that_ends.start_with_it(monkeypatch)
    began_s = time.monotonic()
    with pytest.raises(OutOfDeviceMemory, match="out of device memory on rank 1; lower the KV memory or the batch"):
        LLM(model, tensor_parallel=2, **OPTIONS)
    assert time.monotonic() - began_s < 120.0  # the other rank waits in a collective, and it would wait for 600 s


def test_references_to_graphs_do_not_keep_the_engine_from_closing(model: Path) -> None:
    llm = LLM(model, kv_memory="64MiB", tensor_parallel=2, **OPTIONS)
    llm.generate(PROMPTS, PARAMS)
    graphs = llm.engine.parts.executor._graphs
    assert graphs is not None and graphs.keys
    held = list(graphs._graphs)
    began_s = time.monotonic()
    llm.close()
    assert time.monotonic() - began_s < 10.0
    assert all(graph.deleted for graph in held)


ALONE = """
import sys
from pathlib import Path
from sidestream import LLM, SamplingParams

llm = LLM(sys.argv[1], device=sys.argv[2], dtype="float32", tensor_parallel=2, kv_memory="64MiB")
while True:
    llm.generate([[5, 7, 11] * 40] * 4, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
    Path(sys.argv[3]).write_text(str(llm._loaded._processes.pids[0]))
"""


def test_no_rank_outlives_the_engine_process(model: Path, tmp_path: Path) -> None:
    environment, answered = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, tmp_path / "rank"
    engine = subprocess.Popen([sys.executable, "-c", ALONE, str(model), DEVICE, str(answered)], env=environment)
    try:
        until_s = time.monotonic() + 120.0
        while not answered.exists() or not answered.read_text():
            assert engine.poll() is None and time.monotonic() < until_s
            time.sleep(0.1)
        rank = int(answered.read_text())
        assert is_rank(rank)
    finally:
        engine.kill()
        engine.wait(10)
    until_s = time.monotonic() + 10.0
    while is_rank(rank) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not is_rank(rank)
