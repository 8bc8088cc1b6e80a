"""What `dtype="auto"` means: the checkpoint's own dtype, or float32 on a CPU that computes much faster in that."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proof.tiny_models import tiny_model_dir
from sidestream.models import kv_token_bytes, load_model, precision, precision_of
from sidestream.models.precision import choose_precision, time_over_float32

GIB = 1 << 30


@pytest.fixture(params=["bfloat16", "float16"])
def stored(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def directory(tmp_path: Path, stored: str) -> Path:
    return tiny_model_dir("llama", tmp_path / "llama", 0, dtype=getattr(torch, stored))


def computes(monkeypatch: pytest.MonkeyPatch, *, over_float32: float, memory: int = 64 * GIB) -> None:
    """As if a product in a stored dtype took so many times as long as one in float32, on a machine of so much
    memory.
    """
    monkeypatch.setattr(precision, "time_over_float32", lambda dtype: over_float32)
    monkeypatch.setattr(precision, "memory_bytes", lambda: (memory, memory // 2))


def test_a_model_is_loaded_in_its_stored_dtype_if_the_cpu_is_fast_in_it(
    directory: Path, stored: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    computes(monkeypatch, over_float32=0.5)
    model = load_model(str(directory), block_tokens=4)
    assert model.layout.dtype == stored
    assert f"model llama: {stored}, as stored: this CPU multiplies {stored} 2.0 times as fast as float32" in caplog.text


def test_a_model_is_loaded_in_float32_if_the_cpu_is_faster_in_it(
    directory: Path, stored: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    computes(monkeypatch, over_float32=4.0)
    model = load_model(str(directory), block_tokens=4)
    assert model.layout.dtype == str(model.module.dtype).removeprefix("torch.") == "float32"
    assert (
        f"model llama: float32, not {stored} as stored: this CPU multiplies float32 4.0 times as fast as {stored}"
        in caplog.text
    )
    assert kv_token_bytes(str(directory)) == model.layout.token_bytes
    assert precision_of(str(directory)).dtype == "float32"


def test_an_explicit_dtype_is_used_even_if_slow(directory: Path, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computes(monkeypatch, over_float32=4.0)
    assert load_model(str(directory), dtype=stored, block_tokens=4).layout.dtype == stored
    assert kv_token_bytes(str(directory), dtype=stored) * 2 == kv_token_bytes(str(directory))


def test_a_config_without_dtype_uses_the_dtype_of_the_weights(
    directory: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = directory / "config.json"
    config.write_text("\n".join(line for line in config.read_text().splitlines() if "dtype" not in line))
    computes(monkeypatch, over_float32=0.5)
    assert precision_of(str(directory)).dtype == load_model(str(directory), block_tokens=4).layout.dtype == stored


def test_no_speed_is_measured_for_a_gpu_or_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    computes(monkeypatch, over_float32=4.0)
    assert str(choose_precision("auto", "bfloat16", weights_bytes=GIB, on_cpu=False)) == "bfloat16, as stored"
    assert str(choose_precision("auto", "float32", weights_bytes=GIB, on_cpu=True)) == "float32, as stored"


def test_float32_is_not_chosen_if_weights_would_use_over_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    computes(monkeypatch, over_float32=4.0, memory=8 * GIB)
    assert choose_precision("auto", "bfloat16", weights_bytes=2 * GIB, on_cpu=True).dtype == "float32"
    kept = choose_precision("auto", "bfloat16", weights_bytes=3 * GIB, on_cpu=True)
    assert kept.dtype == "bfloat16"
    assert "in float32 the weights take 6.0 GiB, more than half of the 8.0 GiB of memory" in kept.reason


def test_the_measurement_does_not_change_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    time_over_float32.cache_clear()
    assert time_over_float32("bfloat16") > 0
    assert torch.get_num_threads() == before


CHOICE = """
from sidestream.models.precision import choose_precision
print(choose_precision("auto", "bfloat16", weights_bytes=0, on_cpu=True).dtype)
"""


def test_float32_is_chosen_if_onednn_is_limited_to_avx2() -> None:
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("oneDNN's limit is for x86")
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHOICE], env=limited, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["float32"]
