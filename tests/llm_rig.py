"""Tiny models for tests of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proof.tiny_models import tiny_model_dir


def with_sampling_defaults(directory: Path, **fields: Any) -> Path:
    """A tiny model whose generation_config.json has `fields` too."""
    path = tiny_model_dir("llama", directory, seed=1) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")
    return directory
