"""The head that is shipped for the demo model: it is found for that model alone, fits it, and most of what it drafts
first is right.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, SamplingParams, SpeculativeConfig
from sidestream.models.catalog import CATALOG, MARKER, prepared, shipped_head
from sidestream.text import sample_tasks

pytestmark = pytest.mark.slow

DEMO = "smollm2-135m-instruct"


def marked(directory: Path, text: str) -> Path:
    (directory / MARKER).write_text(text, encoding="utf-8")
    return directory


def test_the_demo_models_shipped_head_records_how_it_was_made(tmp_path: Path) -> None:
    head = shipped_head(marked(tmp_path, json.dumps({"model": DEMO})))
    assert head is not None
    assert head.name == CATALOG[DEMO].head
    with safe_open(head, framework="pt") as file:
        record = file.metadata()
    assert json.loads(record["model"]) == DEMO
    assert {"steps", "answers", "seed", "tokens", "loss", "drafts"} <= record.keys()
    assert head.stat().st_size < 10 << 20


@pytest.mark.parametrize("text", [json.dumps({"model": "another"}), json.dumps({}), "[]", "no json"])
def test_other_models_have_no_shipped_head(text: str, tmp_path: Path) -> None:
    assert shipped_head(tmp_path) is None
    assert shipped_head(marked(tmp_path, text)) is None
    assert shipped_head(tiny_model_dir("llama", tmp_path / "tiny", 1)) is None


def test_the_head_drafts_for_prompts_beyond_its_training() -> None:
    path = prepared(DEMO)
    if path is None:
        pytest.skip(f"the demo model is not in the cache: `sidestream models prepare {DEMO}` fetches it")
    # By its directory, as other programs are given it.
    config = SpeculativeConfig("mtp", max_drafts=2, adaptive=False)
    with LLM(path, dtype="float32", kv_memory="64MiB", compute_threads=1, speculative=config) as llm:
        prompts = [
            llm.tokenizer.chat([{"role": "user", "content": task}]) for task in sample_tasks(held_out=True)[::120]
        ]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        accepted, drafted = (llm.metrics.value(f"{name}_tokens_total", "mtp") for name in ("accepted", "draft"))
    assert accepted > 0.4 * drafted > 0
