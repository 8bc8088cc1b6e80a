"""Kernels compile for a GPU on a machine that has none: the interpreter runs much that the compiler refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)


def test_every_kernel_compiles_for_hopper() -> None:
    """In a process of its own: in this one kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        "update_block_tables", "draft_rows", "resolve_inputs", "resolve_inputs", "draft_slots", *["advance"] * 6,
        *[*["search_threshold", "sum_weights"] * 2, "keep_typical", *["sample_token"] * 2, "penalise", "mask"] * 3,
        "previous_hidden", "keep_hidden",
        "argmax_of_parts", "argmax_of_maxima", "match_ngram", "take_forced",
        *["sort_by_expert"] * 2, *["multiply_by_expert"] * 13, *["activate"] * 4, "add_by_token",
        *["largest_of_rows"] * 3, *["add_adapters"] * 3, *["multiply_row"] * 4, *["multiply"] * 8,
        *["write"] * 3, *["rotate_and_write"] * 3, *["write_latents"] * 2, *["attend"] * 12, *["combine"] * 2,
        *["attend_in_splits", "merge"] * 2,
        *["gather_contiguous"] * 3, "attend_contiguous", "convolve", "recur", "norm", *["solve", "advance"] * 2,
        *["pack_vectors"] * 3,
    ]  # fmt: skip
