"""The worked pages of docs/contributing do what they say, and touch as few files as they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from worked_page import WorkedPage

from proof.tiny_models import tiny_model_dir

pytestmark = pytest.mark.slow


def test_a_sampling_option_touches_three_files_and_is_generated_with(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the page's program compares the kernel with the torch code")
    page = WorkedPage.read("sampling-option.md")
    assert len(page.files) <= 3, page.files
    page.apply(tmp_path)
    page.run(tmp_path, str(tiny_model_dir("llama", tmp_path, seed=1)))


def test_a_metric_touches_the_table_and_the_line_that_writes_it(tmp_path: Path) -> None:
    page = WorkedPage.read("metric.md")
    assert len(page.files) <= 2, page.files
    assert "packages/sidestream-kv/src/sidestream_kv/metrics/counters.py" in page.files
    page.apply(tmp_path)
    page.run(tmp_path, str(tiny_model_dir("llama", tmp_path, seed=1)))


def test_an_attention_backend_is_one_file_and_a_line_in_the_registry(tmp_path: Path) -> None:
    page = WorkedPage.read("attention-backend.md")
    assert len(page.files) <= 2 and "src/sidestream/attention/registry.py" in page.files, page.files
    page.apply(tmp_path)
    page.run(tmp_path, str(tiny_model_dir("gemma2", tmp_path, seed=1)))
