"""What is installed has no laboratory, and serves without the order checker."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from proof.tiny_models import tiny_model_dir

pytestmark = pytest.mark.slow

SERVES = """
import sys
import sidestream.async_llm, sidestream.cli.app, sidestream.engine, sidestream.client.engine_main
import sidestream.server.supervisor
from sidestream.llm import LLM
from sidestream.config import SamplingParams

def kit():
    return [name for name in sys.modules if name.startswith(("proof", "bench", "sidestream_order"))]

assert not kit(), kit()
with LLM(sys.argv[1], device="cpu", kv_memory="8MiB") as llm:
    (output,) = llm.generate(["a prompt"], SamplingParams(max_tokens=2, ignore_eos=True))
assert len(output.token_ids) == 2
assert not kit(), kit()
"""


def test_serving_a_request_imports_no_module_of_the_proof_kit(tmp_path: Path) -> None:
    model = tiny_model_dir("llama", tmp_path / "model", seed=0)
    done = subprocess.run([sys.executable, "-c", SERVES, model], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_has_only_the_package() -> None:
    build = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "hatch"
    ]
    assert build["build"]["targets"]["wheel"]["packages"] == ["src/sidestream"]
    names = {path.name for path in (Path(__file__).parent.parent / "src" / "sidestream").rglob("*")}
    assert not names & {"testing", "torture", "mutations", "miniatures", "bench"}
