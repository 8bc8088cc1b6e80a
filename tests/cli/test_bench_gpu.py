"""The benchmarks of a GPU, on the CPU and tiny: they measure what they say, and no bound is claimed for a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.testing.tiny_models import save_head, tiny_model_dir

COMMANDS = {
    "transfer": ["--mib", "8", "--rounds", "1"],
    "interference": ["--rounds", "1"],
    "mailbox": ["--mib", "16", "--tokens", "8"],
    "forward-thread": ["--requests", "32", "--steps", "4", "--pending", "200"],
    "engine": ["--shape", "tiny"],
    "throughput": ["--shape", "tiny"],
}
FIGURES = {
    "transfer": {"store_over_link", "load_over_link", "two_way_over_link", "store_64k_over_link", "load_64k_over_link"},
    "interference": {"decode_under_transfer", "matmul_under_transfer"},
    "mailbox": {"mailbox_ms_p99", "foreign_copy_wait_ms"},
    "forward-thread": {"engine_thread_us_median", "engine_thread_us_max", "host_waits", "pending_submit_us_max"},
    "engine": {"decode_b1_over_floor", "idle_share_max", "ttft_host_over_floor", "itl_p99_during_resume", "async_tokens_identical"},
    "throughput": {"throughput_no_reuse", "throughput_working_set_4x"},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_benchmark_measures_on_the_cpu_too(name: str) -> None:
    command = [sys.executable, "-m", "sidestream", "bench", name, "--device", "cpu", "--json", *COMMANDS[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert FIGURES[name] <= figures.keys()
    assert all(figure["bound"] is None for figure in figures.values())
    if name == "forward-thread":
        assert figures["host_waits"]["value"] == 0
        assert figures["stored_gib"]["value"] > 0


def test_drafting_is_measured_for_each_proposer_and_changes_no_token(tmp_path: Path) -> None:
    model = tiny_model_dir("llama", tmp_path / "model", 3)
    head = save_head(model, tmp_path / "head.safetensors", seed=1)
    command = [sys.executable, "-m", "sidestream", "bench", "speculative", str(model), "--device", "cpu", "--json", "--head", str(head)]
    command += ["--draft-model", str(model), "--rounds", "1", "--batch", "1", "--batch", "2", "--output-tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = {figure["name"]: figure["value"] for figure in json.loads(done.stdout)["figures"]}
    for proposer in ("ngram", "mtp", "draft"):
        assert figures[f"tokens_identical_{proposer}"] == figures[f"accept_lengths_identical_{proposer}"] == 1
        assert figures[f"host_waits_per_step_{proposer}"] == 0
        assert figures[f"dispatch_us_median_{proposer}"] > 0
        assert figures[f"speedup_b2_{proposer}"] > 0
    assert figures["tokens_per_step_draft"] > 3  # the model itself: all its drafts are right
    assert 0 < figures["speculative_idle_share_max"] < 1


def test_device_that_is_not_known_names_the_nearest_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sidestream", "bench", "mailbox", "--device", "cud"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "did you mean cuda" in done.stderr
