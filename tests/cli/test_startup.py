"""What the command line does before any model."""

from __future__ import annotations

import subprocess
import sys

from command_runner import Run

import sidestream
from sidestream.cli.options import DEMO_MODEL
from sidestream.models.catalog import CATALOG


def test_help_lists_every_command(run: Run) -> None:
    result = run("-h")
    assert result.exit_code == 0
    for command in ("serve", "chat", "generate", "batch", "models", "doctor"):
        assert command in result.output


def test_option_version_prints_the_package_version(run: Run) -> None:
    assert run("--version").output == f"sidestream {sidestream.__version__}\n"


def test_no_heavy_package_is_imported_before_a_command_runs() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'starlette', 'uvicorn'}"
    program = f"import sys, sidestream.cli.app; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_package_runs_as_a_program() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "sidestream", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == f"sidestream {sidestream.__version__}\n"


def test_the_default_model_is_in_the_catalogue() -> None:
    assert DEMO_MODEL in CATALOG
