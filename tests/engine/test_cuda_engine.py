"""The whole engine on a GPU: answers equal the CPU's, from every tier and despite failures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from proof.tiny_models import FAMILIES, LATENT, save_head, tiny_model_dir
from sidestream import (
    LLM,
    AsyncLLM,
    OffloadConfig,
    RequestError,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputs,
)
from sidestream.models import compiled, load_model
from sidestream.models.catalog import prepared
from sidestream.models.rotary import RotatingAttention
from sidestream.runner.step_inputs import SHORT_TOKENS, GraphKey
from sidestream.text import sample_text
from sidestream.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PATIENCE_S = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [
    [5 + position * step % 240 for position in range(length)]
    for step, length in ((3, 300), (7, 77), (11, 16), (13, 5), (17, 150))
]
# Log-probabilities in float32 on both sides: sums of a few hundred terms in another order, through a few layers, then a
# softmax.
NEAR = 2e-3
GIB = 1 << 30

EVERY_WAY_TO_DRAW = [
    SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 1, **way})
    for way in (
        {"temperature": 0},
        {"temperature": 1.0},
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {7: 3.0}, "min_tokens": 4, "stop_token_ids": (9,)},
        {"logprobs": 5},
        {"presence_penalty": 0.5, "logit_bias": {5: 1.0}},
        {"structured_outputs": StructuredOutputs(regex="[a-z ]{40}"), "ignore_eos": False},
        {"temperature": 0, "allowed_token_ids": (7, 8, 9), "logit_bias": {8: 2.0}},
        {"bad_word_ids": ((7,), (8, 9))},
    )
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("llama"), 1)


@pytest.fixture(scope="module")
def smollm() -> str:
    path = prepared("smollm2-135m-instruct")
    if path is None:
        pytest.skip("the demo model is not in the cache: `sidestream models prepare smollm2-135m-instruct` fetches it")
    return str(path)


def engine(model: Path | str, device: str = "cuda", **options: Any) -> LLM:
    """Eager unless said otherwise: compiling takes longer than all that these tests ask for."""
    return LLM(model, device=device, **{"dtype": "float32", "kv_memory": "64MiB", "eager": True, **options})


def drafting(proposer: str, model: Path, directory: Path) -> SpeculativeConfig:
    """Three drafts whenever there is room for them, by a head or a smaller model with random weights."""
    directory.mkdir(exist_ok=True)
    if proposer == "mtp":
        return SpeculativeConfig(
            "mtp", 3, adaptive=False, head=save_head(model, directory / "head.safetensors", seed=1)
        )
    if proposer == "draft":
        smaller = tiny_model_dir("llama", directory / "draft", 4, num_attention_heads=2, num_key_value_heads=1)
        return SpeculativeConfig("draft", 3, adaptive=False, model=smaller)
    return SpeculativeConfig("ngram", 3, adaptive=False)


def always_load(llm: LLM) -> None:
    """Not by measured speeds: a tiny model computes sooner than anything loads."""
    costs = llm.engine.parts.costs
    assert costs is not None
    costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]


def forget_device(llm: LLM) -> None:
    llm.engine.call(llm.engine.parts.blocks.forget_all)


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def assert_near(outputs: list[RequestOutput], reference: list[RequestOutput]) -> None:
    assert tokens(outputs) == tokens(reference)
    for output, expected in zip(outputs, reference, strict=True):
        for got, wanted in zip(output.completions[0].logprobs, expected.completions[0].logprobs, strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=NEAR)


# ---------------------------------------------------------------------- the same answers


@pytest.mark.parametrize("family", [*FAMILIES, *LATENT])
def test_every_model_family_gives_the_same_answers_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    model = tiny_model_dir(family, tmp_path, 2)
    with engine(model, "cpu") as llm:
        reference = llm.generate(PROMPTS, GREEDY)
    with engine(model) as llm:
        assert llm.engine.parts.device.kind == "cuda"
        assert_near(llm.generate(PROMPTS, GREEDY), reference)
        assert_near([llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS], reference)


def test_a_real_model_gives_the_same_answers_as_on_the_cpu(smollm: str) -> None:
    ids = Tokenizer.load(smollm).encode(sample_text())
    prompts = [ids[:700], ids[100:131], ids[:16]]
    with engine(smollm, "cpu") as llm:
        reference = llm.generate(prompts, GREEDY)
    with engine(smollm) as llm:
        assert_near(llm.generate(prompts, GREEDY), reference)


def test_a_model_has_the_same_fingerprint_on_both_devices(llama: Path) -> None:
    there = load_model(str(llama), block_tokens=16, device=torch.device("cuda", 0))
    assert there.module.device.type == "cuda"
    assert there.fingerprint == load_model(str(llama), block_tokens=16).fingerprint


def test_seeded_sampling_gives_the_same_tokens_as_on_the_cpu(llama: Path) -> None:
    prompts = [PROMPTS[1]] * len(EVERY_WAY_TO_DRAW)
    with engine(llama, "cpu") as llm:
        reference = llm.generate(prompts, EVERY_WAY_TO_DRAW)
    with engine(llama) as llm:
        assert tokens(llm.generate(prompts, EVERY_WAY_TO_DRAW)) == tokens(reference)


def test_an_engine_without_options_uses_the_gpu_and_a_share_of_its_free_memory(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 80 * GIB))  # other tests use the GPU, too
    big = tiny_model_dir("llama", llama.parent / "big", 1, num_hidden_layers=16, num_key_value_heads=4, head_dim=128)
    with caplog.at_level("INFO"), LLM(big, eager=True) as llm:
        parts = llm.engine.parts
        assert parts.device.kind == "cuda"
        assert llm.engine.parts.bounds.max_unfinished == 1024 + 256
        assert 4 * GIB <= parts.blocks.size * parts.layout.block_bytes <= 4.8 * GIB
        assert len(llm.generate(PROMPTS[1], GREEDY)[0].token_ids) == 12
    assert "what the weights leave free; --kv-memory changes it" in caplog.text


@pytest.mark.parametrize(("dtype", "kv"), [("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "fp8")])
def test_half_precision_gives_equal_tokens_without_a_cache_and_from_every_tier(
    dtype: str, kv: str, smollm: str, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"separate_tail_chunk": True, "dtype": dtype, "kv_cache_dtype": kv}
    prompt = Tokenizer.load(smollm).encode(sample_text())[:1000]
    offload = OffloadConfig(host="256MiB", disk=tmp_path / "kv", disk_capacity="256MiB")
    with engine(smollm, **own) as llm:
        (cold,) = llm.generate([prompt], GREEDY)
    with engine(smollm, **own, offload=offload, check_order=True) as llm:
        always_load(llm)
        (stored,) = llm.generate([prompt], GREEDY)
        assert llm.flush()
        (on_device,) = llm.generate([prompt], GREEDY)
        forget_device(llm)
        (from_host,) = llm.generate([prompt], GREEDY)
    with engine(smollm, **own, offload=offload, check_order=True) as llm:
        always_load(llm)
        (from_disk,) = llm.generate([prompt], GREEDY)
    assert (on_device.cached.device, from_host.cached.host, from_disk.cached.disk) == (992, 992, 992)
    assert tokens([stored, on_device, from_host, from_disk]) == [cold.token_ids] * 4


def test_a_cpu_engine_reuses_blocks_that_a_gpu_stored(llama: Path, tmp_path: Path) -> None:
    offload = OffloadConfig(host="16MiB", disk=tmp_path / "kv", disk_capacity="64MiB")
    with engine(llama, offload=offload) as llm:
        reference = llm.generate([PROMPTS[0]], GREEDY)
        assert llm.flush()
    with engine(llama, "cpu", offload=offload) as llm:
        always_load(llm)
        outputs = llm.generate([PROMPTS[0]], GREEDY)
    assert outputs[0].cached.disk == 288
    assert_near(outputs, reference)


# ---------------------------------------------------------------------- captured forward passes

CAPTURED = {"eager": False, "max_running": 6, "chunk_tokens": 64}
FEW = [
    GraphKey(1),
    GraphKey(6),
    GraphKey(0, SHORT_TOKENS),
    GraphKey(0, 64),
    GraphKey(0, 96),
    GraphKey(6, SHORT_TOKENS),
    GraphKey(6, 96),
]
compiles = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)  # torch's own, of torch


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing all takes longer than what these tests ask for."""
    monkeypatch.setattr(
        GraphKey,
        "all_of",
        classmethod(
            lambda cls, drafts=0, **bounds: [*FEW, *(GraphKey(6, count, drafts) for count in (0, 96) if drafts)]
        ),
    )


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compile_layers", lambda model, **_: None)


@compiles
@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("family", ["gemma2", "qwen3", "qwen3_moe"])
def test_captured_forward_passes_give_the_same_answers_as_eager_ones(family: str, tmp_path: Path) -> None:
    model = tiny_model_dir(family, tmp_path, 2)
    with engine(model, max_running=6, chunk_tokens=64) as llm:
        expected = [
            llm.generate([*PROMPTS, *PROMPTS], GREEDY),
            llm.generate(PROMPTS, EVERY_WAY_TO_DRAW[: len(PROMPTS)]),
        ]
    with engine(model, **CAPTURED, check_order=True) as llm:
        assert_near(llm.generate([*PROMPTS, *PROMPTS], GREEDY), expected[0])
        assert tokens(llm.generate(PROMPTS, EVERY_WAY_TO_DRAW[: len(PROMPTS)])) == tokens(expected[1])
        executor = llm.engine.parts.executor
        graphs = executor._graphs
        assert any(isinstance(part, RotatingAttention) for part in executor._model.module.modules())
        assert (
            graphs is not None or family == "qwen3_moe"
        )  # experts that are chosen on the host cannot be captured, and run all the same


@pytest.mark.usefixtures("few_shapes", "uncompiled")
def test_captured_sampling_obeys_grammars_as_on_the_cpu(llama: Path) -> None:
    """Rows that ask for log-probabilities would let the host sample."""
    form = StructuredOutputs(regex="[a-z ]{40}")
    params = [
        dataclasses.replace(GREEDY, logprobs=None, **changes)
        for changes in ({"structured_outputs": form}, {}, {"structured_outputs": form, "temperature": 0.8, "seed": 3})
    ]
    with engine(llama, device="cpu") as llm:
        reference = llm.generate(PROMPTS[:3], params)
    with engine(llama, **CAPTURED) as llm:
        assert tokens(llm.generate(PROMPTS[:3], params)) == tokens(reference)


@pytest.mark.usefixtures("few_shapes", "uncompiled")
def test_a_captured_step_waits_for_each_layer_group_still_being_loaded_h5(llama: Path) -> None:
    with engine(llama, **CAPTURED, offload=OffloadConfig(host="64MiB"), check_order=True) as llm:
        always_load(llm)
        reference = tokens(llm.generate([PROMPTS[0]], GREEDY))
        assert llm.flush()
        executor, device = llm.engine.parts.executor, llm.engine.parts.device
        graphs, gated = executor._graphs, list[bool]()
        assert graphs is not None
        replay = graphs.replay

        def count(captured: Any, *, gated_: list[bool] = gated, **how: bool) -> torch.Tensor:
            gated_.append(how["gated"])
            return replay(captured, **how)

        graphs.replay = count  # type: ignore[method-assign]
        loads = next(stream for stream in device._streams if stream.name == "load-0")  # type: ignore[attr-defined]
        for _ in range(3):
            forget_device(llm)
            executor._kv.fill_(float("nan"))  # what is read before it was loaded is not a number
            assert executor._kv[0, 0, 0, 0, 0, 0].isnan().item()  # done
            loads.submit(lambda: torch.cuda._sleep(50_000_000))  # some 30 ms
            (output,) = llm.generate([PROMPTS[0]], GREEDY)
            assert output.cached.host == 288
            assert tokens([output]) == reference
        assert gated.count(True) >= 3
        assert gated.count(False) >= 3
        assert llm.engine.parts.device.host_waits().keys() <= {"step"}


# Where one of three layers has a window, a page would be too empty: all three stay in the same blocks.
ONE_OF_THREE = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}


@pytest.mark.usefixtures("few_shapes", "uncompiled")
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("family", "changes"), [("gemma2", {}), ("gemma3", {}), ("gemma3", ONE_OF_THREE)])
def test_layers_of_blocks_before_their_window_are_not_loaded_or_read(
    family: str, changes: dict[str, Any], eager: bool, tmp_path: Path
) -> None:
    """In layers with a window of 12 tokens, only the last block of 16 tokens before the first computed one is read."""
    model = tiny_model_dir(family, tmp_path, 2, **changes)
    with engine(model, **{**CAPTURED, "eager": eager}, offload=OffloadConfig(host="64MiB")) as llm:
        always_load(llm)
        parts, windows = llm.engine.parts, llm.engine.parts.scheduler._windows
        assert (windows is None) == bool(changes)
        shorter = [PROMPTS[0][:201], PROMPTS[0][:81]]
        reference = llm.generate([PROMPTS[0]], GREEDY) + [llm.generate([prompt], GREEDY)[0] for prompt in shorter]
        for _ in range(3):
            assert llm.flush()
            forget_device(llm)
            parts.executor._kv.fill_(float("nan"))
            assert parts.executor._kv[0, 0, 0, 0, 0, 0].isnan().item()  # done
            before = parts.metrics.value("transfer_bytes_total", "load")
            outputs = [llm.generate([prompt], GREEDY)[0] for prompt in (PROMPTS[0], *shorter)]
            assert_near(outputs, reference)
            assert outputs[0].cached.host == 288
            assert llm.flush()
            loaded = parts.metrics.value("transfer_bytes_total", "load") - before
            found = [(output.cached.device, output.cached.host) for output in outputs[1:]]
            layout = parts.layout
            if windows is None:
                # The end of the prompt is on the device, but lacks layers where these prompts end.
                assert found == [(176, 16), (64, 16)]
                assert loaded == 17 * len(layout.layers_without_window) * layout.layer_bytes + 3 * layout.block_bytes
            else:  # a page for the end of each prompt
                assert found == [(192, 0), (80, 0)]
                assert loaded == (18 + 3 * windows._layers.parts) * layout.block_bytes


@pytest.mark.usefixtures("few_shapes", "uncompiled")
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("proposer", ["ngram", "mtp", "draft"])
def test_drafts_change_no_token_and_equal_many_are_accepted_in_both_modes(
    llama: Path, tmp_path: Path, proposer: str, eager: bool
) -> None:
    options = {**CAPTURED, "eager": eager, "offload": OffloadConfig(host="64MiB"), "check_order": True}
    repeating = [prompt[:40] + prompt[:30] for prompt in PROMPTS]
    params = [dataclasses.replace(way, max_tokens=20, logprobs=None) for way in EVERY_WAY_TO_DRAW[: len(PROMPTS)]]
    with engine(llama, **options) as llm:
        expected = tokens(llm.generate(repeating, params))
    counts = []
    for asynchronous in (True, False):
        speculative = drafting(proposer, llama, tmp_path / "drafting")
        with engine(llama, **options, speculative=speculative, asynchronous=asynchronous) as llm:
            assert tokens(llm.generate(repeating, params)) == expected
            always_load(llm)
            assert llm.flush()
            forget_device(llm)
            outputs = llm.generate(repeating, params)
            assert tokens(outputs) == expected
            assert sum(output.cached.host for output in outputs) > 0
            counts.append(llm.metrics.value("accepted_tokens_total", proposer))
            assert llm.engine.parts.device.host_waits().keys() <= {"step"}
            graphs = llm.engine.parts.executor._graphs
            assert eager or (graphs is not None and any(key.drafts for key in graphs.keys))
    assert proposer != "ngram" or min(counts) > 0


@pytest.mark.usefixtures("few_shapes", "uncompiled")
def test_a_model_that_cannot_be_captured_runs_eagerly(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sidestream.models.adapter import PagedModel

    forward = PagedModel.forward

    def waits(self: PagedModel, *given: Any, **states: Any) -> torch.Tensor:
        logits = forward(self, *given, **states)
        logits.sum().item()
        return logits

    with engine(llama, max_running=6, chunk_tokens=64) as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY))
    monkeypatch.setattr(PagedModel, "forward", waits)
    with engine(llama, **CAPTURED) as llm:
        assert "cannot be captured" in caplog.text
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.usefixtures("few_shapes", "uncompiled")
def test_graphs_captured_before_memory_ran_out_are_used(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sidestream.models.adapter import PagedModel

    forward, kept = PagedModel.forward, FEW[:3]

    def greedy_for_memory(self: PagedModel, ids: torch.Tensor, *given: Any, **states: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and len(ids) > max(key.sizes.num_tokens for key in kept):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return forward(self, ids, *given, **states)

    with engine(llama, max_running=6, chunk_tokens=64) as llm:
        expected = tokens(llm.generate([*PROMPTS, *PROMPTS], GREEDY))
    monkeypatch.setattr(PagedModel, "forward", greedy_for_memory)
    with engine(llama, **CAPTURED, check_order=True) as llm:
        assert caplog.text.count("the GPU's memory holds 3 of 7 captured shapes (out of device memory: ") == 1
        assert "cannot be" not in caplog.text
        graphs = llm.engine.parts.executor._graphs
        assert graphs is not None
        assert graphs.keys == kept
        assert tokens(llm.generate([*PROMPTS, *PROMPTS], GREEDY)) == expected
        llm.engine.call(lambda: llm.engine.parts.executor.capture(kept))  # it still can be captured
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected[: len(PROMPTS)]


# ---------------------------------------------------------------------- many at once


@pytest.mark.parametrize("asynchronous", [True, False])
def test_preemption_and_offload_in_a_small_pool_change_no_answer(
    asynchronous: bool, llama: Path, tmp_path: Path
) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[5 + position * (2 * step + 3) % 240 for position in range(90 + 7 * step)] for step in range(12)]
    with engine(llama) as llm:
        reference = tokens(llm.generate(prompts, params))
    offload = OffloadConfig(host="1MiB", disk=tmp_path / "kv", disk_capacity="4MiB")
    block_bytes = 3 * 2 * 16 * 2 * 16 * 4
    small = {"kv_memory": 40 * block_bytes, "offload": offload, "max_running": 6, "asynchronous": asynchronous}
    with engine(llama, check_order=True, **small) as llm:
        always_load(llm)
        for _ in range(3):
            assert tokens(llm.generate(prompts, params)) == reference
        assert llm.metrics.value("preemptions_total") > 0
        assert llm.metrics.value("transfer_bytes_total", "load") > 0
        assert llm.metrics.value("transfers_total", "store", "failed") == 0
        assert llm.flush()
        assert llm.engine.parts.device.host_waits().keys() <= {"step"}
        llm.engine.call(lambda: None)
        assert llm.engine.parts.blocks.num_used == 0


@compiles
@pytest.mark.usefixtures("few_shapes")
def test_kernels_that_start_early_have_equal_bits_in_every_run(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
    model = tiny_model_dir("qwen3", tmp_path, 1, **sizes, head_dim=128, initializer_range=0.05)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=1)
    options = {"dtype": "bfloat16", "prefix_cache": False}

    def runs(llm: LLM, count: int) -> list[Any]:
        outputs = [llm.generate([PROMPTS[2]], params)[0].completions[0] for _ in range(count)]
        return [(output.token_ids, output.logprobs) for output in outputs]

    with engine(model, **options) as llm:
        eager = runs(llm, 1)[0]
    with engine(model, **options, **CAPTURED) as llm:
        captured = runs(llm, 40)
    assert all(run == captured[0] for run in captured)
    assert captured[0][1][0].logprob == pytest.approx(eager[1][0].logprob, abs=0.1)


@compiles
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "bfloat16"), ("qwen3", "float32"), ("gemma3", "bfloat16")])
def test_a_thousand_invariant_requests_have_the_same_bits_alone_and_together(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """Compiled and captured. Together: cut into chunks, in a small pool, drafted, and then from host memory."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4}
    other = {"head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 4096, "initializer_range": 0.05}
    model = tiny_model_dir(family, tmp_path, 1, **sizes, **other)
    prompts = [
        [
            5 + number * place % (20 + number) % 1000
            for place in range(1900 if number % 50 == 7 else 1 + number * 37 % 400)
        ]
        for number in range(1000)
    ]
    params = [
        SamplingParams(temperature=number % 2, seed=number, max_tokens=24, ignore_eos=True, logprobs=3)
        for number in range(len(prompts))
    ]
    options: dict[str, Any] = {"dtype": dtype, "eager": False, "batch_invariant": True, "max_model_len": 2048}

    def answers(outputs: list[RequestOutput]) -> list[Any]:
        return [(output.token_ids, output.completions[0].logprobs) for output in outputs]

    with engine(model, **options, kv_memory="1GiB", prefix_cache=False) as llm:
        alone = answers([llm.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)])
    drafts = SpeculativeConfig("ngram", 3, adaptive=False)
    host = OffloadConfig(host="4GiB")
    with engine(model, **options, kv_memory="64MiB", chunk_tokens=512, speculative=drafts, offload=host) as llm:
        always_load(llm)
        different = [sum(a != b for a, b in zip(answers(llm.generate(prompts, params)), alone, strict=True))]
        assert llm.metrics.value("accepted_tokens_total", "ngram") > 100
        assert llm.flush()
        forget_device(llm)
        from_host = llm.generate(prompts, params)
        assert sum(output.cached.host for output in from_host) > 10_000
        different.append(sum(a != b for a, b in zip(answers(from_host), alone, strict=True)))
    assert different == [0, 0]


def test_aborted_requests_release_all_their_resources(llama: Path) -> None:
    with engine(llama, offload=OffloadConfig(host="16MiB"), check_order=True) as llm:
        for _ in range(5):
            for delta in llm.stream(PROMPTS[0], SamplingParams(max_tokens=500, ignore_eos=True)):
                if delta.token_ids:
                    break
        reference = llm.generate([PROMPTS[1]], GREEDY)
        assert tokens(reference) == tokens(llm.generate([PROMPTS[1]], GREEDY))
        assert llm.flush()
        llm.engine.call(lambda: None)
        assert llm.engine.unfinished == 0
        assert llm.engine.parts.blocks.num_used == 0


def test_a_closed_engine_holds_no_memory_of_the_gpu(llama: Path) -> None:
    """A script that closes one model and loads the next one still has a name for the first."""
    offload = OffloadConfig(host="64MiB")
    with engine(llama, kv_memory="64MiB", offload=offload) as first:
        first.generate([PROMPTS[0]], GREEDY)  # a process allocates memory once, such as 32 MiB of cuBLAS for a stream
    before = torch.cuda.memory_allocated()
    llm = engine(llama, kv_memory="256MiB", offload=offload)
    llm.generate([PROMPTS[0]], GREEDY)
    assert torch.cuda.memory_allocated() - before > 256 << 20
    llm.close()
    assert torch.cuda.memory_allocated() - before < 16 << 20
    assert llm.health().status != "ok"


def test_a_server_streams_an_answer(llama: Path) -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    from sidestream.server import RunningServer, ServerOptions, serve

    with engine(llama) as reference:
        expected = reference.generate("The whale", SamplingParams(temperature=0, max_tokens=12))[0].text
    llm = AsyncLLM(llama, device="cuda", dtype="float32", kv_memory="64MiB")
    ready: queue.Queue[RunningServer] = queue.Queue()
    server = threading.Thread(target=lambda: serve(llm, ServerOptions(port=0), on_ready=ready.put), daemon=True)
    server.start()
    running = ready.get(timeout=PATIENCE_S)
    body = {"model": llm.model_name, "prompt": "The whale", "max_tokens": 12, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    running.stop()
    server.join(PATIENCE_S)
    asyncio.run(llm.close())
    assert lines[-1] == "[DONE]"
    assert "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]) == expected


OWN_PROCESS = """
import asyncio
import sys
import torch
from sidestream import AsyncLLM, SamplingParams

async def main():
    async with AsyncLLM(sys.argv[1], device="cuda", dtype="float32", kv_memory="64MiB", eager=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        deltas = llm.generate([5 + at % 240 for at in range(200)], params)
        print("tokens", *[token async for delta in deltas for token in delta.token_ids])
        with open(f"/proc/{llm.engine_pid}/cmdline") as line:
            print("process", "sidestream.client.engine_main" in line.read())

asyncio.run(main())
print("cuda here", torch.cuda.is_initialized())
"""


def test_an_engine_in_its_own_process_gives_equal_answers_without_cuda_here(llama: Path) -> None:
    with engine(llama) as reference:
        expected = reference.generate(
            [[5 + at % 240 for at in range(200)]], dataclasses.replace(GREEDY, logprobs=None)
        )[0].token_ids
    done = subprocess.run(
        [sys.executable, "-c", OWN_PROCESS, llama], check=False, capture_output=True, text=True, timeout=300
    )
    tokens = " ".join(map(str, expected))
    assert done.stdout.splitlines() == [f"tokens {tokens}", "process True", "cuda here False"], (
        done.stdout + done.stderr[-3000:]
    )


# ---------------------------------------------------------------------- nothing waits, nothing compiles


@pytest.fixture
def no_host_wait() -> Iterator[None]:
    """Whatever in torch makes the host wait for the device is an error meanwhile, which would end a request."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that it does not see all of them
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@compiles
@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("eager", [True, False])
def test_no_step_makes_the_host_wait_with_any_sampling_option_p1(
    llama: Path, eager: bool, request: pytest.FixtureRequest
) -> None:
    with engine(llama, **({} if eager else CAPTURED), offload=OffloadConfig(host="16MiB")) as llm:
        assert eager == (llm.engine.parts.executor._graphs is None)
        request.getfixturevalue("no_host_wait")
        prompts = (PROMPTS * 3)[: len(EVERY_WAY_TO_DRAW)]
        for _ in range(3):
            assert all(len(output.token_ids) >= 4 for output in llm.generate(prompts, EVERY_WAY_TO_DRAW))
        torch.cuda.set_sync_debug_mode("default")  # closing waits


@pytest.mark.parametrize(
    (
        "family",
        "dtype",
        "max_running",
    ),  # which rows share a warm-up's steps depends on their number, and with it what type their logits have
    [
        ("llama", "float32", 7),
        ("gemma2", "float32", 7),
        ("mistral", "float32", 7),
        ("llama", "bfloat16", 6),
        ("llama", "bfloat16", 9),
    ],
)
def test_no_kernel_is_compiled_while_serving_p3(
    family: str, dtype: str, max_running: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    compiled: list[Any] = []
    model = tiny_model_dir(family, tmp_path, 2)
    with engine(model, offload=OffloadConfig(host="16MiB"), max_running=max_running, dtype=dtype) as llm:
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
        for count in (1, 2, 3, 5):
            llm.generate(PROMPTS[:count], GREEDY)
        llm.generate((PROMPTS * 3)[: 1 + len(EVERY_WAY_TO_DRAW)], [*EVERY_WAY_TO_DRAW, GREEDY])
        for asked in EVERY_WAY_TO_DRAW:
            llm.generate(PROMPTS[:1], asked)
    assert compiled == []


@pytest.mark.usefixtures("few_shapes", "uncompiled")
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("proposer", ["ngram", "mtp", "draft"])
def test_a_step_with_drafts_neither_blocks_the_host_nor_compiles_p1_p3(
    llama: Path,
    tmp_path: Path,
    proposer: str,
    eager: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    import triton

    compiled: list[Any] = []
    options: dict[str, Any] = {} if eager else CAPTURED
    with engine(
        llama, **options, offload=OffloadConfig(host="16MiB"), speculative=drafting(proposer, llama, tmp_path)
    ) as llm:
        graphs = llm.engine.parts.executor._graphs
        assert eager or (graphs is not None and any(key.drafts for key in graphs.keys))
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
        request.getfixturevalue("no_host_wait")
        for _ in range(3):
            llm.generate((PROMPTS * 3)[: len(EVERY_WAY_TO_DRAW)], EVERY_WAY_TO_DRAW)
        torch.cuda.set_sync_debug_mode("default")  # closing waits
        assert llm.metrics.value("draft_tokens_total", proposer) > 0
    assert compiled == []


@compiles
@pytest.mark.parametrize("max_running", [6, 1])  # the first step has so many tokens
def test_layers_are_compiled_once_and_never_while_serving_p3(
    max_running: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    kernels: list[Any] = []
    graphs = torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr(
        GraphKey, "all_of", classmethod(lambda cls, **bounds: [GraphKey(1), GraphKey(0, 64)])
    )  # the rest is launched kernel by kernel
    torch._dynamo.reset()
    graphs.clear()
    with engine(llama, eager=False, max_running=max_running, chunk_tokens=64) as llm:
        at_start = graphs["unique_graphs"]
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: kernels.append(what["repr"]))
        for count in (1, 2, 3, 5):
            llm.generate(PROMPTS[:count], GREEDY)
        llm.generate((PROMPTS * 3)[: len(EVERY_WAY_TO_DRAW)], EVERY_WAY_TO_DRAW)
        assert graphs["unique_graphs"] == at_start
    assert kernels == []
    assert 6 <= at_start <= 8  # four parts of a layer and two around them, and what few of them need besides


def test_a_second_start_reuses_the_kernels_compiled_by_the_first(llama: Path, tmp_path: Path) -> None:
    serve = (
        "import sys; from sidestream import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], device='cuda', dtype='float32', kv_memory='64MiB', max_running=1, "
        "chunk_tokens=64) as llm:\n"
        "    llm.generate([[3, 5, 7]], SamplingParams(max_tokens=4))"
    )
    places = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in places}
    kept: list[set[Path]] = []
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", serve, str(llama)],
            env={**environment, "SIDESTREAM_CACHE": str(tmp_path)},
            check=True,
            timeout=180,
        )
        kept.append(set((tmp_path / "compiled").rglob("*.cubin")))
    assert {path.stem for path in kept[0]} >= {
        "attend",
        "write",
        "combine",
        "advance",
    }  # before the layers and behind them
    assert kept[1] == kept[0]


@compiles
@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("proposer", ["mtp", "draft"])
def test_the_proposer_is_compiled_and_captured_with_the_model(
    llama: Path, tmp_path: Path, proposer: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(llama, **CAPTURED) as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY))
    caplog.set_level("INFO", logger="sidestream.engine.warm_up")
    with engine(llama, **CAPTURED, speculative=drafting(proposer, llama, tmp_path)) as llm:
        assert "forward passes are compiled and captured" in caplog.text
        assert "cannot be" not in caplog.text
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
        assert llm.metrics.value("draft_tokens_total", proposer) > 0
        histograms = llm.metrics.snapshot().histograms
        drafted, verified = (histograms[name][proposer,] for name in ("draft_seconds", "verify_seconds"))
        assert 0 < drafted.count == verified.count
        assert 0 < drafted.total / drafted.count < 1
        assert 0 < verified.total / verified.count < 1


# ---------------------------------------------------------------------- what goes wrong


def test_a_step_without_gpu_memory_ends_its_request_only(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(llama) as llm:
        expected = tokens(llm.generate([PROMPTS[1]], GREEDY))
        model = llm.engine.parts.executor._model
        forward, left = model.forward, [1]

        def greedy_for_memory(*given: Any) -> Any:
            if left:
                left.pop()
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            return forward(*given)

        monkeypatch.setattr(model, "forward", greedy_for_memory)
        with pytest.raises(
            RequestError, match=r"the forward pass failed: out of device memory: .*; lower the KV memory or the batch"
        ):
            llm.generate([PROMPTS[0]], GREEDY)
        assert llm.health().status == "ok"
        assert tokens(llm.generate([PROMPTS[1]], GREEDY)) == expected


def test_a_pool_or_host_tier_larger_than_memory_is_refused_at_start(llama: Path) -> None:
    from sidestream import ConfigError

    with pytest.raises(ConfigError, match=r"of the GPU's .* GiB are free"):
        engine(llama, kv_memory="100TiB")
    with pytest.raises(ConfigError, match=r"this machine has .* GiB available"):
        engine(llama, offload=OffloadConfig(host="100TiB"))
    with engine(llama) as llm:  # and nothing of them is left open
        assert llm.generate([PROMPTS[2]], GREEDY)


LOST = """
import sys
import torch
from sidestream import LLM, EngineStopped, OffloadConfig, RequestError, SamplingParams
from sidestream_kv.device.cuda import kernels

offload = OffloadConfig(host="16MiB", disk=sys.argv[2], disk_capacity="64MiB")
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
llm = LLM(sys.argv[1], device="cuda", dtype="float32", kv_memory="64MiB", offload=offload)
print("tokens", *llm.generate([[5 + at for at in range(200)]], greedy)[0].token_ids)
print("flushed", bool(llm.flush()))
value = torch.zeros(1, dtype=torch.int64, device="cuda")
stream = llm.engine.parts.executor._stream
# Nothing is mapped at address 64.
llm.engine.call(lambda: stream.submit(lambda: kernels.deliver(64, value.data_ptr(), 8)) and None)
for error in (RequestError, EngineStopped):
    try:
        llm.generate([[9] * 40], greedy)
        print("went on")
    except (RequestError, EngineStopped) as told:
        print("told", "the GPU is lost" in str(told))
print("health", llm.health().status, llm.health().detail)
llm.close()
print("closed")
"""


def test_a_lost_gpu_ends_the_engine_with_a_message_and_leaves_the_disk_intact(llama: Path, tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    done = subprocess.run(
        [sys.executable, "-c", LOST, llama, disk], check=False, capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    said = done.stdout + done.stderr[-3000:]
    assert [line.split()[0] for line in lines] == ["tokens", "flushed", "told", "told", "health", "closed"], said
    assert lines[1:4] == ["flushed True", "told True", "told True"], said
    assert lines[4].startswith("health failed DeviceLost: the GPU is lost"), said

    offload = OffloadConfig(host="16MiB", disk=disk, disk_capacity="64MiB")
    with engine(llama, "cpu", offload=offload) as llm:
        always_load(llm)
        (output,) = llm.generate([[5 + at for at in range(200)]], GREEDY)
    assert output.cached.disk == 192
    assert lines[0] == " ".join(["tokens", *map(str, output.token_ids)])


def test_doctor_reports_the_gpu_and_the_speed_of_its_link() -> None:
    from sidestream.cli.probes import findings

    found = {finding.name: finding for finding in findings(None)}
    assert found["gpus"].data["device"] == "cuda"
    assert "--device cuda uses the first one" in found["gpus"].text
    assert found["host to gpu"].data["to_gpu_bytes_per_s"] > GIB  # type: ignore[operator]
