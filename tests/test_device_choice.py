"""Which device an engine runs on: what is asked for, what there is, and what is said when they do not agree."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, ConfigError, EngineConfig, SamplingParams
from sidestream.cli.options import engine_config
from sidestream.cli.probes import Status, findings
from sidestream_kv.device.choice import torch_device, why_no_gpu
from sidestream_kv.device.cuda import device as cuda_device


def test_an_error_about_an_unknown_device_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="no device cudo; did you mean cuda"):
        EngineConfig(device="cudo")


_BAD_BLOCKS = "block_tokens is 8: attention on a GPU needs a multiple of 16; give such a number, or device cpu"


def test_blocks_that_a_gpu_cannot_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=_BAD_BLOCKS):
        EngineConfig(device="cuda", block_tokens=8)
    assert EngineConfig(device="cpu", block_tokens=8).block_tokens == 8


def test_the_default_device_is_auto() -> None:
    assert EngineConfig().device == engine_config().device == engine_config(device="auto").device == "auto"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(index: int = 0) -> Any:
        raise ConfigError("the CUDA driver cannot be loaded (injected): install NVIDIA's driver, or use the cpu device")

    monkeypatch.setattr(cuda_device, "open_driver", missing)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "open_driver", lambda index=0: None)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_auto_means_cpu_and_cuda_raises_with_the_cause() -> None:
    assert torch_device("auto") == torch_device("cpu") == torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"device is 'cuda': the CUDA driver cannot be loaded \(injected\): install NVIDIA's driver"
    ):
        torch_device("cuda")


@pytest.mark.usefixtures("a_gpu")
def test_auto_refuses_blocks_that_the_gpu_cannot_read_before_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=_BAD_BLOCKS):
        LLM("no such model", block_tokens=8)


@pytest.mark.usefixtures("a_gpu")
def test_with_a_gpu_auto_is_cuda_if_its_kernels_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert torch_device("auto") == torch_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "install the version of triton that torch requires" in str(why_no_gpu())
    assert torch_device("auto") == torch.device("cpu")


@pytest.mark.usefixtures("no_gpu")
def test_a_missing_gpu_is_reported_before_a_model_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'cuda'"):
        LLM(tmp_path / "no such model", device="cuda")


@pytest.mark.usefixtures("no_gpu")
def test_auto_serves_on_the_cpu_without_a_gpu(tmp_path: Path) -> None:
    with LLM(tiny_model_dir("llama", tmp_path, 1), device="auto", kv_memory="8MiB", compute_threads=1) as llm:
        assert llm.engine.parts.device.kind == "cpu"
        assert llm.generate("The", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids


@pytest.mark.usefixtures("no_gpu")
def test_doctor_reports_why_no_gpu_is_used() -> None:
    found = next(finding for finding in findings(None) if finding.name == "gpus")
    assert found.data["device"] == "cpu"
    assert "install NVIDIA's driver" in str(found.data["missing"])
    assert found.status in (Status.OK, Status.WARN)


@pytest.mark.freezes_gc_heap
def test_the_heap_is_frozen_while_an_engine_serves(tmp_path: Path) -> None:
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    with LLM(tiny_model_dir("llama", tmp_path, 1), kv_memory="8MiB", compute_threads=1):
        assert gc.get_freeze_count() > before + 10_000
        # Else young objects would be looked through in every step of a few hundred requests.
        assert gc.get_threshold()[0] > 5_000
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds
