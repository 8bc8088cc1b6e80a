"""Packages with GPU kernels beside transformers: their kernels get no tensor that is not on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.testing.tiny_models import tiny_model_dir

# Each package's functions, by the module that transformers takes them from.
_FUNCTIONS = {
    "fla/ops/gated_delta_rule/__init__.py": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "causal_conv1d/__init__.py": ("causal_conv1d_fn", "causal_conv1d_update"),
    "mamba_ssm/ops/triton/ssd_combined.py": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "mamba_ssm/ops/triton/selective_state_update.py": ("selective_state_update",),
}
_FAMILIES = {"qwen3_next": "fla", "qwen3_5": "fla", "olmo_hybrid": "fla", "bamba": "mamba_ssm", "lfm2": "causal_conv1d"}

_ANSWER = """
import sys, importlib
from sidestream import LLM, SamplingParams
with LLM(sys.argv[1], dtype="float32", device="cpu", kv_memory="4MiB") as llm:
    assert sys.argv[2] in sys.modules, "transformers does not use the package, so this shows nothing"
    print(llm.generate([[5, 6, 7, 8, 9]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0].token_ids)
"""


def _answer(model: Path, package: str, path: Path | None) -> subprocess.CompletedProcess[str]:
    program = _ANSWER if path else _ANSWER.replace("assert", "0 and")
    paths = [str(part) for part in (path, *sys.path) if part]
    return subprocess.run(
        [sys.executable, "-c", program, str(model), package],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


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


@pytest.mark.parametrize(("family", "package"), _FAMILIES.items())
def test_kernels_of_other_packages_get_no_tensors_of_a_cpu(
    family: str, package: str, packages: Path, tmp_path: Path
) -> None:
    model = tiny_model_dir(family, tmp_path, 1)
    with_packages, without = _answer(model, package, packages), _answer(model, package, None)
    assert with_packages.returncode == 0, with_packages.stderr
    assert with_packages.stdout == without.stdout != ""
    assert "not installed" not in without.stderr  # the kernels would not be used on this device
