"""A pool of keys and values in float8: numbers are rounded and bounded when they are written, and attention is that
over the numbers that the pool holds. Both backends; Triton's kernels on a GPU if there is one, else in its interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_rig import (
    DEVICE,
    LAYER,
    Launch,
    Options,
    Row,
    Shape,
    assert_right,
    attend,
    joined,
    make_batch,
    make_rows,
    packed,
    pool_for,
    rotary_for,
)

from sidestream.attention.interface import BatchRows, ungated
from sidestream.attention.paged import TorchAttention
from sidestream.attention.triton import ContiguousKV, DeviceBatch, launch
from sidestream.errors import InvariantError

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

FP8 = torch.float8_e4m3fn
LENS = [(1, 30), (3, 150), (9, 20), (40, 75)]
SPLIT = Launch(split_rows=2, split_queries=3, short_rows=1, short_queries=9, padded_tokens=2)
# Beyond the largest number, between two numbers, and the smallest one.
WRITTEN = {1e4: 448.0, -1e4: -448.0, float("inf"): 448.0, 449.0: 448.0, 17.1: 18.0, -1.05: -1.0, 2**-9: 2**-9}


def in_fp8(states: torch.Tensor) -> torch.Tensor:
    return states.clamp(-448, 448).to(FP8)


def exact(rows: list[Row]) -> list[Row]:
    """The rows, with keys and values that float8 holds exactly."""
    return [
        replace(row, key=in_fp8(row.key).to(row.key.dtype), value=in_fp8(row.value).to(row.value.dtype)) for row in rows
    ]


def torch_batch(pool: torch.Tensor, batch: DeviceBatch) -> Any:
    rows = BatchRows(batch.slot_mapping, batch.block_tables, batch.cu_seqlens_q, batch.kv_lens, 0)
    return TorchAttention().batch(pool, rows, ungated)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU; the other tests run the kernels in the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_sizes_equal_the_formula_over_the_numbers_of_the_pool(dtype: torch.dtype) -> None:
    shape = Shape(32, 8, 128, 16, dtype)
    rows = exact(make_rows([(1, 3000), (4, 900), (300, 2100)], shape))
    launched = Launch(split_rows=2, split_queries=4, tiles=None, split_tokens=256)
    pool = in_fp8(pool_for(rows, shape, Options()))
    assert_right(rows, attend(rows, shape, launch=launched, pool=pool), Options())


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_written_numbers_are_rounded_and_never_beyond_the_largest(dtype: torch.dtype, backend: str) -> None:
    shape = Shape(dtype=dtype)
    rows = make_rows([(2, 2)], shape)
    batch = make_batch(in_fp8(pool_for(rows, shape, Options())), rows, shape, Launch())
    # The interpreter converts what is not a number to the largest number.
    last = 1.0 if backend == "triton" and DEVICE == "cpu" else float("nan")
    given = torch.tensor([*WRITTEN, last]).repeat(2, 2, 2).to(DEVICE, dtype)
    wanted = torch.tensor([*WRITTEN.values(), last]).repeat(2, 2, 2).to(DEVICE)

    (batch if backend == "triton" else torch_batch(batch.kv, batch)).write(given, 2 * given, LAYER)

    block = batch.layer(LAYER)[rows[0].blocks[0], :, :2].float()
    torch.testing.assert_close(block[0], wanted, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(block[1], in_fp8(2 * given).float(), atol=0, rtol=0, equal_nan=True)


def test_rotated_keys_are_written_as_separate_operations_write_them() -> None:
    shape = Shape(8, 2, 64, dtype=torch.float16)
    rows = make_rows([(3, 18), (1, 1)], shape)
    batch = make_batch(in_fp8(pool_for(rows, shape, Options())), rows, shape, Launch())
    separate = replace(batch, kv=batch.kv.clone())
    query, key, value = joined(*(300 * part for part in packed(rows, 0, shape)))
    rotary = rotary_for(len(query), shape, normed=False)

    launch.rotate_and_write(query, key, value, rotary, LAYER, batch, out=torch.empty_like(query))

    launch.write(rotary.apply(query, key, value)[1], value, LAYER, separate, out=torch.empty_like(query))
    assert torch.equal(batch.kv.float().nan_to_num(), separate.kv.float().nan_to_num())
    assert (batch.layer(LAYER).float().abs() == 448).any()


@pytest.mark.parametrize("options", [Options(), Options(sliding_window=33), Options(softcap=1.5, sinks=True)], ids=str)
@pytest.mark.parametrize("launched", [Launch(), SPLIT], ids=["in one pass", "in splits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention_has_the_bits_of_attention_over_the_numbers_of_the_pool(
    dtype: torch.dtype, launched: Launch, options: Options
) -> None:
    shape = Shape(dtype=dtype)
    rows = exact(make_rows(LENS, shape))
    pool = pool_for(rows, shape, options)
    got = attend(rows, shape, options, launched, in_fp8(pool))
    for ours, theirs in zip(got, attend(rows, shape, options, launched, pool), strict=True):
        assert torch.equal(ours, theirs)


def test_a_long_chunk_is_copied_in_the_dtype_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LONG_TOKENS", 64)
    shape = Shape(6, 2, 64, dtype=torch.float16)
    rows = exact(make_rows([(70, 160)], shape))
    outputs, copies = [], []
    for dtype in (torch.float16, FP8):
        contiguous = ContiguousKV.allocate(
            kv_heads=2, head_dim=64, kv_tokens=256, dtype=shape.dtype, device=torch.device(DEVICE)
        )
        assert contiguous is not None
        pool = pool_for(rows, shape, Options()).to(dtype)
        outputs.append(attend(rows, shape, launch=Launch(tiles=None), pool=pool, contiguous=contiguous)[0])
        copies.append(contiguous.keys[:, :160])
    assert torch.equal(*copies) and torch.equal(copies[0], rows[0].key.transpose(0, 1))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_torch_backend_attends_over_the_numbers_of_the_pool(dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    rows = exact(make_rows(LENS, shape))
    pool = pool_for(rows, shape, Options()).cpu()
    query, key, value = (part.cpu() for part in packed(rows, 0, shape))
    batch = make_batch(pool, rows, shape, Launch())
    outputs = [torch_batch(kv, batch).attend(query, key, value, LAYER, scale=0.25) for kv in (in_fp8(pool), pool)]
    assert torch.equal(*outputs)


def test_a_pool_of_another_dtype_than_the_keys_is_refused() -> None:
    shape = Shape()
    rows = make_rows([(1, 30)], shape)
    with pytest.raises(InvariantError, match=r"the pool holds torch.float16: torch.float32 expected, or .*float8"):
        attend(rows, shape, pool=pool_for(rows, shape, Options()).half())
