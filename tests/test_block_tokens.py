"""How many tokens a block holds if the config does not say, and the sizes that must fit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, ConfigError, EngineConfig
from sidestream.engine import build_engine, loading
from sidestream.models import cache_parts, load_model, loader


def test_blocks_are_larger_on_a_gpu_for_models_with_recurrent_states(tmp_path: Path) -> None:
    tokens = {
        (family, kind): cache_parts(
            str(tiny_model_dir(family, tmp_path / family, 1)), block_tokens=None, device=torch.device(kind)
        ).kv.block_tokens
        for family in ("llama", "qwen3_next")
        for kind in ("cpu", "cuda")
    }
    assert tokens.pop(("qwen3_next", "cuda")) == 64
    assert set(tokens.values()) == {16}
    asked = cache_parts(str(tmp_path / "qwen3_next"), block_tokens=16, device=torch.device("cuda"))
    assert asked.kv.block_tokens == 16


def test_sizes_are_checked_against_default_block_tokens_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "torch_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(loading, "load_for", None)  # a call of it fails
    directory = tiny_model_dir("qwen3_next", tmp_path, 1)
    with pytest.raises(ConfigError, match=r"chunk_tokens is 96: it must be a multiple of block_tokens \(64\)"):
        LLM(directory, chunk_tokens=96)
    with pytest.raises(ConfigError, match=r"state_interval is 32: it must be a multiple of block_tokens \(64\)"):
        LLM(directory, state_interval=32)


def test_sizes_are_checked_against_the_blocks_of_a_model_loaded_before(tmp_path: Path) -> None:
    model = load_model(str(tiny_model_dir("llama", tmp_path, 1)), block_tokens=64)
    with pytest.raises(
        ConfigError, match=r"chunk_tokens is 96: .* \(64\), .*; give a multiple, or a block_tokens that"
    ):
        build_engine(model, EngineConfig(device="cpu", kv_memory="8MiB", chunk_tokens=96))


def test_layouts_are_read_while_no_other_thread_builds_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts_of, locked = loader.parts_of, list[bool]()

    def watched(*given: Any, **options: Any) -> Any:
        locked.append(loader._ONE_BUILDS.locked())
        return parts_of(*given, **options)

    monkeypatch.setattr(loader, "parts_of", watched)
    cache_parts(str(tiny_model_dir("qwen3_next", tmp_path, 1)), block_tokens=16)
    assert locked == [True]
