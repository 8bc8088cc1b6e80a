from __future__ import annotations

from pathlib import Path

import pytest
from command_runner import interrupts_reach_children, runner

from proof.tiny_models import tiny_model_dir
from sidestream.cli.app import app

__all__ = ["interrupts_reach_children", "run", "tiny"]

run = runner(app, "sidestream")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers are long enough to be interrupted, given `--ignore-eos`."""
    return tiny_model_dir("llama", tmp_path_factory.mktemp("tiny"), seed=1, max_position_embeddings=1 << 15)
