from __future__ import annotations

from pathlib import Path

import pytest

from proof.tiny_models import tiny_model_dir


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny checkpoint that a test may damage."""
    return tiny_model_dir("llama", tmp_path / "llama", 0)
