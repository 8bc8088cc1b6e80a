"""Head norms, rotary embedding and the write of keys and values in one kernel, against separate operations of torch. On
a GPU if there is one, else in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_rig import (
    DEVICE,
    LAYER,
    Launch,
    Options,
    Row,
    Shape,
    joined,
    make_batch,
    make_rows,
    packed,
    pool_for,
    rotary_for,
    rotary_tolerance,
)

from sidestream.attention.triton import DeviceBatch, launch, paged_attention
from sidestream.errors import InvariantError

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

LENS = [(1, 30), (3, 18), (1, 1), (7, 9)]
PADDING = 3


def step(rows: list[Row], shape: Shape, padding: int = 0) -> tuple[DeviceBatch, list[torch.Tensor]]:
    batch = make_batch(pool_for(rows, shape, Options()), rows, shape, Launch(padded_tokens=padding))
    return batch, joined(*(part.nan_to_num(5.0) for part in packed(rows, padding, shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("shape", "lens"),
    [
        (Shape(8, 2, 64), LENS),
        (Shape(3, 3, 80), LENS),
        (Shape(9, 3, 128, 32), LENS),
        (Shape(4, 1, 128), [(1, 20)]),
        (Shape(4, 2, 16), [(37, 40)]),
    ],
    ids=str,
)
def test_one_kernel_equals_separate_operations(
    shape: Shape, lens: list[tuple[int, int]], normed: bool, dtype: torch.dtype
) -> None:
    shape = replace(shape, dtype=dtype)
    batch, (query, key, value) = step(make_rows(lens, shape), shape, PADDING)
    separate = replace(batch, kv=batch.kv.clone())
    rotary = rotary_for(len(query), shape, normed=normed)
    out, zeroed = torch.full((2, *query.shape), 7.0, dtype=dtype, device=DEVICE)
    tokens = len(query) - PADDING

    rotated = launch.rotate_and_write(query, key, value, rotary, LAYER, batch, out=out)

    wanted, wanted_key, _ = rotary.apply(query, key, value)
    launch.write(wanted_key, value, LAYER, separate, out=zeroed)
    tolerance = rotary_tolerance(dtype, normed=normed)
    torch.testing.assert_close(rotated[:tokens], wanted[:tokens], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(batch.kv, separate.kv, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(batch.layer(LAYER)[:, 1].nan_to_num(), separate.layer(LAYER)[:, 1].nan_to_num())
    assert torch.equal(out, zeroed)


@pytest.mark.parametrize("normed", [True, False])
def test_attention_is_that_of_rotated_queries_and_keys(normed: bool) -> None:
    shape = Shape()
    batch, (query, key, value) = step(make_rows(LENS, shape), shape)
    other = replace(batch, kv=batch.kv.clone())
    rotary = rotary_for(len(query), shape, normed=normed)

    attended = batch.attend(query, key, value, LAYER, scale=0.25, rotary=rotary)

    torch.testing.assert_close(
        attended, paged_attention(*rotary.apply(query, key, value), LAYER, other, scale=0.25), atol=1e-6, rtol=1e-6
    )


def test_keys_that_are_written_alone_are_rotated() -> None:
    shape = Shape()
    batch, (_, key, value) = step(make_rows(LENS, shape), shape)
    other = replace(batch, kv=batch.kv.clone())
    rotary = rotary_for(len(key), shape, normed=False)
    batch.write(key, value, LAYER, rotary)
    other.write(rotary.apply(key, key, value)[1], value, LAYER)
    assert torch.equal(batch.kv.nan_to_num(), other.kv.nan_to_num())


def test_embeddings_may_have_half_the_size() -> None:
    shape = Shape()
    batch, (_, key, value) = step(make_rows(LENS, shape), shape)
    other = replace(batch, kv=batch.kv.clone())
    rotary = rotary_for(len(key), shape, normed=False)
    half = replace(rotary, cos=rotary.cos.chunk(2, -1)[0].contiguous(), sin=rotary.sin.chunk(2, -1)[0].contiguous())
    batch.write(key, value, LAYER, rotary)
    other.write(key, value, LAYER, half)
    assert torch.equal(batch.kv.nan_to_num(), other.kv.nan_to_num())
    assert all(map(torch.equal, rotary.apply(key, key, value), half.apply(key, key, value)))


def test_a_layer_is_not_rotated_into_before_its_load_h5() -> None:
    shape = Shape()
    rows = make_rows([(1, 30)], shape)
    batch, (query, key, value) = step(rows, shape)
    loaded = batch.kv.clone()
    batch.kv.fill_(float("nan"))
    opened = []

    def gate(layer: int) -> None:
        assert batch.kv.isnan().all()
        batch.kv.copy_(loaded)
        opened.append(layer)

    rotary = rotary_for(1, shape, normed=False)
    out = replace(batch, before_layer=gate).attend(query, key, value, LAYER, scale=0.25, rotary=rotary)

    assert opened == [LAYER]
    assert not out.isnan().any()


@pytest.mark.parametrize("wrong", ["tokens", "dtype"])
def test_rotary_embeddings_of_other_tokens_or_another_dtype_are_refused(wrong: str) -> None:
    shape = Shape()
    batch, (query, key, value) = step(make_rows(LENS, shape), shape)
    rotary = rotary_for(len(query) - (wrong == "tokens"), shape, normed=False)
    if wrong == "dtype":
        rotary = replace(rotary, cos=rotary.cos.double(), sin=rotary.sin.double())
    with pytest.raises(InvariantError, match=r"rotary embeddings .* for 12 tokens, heads of 16 in torch.float32"):
        batch.attend(query, key, value, LAYER, scale=0.25, rotary=rotary)
