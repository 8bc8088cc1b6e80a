"""An engine whose tiers hold KV in 8 bits: how near its answers are, what its blocks are never mixed up with, and what
it refuses.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, ConfigError, EngineConfig, OffloadConfig, SamplingParams
from sidestream.engine.build_plan import tier_layout
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers.inspection import differences

FIRST = SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True)
PROMPTS = [[(7 * number + 3 * at) % 200 for at in range(130)] for number in range(3)]
BLOCKS = 8 * len(PROMPTS)
# The weights of the tiny model are ten times as large as usual, so its answers depend on every token. Seen: 0.03.
NEAR = 0.2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("tiny"), seed=1)


def served(model: Path, kv_dtype: str, disk: Path, *, check_order: bool = False) -> LLM:
    offload = OffloadConfig(host="4MiB", disk=disk, disk_capacity="8MiB", write_policy="all", kv_dtype=kv_dtype)
    llm = LLM(model, kv_memory="8MiB", block_tokens=16, compute_threads=1, offload=offload, check_order=check_order)
    assert llm.engine.parts.costs is not None
    llm.engine.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # always load, however busy
    return llm


def logprobs(llm: LLM) -> list[float]:
    return [answer.completions[0].logprobs[0].logprob for answer in llm.generate(PROMPTS, FIRST)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_hits_of_host_memory_and_of_disk_give_near_log_probabilities(family: str, tmp_path: Path) -> None:
    """The second has layers with a window, the third latents."""
    model = tiny_model_dir(family, tmp_path / "model", seed=1)
    with served(model, "int8", tmp_path / "kv", check_order=True) as llm:
        cold = logprobs(llm)
        assert llm.flush()
        for tiers, tier in ((("device",), "host"), (("device", "host"), "disk")):
            for each in tiers:
                llm.reset_prefix_cache(each)
            warm = logprobs(llm)
            assert llm.metrics.value("cached_tokens_total", tier) == BLOCKS * 16
            changes = [abs(one - other) for one, other in zip(cold, warm, strict=True)]
            assert 0 < max(changes) < NEAR


def test_tiers_hold_and_move_a_third_of_the_bytes_of_float32(model: Path, tmp_path: Path) -> None:
    moved = {}
    for kv_dtype in ("auto", "int8"):
        with served(model, kv_dtype, tmp_path / kv_dtype) as llm:
            logprobs(llm)
            assert llm.flush()
            count = llm.metrics.value
            moved[kv_dtype] = count("transfer_bytes_total", "store"), count("transfer_bytes_total", "disk-write")
    assert moved["auto"] == (BLOCKS * 3 * 2 * 16 * 2 * 16 * 4,) * 2
    assert moved["int8"] == (BLOCKS * 3 * 2 * 16 * 2 * (16 + 4),) * 2


def test_an_engine_without_tiers_has_no_form_for_them() -> None:
    with pytest.raises(ConfigError, match="kv_dtype is int8, but there is no host tier"):
        OffloadConfig(host=0, kv_dtype="int8")


def test_engines_with_and_without_8_bits_have_different_keys(model: Path) -> None:
    roots = set()
    for kv_dtype in ("auto", "int8"):
        with LLM(model, kv_memory="8MiB", offload=OffloadConfig(host="4MiB", kv_dtype=kv_dtype)) as llm:
            root = llm.engine.parts.scheduler.key_root
            llm.update_weights(str(model))  # the same ones, so the keys stay the same
            assert llm.engine.parts.scheduler.key_root == root
            roots.add(root)
    assert len(roots) == 2


def test_a_directory_of_exact_blocks_is_refused_and_the_difference_is_named(model: Path, tmp_path: Path) -> None:
    served(model, "auto", tmp_path / "exact").close()
    with pytest.raises(ConfigError, match="was written by another model or layout: stored_as"):
        served(model, "int8", tmp_path / "exact")
    served(model, "int8", tmp_path / "packed").close()
    (difference,) = differences(tmp_path / "exact", tmp_path / "packed")
    assert difference == ("stored_as", None, "int8 with a float32 scale for each vector")


@pytest.mark.parametrize(
    ("states", "options", "reason"),
    [(object(), {}, "the model has recurrent states"), (None, {"tensor_parallel": 2}, "the engine has 2 ranks")],
)
def test_kv_that_cannot_be_packed_is_refused_by_name(states: object, options: dict[str, Any], reason: str) -> None:
    layout = KVLayout(1, 1, 16, 16, "bfloat16")
    model: Any = SimpleNamespace(layout=layout, state_layout=states)
    config = EngineConfig(offload=OffloadConfig(kv_dtype="int8"), **options)
    with pytest.raises(ConfigError, match=f"kv_dtype is int8, but {reason}.*leave kv_dtype out"):
        tier_layout(model, config)
    assert tier_layout(model, EngineConfig(offload=OffloadConfig(), **options)) is layout
