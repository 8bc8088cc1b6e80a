"""Kernels that start while the previous kernel still runs (programmatic dependent launch): until they wait for its end,
they read only what was written before the step's first layer, and write nothing. In Triton's interpreter, with every
load and store on record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from paged_rig import DEVICE, LAYER, Launch, Options, Shape, make_batch, make_rows, packed, pool_for, rotary_for

triton = pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)
if DEVICE == "cuda":
    pytest.skip("on a GPU the kernels are compiled: no load can be recorded", allow_module_level=True)

from triton.runtime import interpreter  # noqa: E402

from sidestream.attention.triton import kernels, launch, paged_attention  # noqa: E402
from sidestream_kv.device.cuda import peer_kernels  # noqa: E402

ROWS = [(1, 30), (3, 150), (1, 1), (9, 9), (40, 75)]


@dataclass
class Early:
    """Whether the running program has not waited yet, and what programs did before they waited."""

    running: bool = False
    waits: int = 0
    loads: list[int] = field(default_factory=list)
    stores: int = 0


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Early:
    seen, builder = Early(), interpreter.InterpreterBuilder

    def wait() -> None:
        seen.running = False
        seen.waits += 1

    def patch(name: str, record: Callable[..., None]) -> None:
        plain = getattr(builder, name)

        def recorded(self: Any, *args: Any) -> Any:
            record(*args)
            return plain(self, *args)

        monkeypatch.setattr(builder, name, recorded)

    def begin(*_: object) -> None:
        seen.running = True

    def load(pointers: Any, mask: Any, *_: object) -> None:
        if seen.running:
            seen.loads += [int(one) for one in pointers.data[mask.data]]

    def store(*_: object) -> None:
        seen.stores += seen.running

    patch("set_grid_idx", begin)
    patch("create_masked_load", load)
    patch("create_masked_store", store)
    monkeypatch.setattr(kernels, "gdc_wait", wait)
    monkeypatch.setattr(kernels, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(launch, "_overlap", lambda device: launch._Overlap(True, {"OVERLAP": True}))
    return seen


@pytest.mark.parametrize("splits", [Launch(), Launch(split_rows=3, split_queries=3, short_rows=2, short_queries=9)])
@pytest.mark.parametrize(("options", "rotates"), [(Options(), True), (Options(sliding_window=20), False)])
def test_a_kernel_reads_only_lengths_and_writes_nothing_before_its_wait(
    splits: Launch, options: Options, rotates: bool, early: Early, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape()
    rows = make_rows(ROWS, shape)
    batch = make_batch(pool_for(rows, shape, options), rows, shape, splits)
    for first in (kernels.write, kernels.rotate_and_write):
        monkeypatch.setattr(first, "run", alone(first.run, early))
    query, key, value = packed(rows, 0, shape)
    paged_attention(
        query, key, value, LAYER, batch, scale=0.25, sliding_window=options.sliding_window,
        rotary=rotary_for(len(query), shape, normed=True) if rotates else None,
    )  # fmt: skip
    lengths = {address for lens in (batch.cu_seqlens_q, batch.kv_lens) for address in addresses(lens)}
    assert early.waits and early.loads
    assert not early.stores
    assert {*early.loads} <= lengths


@pytest.mark.parametrize(("add", "num_bytes"), [("add_few", "few_bytes"), ("add_many", "many_bytes")])
def test_peer_sum_kernels_read_and_write_nothing_before_their_wait(
    add: str, num_bytes: str, early: Early, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_kernels, "gdc_wait", kernels.gdc_wait)
    monkeypatch.setattr(peer_kernels, "_overlap", lambda device: {"OVERLAP": True})
    monkeypatch.setattr(peer_kernels, "_PROGRAMS", 2)
    values, words = torch.arange(1.0, 601.0), 8192
    box = torch.zeros(getattr(peer_kernels, num_bytes)(1, words), dtype=torch.uint8)
    calls = torch.zeros(peer_kernels.counters(words), dtype=torch.int32)
    abort = torch.zeros(1, dtype=torch.int32)
    getattr(peer_kernels, add)(values, torch.tensor([box.data_ptr()]), calls, abort, rank=0, words=words)
    assert early.waits
    assert not early.loads
    assert not early.stores
    assert torch.equal(values, torch.arange(1.0, 601.0))  # of one rank


def alone(run: Callable[..., Any], early: Early) -> Callable[..., Any]:
    """The first kernel of a layer: it starts after the previous kernel has ended."""

    def recorded(*args: Any, **options: Any) -> Any:
        loads, stores = len(early.loads), early.stores
        done = run(*args, **options)
        del early.loads[loads:]
        early.stores = stores
        return done

    return recorded


def addresses(values: torch.Tensor) -> list[int]:
    return [values.data_ptr() + index * values.element_size() for index in range(values.numel())]
