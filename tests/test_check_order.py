"""An engine that is watched: nothing to find as it is, and an error at its end when a wait is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.mutations import applied, find
from proof.tiny_models import tiny_model_dir
from sidestream import LLM, OffloadConfig, RaceError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model_dir("llama", tmp_path, seed=1)


def watched(model: Path, directory: Path) -> LLM:
    offload = OffloadConfig(host="1MiB", disk=directory, disk_capacity="4MiB")
    return LLM(model, kv_memory="128KiB", compute_threads=1, offload=offload, check_order=True)


def converse(llm: LLM) -> None:
    """Several prompts of several blocks, more than the pool holds, twice over: stores, evictions, loads."""
    for _ in range(2):
        for first in range(6):
            llm.generate([[10 + first + position % 5 for position in range(70)]], GREEDY)
        llm.flush()


def test_the_real_engine_with_all_tiers_has_no_finding(model: Path, tmp_path: Path) -> None:
    for _ in ("cold", "from disk"):
        with watched(model, tmp_path / "kv") as llm:
            converse(llm)
            assert llm.metrics.value("transfer_bytes_total", "load") > 0


def test_a_store_that_omits_a_layer_raises_at_close(model: Path, tmp_path: Path) -> None:
    with (
        applied(find("store-copies-every-layer")),
        pytest.raises(RaceError, match=r"the first: early_publish: .* made host slots 0 .* findable"),
        watched(model, tmp_path / "kv") as llm,
    ):
        converse(llm)
    llm.close()  # judged once


def test_there_is_no_tracer_without_check_order(model: Path) -> None:
    with LLM(model, kv_memory="128KiB", compute_threads=1) as llm:
        assert llm.engine.parts.device.tracer is None
