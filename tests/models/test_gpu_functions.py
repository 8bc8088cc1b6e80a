"""Packages with GPU kernels that transformers uses: their kernels get only tensors on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations import hub_kernels
from transformers.models.qwen3_5 import modeling_qwen3_5

from proof.tiny_models import tiny_model_dir
from sidestream.models.gpu_functions import keep_kernels_on_gpu

pytestmark = pytest.mark.slow

# Each package's functions, by the module that transformers takes them from.
_FUNCTIONS = {
    "fla/ops/gated_delta_rule/__init__.py": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "causal_conv1d/__init__.py": ("causal_conv1d_fn", "causal_conv1d_update"),
    "mamba_ssm/ops/triton/ssd_combined.py": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "mamba_ssm/ops/triton/selective_state_update.py": ("selective_state_update",),
}
_FAMILIES = {"qwen3_next": "fla", "qwen3_5": "fla", "olmo_hybrid": "fla", "bamba": "mamba_ssm", "lfm2": "causal_conv1d"}

_ANSWER = """
import json, sys
from sidestream import LLM, SamplingParams
for model, package in zip(sys.argv[1::2], sys.argv[2::2]):
    with LLM(model, dtype="float32", device="cpu", kv_memory="4MiB") as llm:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        tokens = llm.generate([[5, 6, 7, 8, 9]], params)[0].token_ids
        print(json.dumps([package in sys.modules, tokens]))
"""


def _answers(models: Mapping[str, Path], path: Path | None) -> tuple[dict[str, list[Any]], str]:
    """For each family, whether its package was used, and its tokens; and what the process wrote to stderr."""
    paths = [str(part) for part in (path, *sys.path) if part]
    wanted = (part for family, model in models.items() for part in (str(model), _FAMILIES[family]))
    done = subprocess.run(
        [sys.executable, "-c", _ANSWER, *wanted],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(models, map(json.loads, done.stdout.splitlines()), strict=True)), done.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages whose functions fail, as kernels do on tensors that are not on a GPU."""
    root = tmp_path_factory.mktemp("packages")
    for file, functions in _FUNCTIONS.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.parents:
            if parent == root:
                break
            (parent / "__init__.py").touch()
        path.write_text(
            "".join(f"def {name}(*args, **named):\n    raise RuntimeError('not on a GPU')\n" for name in functions)
        )
    return root


def test_gpu_kernels_of_other_packages_get_no_cpu_tensors(packages: Path, tmp_path: Path) -> None:
    models = {family: tiny_model_dir(family, tmp_path / family, 1) for family in _FAMILIES}
    (with_packages, _), (without, said) = _answers(models, packages), _answers(models, None)
    for family in _FAMILIES:
        used, tokens = with_packages[family]
        assert used, family  # else transformers does not use the package, and this shows nothing
        assert tokens == without[family][1], family
    assert "not installed" not in said  # the kernels would not be used on this device


def test_functions_wrapped_as_modules_by_package_kernels_are_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """That package turns a function into a module whose `forward` calls it."""
    called: list[str] = []

    def reference(values: torch.Tensor) -> str:
        return "reference"

    def on_gpu(values: torch.Tensor) -> str:
        called.append("kernel")
        return "kernel"

    # As transformers wraps it: a function of its module, with the reference as `__wrapped__`.
    func = types.FunctionType(on_gpu.__code__, vars(hub_kernels), "chosen", None, on_gpu.__closure__)
    func.__wrapped__ = reference  # type: ignore[attr-defined]

    class Func(nn.Module):
        def forward(self, *args: Any, **named: Any) -> Any:
            return func(*args, **named)

    monkeypatch.setattr(modeling_qwen3_5, "a_function", Func(), raising=False)
    keep_kernels_on_gpu(modeling_qwen3_5.Qwen3_5GatedDeltaNet)
    function = vars(modeling_qwen3_5)["a_function"]
    assert [function(torch.zeros(1, device=device)) for device in ("cpu", "meta")] == ["reference", "reference"]
    assert not called
