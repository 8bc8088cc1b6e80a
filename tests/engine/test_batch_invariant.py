"""With `batch_invariant`, the tokens and log-probabilities of a request have the same bits in every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proof.tiny_models import tiny_model_dir
from sidestream import (
    LLM,
    ConfigError,
    EngineConfig,
    ModelError,
    OffloadConfig,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
)
from sidestream.attention.paged import PagedBatch
from sidestream.models import load_model

SHARED = [7 + position * 5 % 200 for position in range(48)]
# Prompts of 3 to 118 tokens, a third of which share their first 48; many repeat, so that n-grams are drafted.
PROMPTS = [
    (SHARED if number % 3 == 0 else []) + [3 + number * place % (9 + number) for place in range(3 + number * 7 // 4)]
    for number in range(40)
]
PARAMS = [
    SamplingParams(
        temperature=number % 2, seed=number, max_tokens=20, ignore_eos=True, logprobs=2,
        prompt_logprobs=1 if number % 8 == 1 else None,
    )
    for number in range(len(PROMPTS))
]  # fmt: skip


def engine(model: Path, **options: Any) -> LLM:
    return LLM(model, **{"device": "cpu", "dtype": "float32", "max_model_len": 256, "compute_threads": 1, **options})


def loading_engine(model: Path, **options: Any) -> LLM:
    llm = engine(model, **options)
    costs = llm.engine.parts.costs
    assert costs is not None
    costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # a tiny model computes sooner than it loads
    return llm


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.completions[0].logprobs, output.prompt_logprobs) for output in outputs]


def alone_and_together(
    model: Path, *, blocks: int, every: int = 1, **options: Any
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """The answers of each request alone in whole chunks; of all at once, cut, preempted and drafted; of all from host
    memory; and of all from disk, after a restart.
    """
    prompts, params = PROMPTS[::every], PARAMS[::every]
    with engine(model, prefix_cache=False, **options) as llm:
        alone = [llm.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    options |= {
        "kv_memory": blocks * llm.engine.parts.layout.block_bytes,
        "chunk_tokens": 16,
        "max_running": 12,
        "separate_tail_chunk": False,
        "offload": OffloadConfig(host="64MiB", disk=model / "kv"),
        "speculative": SpeculativeConfig("ngram", 3, adaptive=False),
    }
    with loading_engine(model, **options) as llm:
        together = llm.generate(prompts, params)
        assert every > 1 or llm.metrics.value("preemptions_total") > 0
        assert llm.metrics.value("accepted_tokens_total", "ngram") > 0
        assert llm.flush()
        llm.engine.call(llm.engine.parts.blocks.forget_all)
        from_host = llm.generate(prompts, params)
        assert sum(output.cached.host for output in from_host) > 100
    with loading_engine(model, **options) as llm:
        from_disk = llm.generate(prompts, params)
        assert sum(output.cached.disk for output in from_disk) > 100
    return answers(alone), answers(together), answers(from_host), answers(from_disk)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("llama"), 1)


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("llama", "float32", {"blocks": 10, "every": 5}),
        *(
            pytest.param(*own, marks=pytest.mark.slow)  # 40 requests take 10 s and more
            for own in (
                ("llama", "float32", {"blocks": 12, "compute_threads": 3}),
                ("qwen3", "bfloat16", {"blocks": 12}),
                ("gemma3", "float32", {"blocks": 48}),  # most of them pages, for five of six layers
            )
        ),
    ],
)
def test_a_request_has_the_same_bits_alone_in_a_batch_cut_drafted_and_loaded(
    family: str, dtype: str, options: dict[str, int], tmp_path: Path
) -> None:
    model = tiny_model_dir(family, tmp_path, 1)
    alone, together, from_host, from_disk = alone_and_together(model, dtype=dtype, batch_invariant=True, **options)
    assert together == alone
    assert from_host == alone
    assert from_disk == alone


def test_without_the_mode_bits_depend_on_the_batch(llama: Path) -> None:
    alone, together, from_host, _ = alone_and_together(llama, blocks=10, every=5)
    assert sum(a != b for a, b in zip(alone, together, strict=True)) > 3
    assert sum(a != b for a, b in zip(alone, from_host, strict=True)) > 3


def test_keys_of_invariant_kv_depend_on_the_mode_and_the_number_of_threads(llama: Path) -> None:
    fingerprints = [
        load_model(str(llama), block_tokens=16, **options).fingerprint
        for options in (
            {},
            {"batch_invariant": True, "compute_threads": 1},
            {"batch_invariant": True, "compute_threads": 2},
        )
    ]
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize("wrote", [True, False])
def test_a_directory_of_the_other_mode_is_refused_and_the_mode_is_named(
    wrote: bool, llama: Path, tmp_path: Path
) -> None:
    offload = OffloadConfig(host="4MiB", disk=tmp_path / "kv")
    engine(llama, batch_invariant=wrote, kv_memory="8MiB", offload=offload).close()
    mode, other = r"'\w{32} with batch_invariant \(\w+ with 1 threads, 16 rows, torch [^']+\)'", r"'\w{32}'"
    then, here = (mode, other) if wrote else (other, mode)
    with pytest.raises(ConfigError, match=f"fingerprint {then} .here {here}.*, or load the model as that fingerprint"):
        engine(llama, batch_invariant=not wrote, kv_memory="8MiB", offload=offload)


def test_the_first_part_of_a_batch_waits_for_the_loads_of_all_parts() -> None:
    waited: list[int] = []
    tables = torch.tensor([[1, 0], [2, 3]])
    batch = PagedBatch(
        torch.zeros(4, 1, 2, 16, 1, 8), torch.arange(21), tables, (0, 1, 21), (9, 28), 1, waited.append, one_by_one=True
    )
    first, second = batch.part(0, 16), batch.part(16, 21)
    assert (first.cu_seqlens_q, first.kv_lens, first.num_decode) == ((0, 1, 16), (9, 23), 1)
    assert (second.cu_seqlens_q, second.kv_lens, second.num_decode) == ((0, 5), (28,), 0)
    for part in (first, second):
        part.write(*torch.ones(2, len(part.slot_mapping), 1, 8), 0)
    assert waited == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel is 2: only 1 is supported"),
        ({"max_loras": 1}, "the number of LoRA adapters is 1: only 0 is supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8: only auto"),
        ({"offload": OffloadConfig(kv_dtype="int8")}, "offload kv_dtype is int8: only auto"),
        ({"speculative": SpeculativeConfig("mtp")}, "the proposer is mtp: only ngram or grammar"),
        ({"eager": True, "device": "cuda"}, "batch_invariant and eager are on"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:20],
)
def test_options_that_are_not_known_to_keep_bits_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(batch_invariant=True, **options)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen3_next", "its layers keep recurrent states"),
        ("deepseek_v2", "its attention keeps latents"),
        ("gemma4_shared", "its layers differ in their heads"),
        ("gpt_neo", "its attention is code of its own"),
        ("qwen3_moe", "its model.layers.0.mlp.experts is a Qwen3MoeExperts, not a Linear"),
    ],
)
def test_models_that_are_not_known_to_keep_bits_are_refused(family: str, message: str, tmp_path: Path) -> None:
    directory = tiny_model_dir(family, tmp_path, 1)
    with pytest.raises(ModelError, match=f"batch_invariant is on, but {message}.*leave batch_invariant out"):
        load_model(str(directory), block_tokens=16, batch_invariant=True)
