"""The kernels as a GPU runs them: real sizes, default tiles, captured graphs, a pool beyond 2**31 elements."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from paged_rig import (
    DEVICE,
    LAYER,
    Launch,
    Options,
    Shape,
    assert_right,
    attend,
    joined,
    make_batch,
    make_rows,
    packed,
    pool_for,
    random_step,
    rotary_for,
    rotary_tolerance,
)

from sidestream.attention.triton import ContiguousKV, SplitKVWorkspace, Variant, launch, paged_attention, warm_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU; the interpreter runs the same kernels in test_triton.py",
    ),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def no_host_wait() -> Iterator[None]:
    yield
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_sizes_equal_the_formula(dtype: torch.dtype, head_dim: int) -> None:
    for block_tokens, options in ((16, Options()), (128, Options(sliding_window=700)), (32, Options(softcap=20.0))):
        shape = Shape(8, 2, head_dim, block_tokens, dtype)
        rows = make_rows([(1, 3000), (5, 900), (1, 17), (300, 300), (200, 2100), (1, 40)], shape)

        outputs = attend(
            rows,
            shape,
            options,
            Launch(split_rows=3, split_queries=5, padded_rows=2, padded_tokens=9, tiles=None, split_tokens=256),
        )

        assert_right(rows, outputs, options)
        assert not outputs[-1].any()


@pytest.mark.parametrize("seed", range(24))
def test_random_batches_with_default_tiles_equal_the_formula(seed: int) -> None:
    draws = random.Random(seed)
    lens, launched = random_step(draws, 3000, 24)
    group, kv_heads = draws.choice(((1, 4), (4, 2), (7, 1), (32, 1), (3, 3)))
    shape = Shape(
        group * kv_heads,
        kv_heads,
        draws.choice((64, 80, 96, 128, 256, 512)),
        draws.choice((16, 32, 64, 128)),
        draws.choice(DTYPES),
    )
    options = Options(draws.choice((None, draws.randint(1, 1000))), draws.choice((None, 20.0)))
    rows = make_rows(lens, shape, seed)

    *outputs, padding = attend(
        rows, shape, options, replace(launched, tiles=None, split_tokens=draws.choice((256, 512)))
    )

    assert_right(rows, outputs, options)
    assert not padding.any()


@pytest.mark.parametrize(
    "options", [Options(), Options(sliding_window=333), Options(softcap=20.0), Options(sinks=True)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_gives_the_same_bits_in_every_batch_and_with_any_number_of_splits(
    dtype: torch.dtype, options: Options
) -> None:
    shape = Shape(8, 2, 128, 16, dtype)
    lens = [(1, 3000), (5, 900), (1, 17), (2, 513), (300, 300), (200, 1100), (1, 40)]
    rows = make_rows(lens, shape)
    usual = Launch(split_rows=4, split_queries=5, tiles=None, split_tokens=256)
    together = attend(rows, shape, options, usual)
    backwards = attend(
        [*rows[3::-1], *rows[:3:-1]], shape, options, replace(usual, padded_rows=5, padded_tokens=90, wider=60)
    )

    for index, row in enumerate(rows):
        mine = replace(usual, split_rows=int(index < 4), split_queries=len(row.query))
        alone, _ = attend([row], shape, options, mine)
        assert torch.equal(alone, together[index])
        assert torch.equal(alone, backwards[3 - index if index < 4 else 10 - index])
        for queries in {1, len(row.query) // 2 + 1, len(row.query) - len(row.query) // 3}:
            assert torch.equal(attend([row.last(queries)], shape, options, mine)[0], alone[-queries:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [Shape(32, 8, 128), Shape(9, 3, 64), Shape(8, 1, 128, 64)], ids=str)
def test_a_long_chunk_has_the_same_bits_over_contiguous_kv(shape: Shape, dtype: torch.dtype) -> None:
    shape = replace(shape, dtype=dtype)
    contiguous = ContiguousKV.allocate(
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, kv_tokens=6400, dtype=dtype, device=torch.device(DEVICE)
    )
    assert contiguous is not None
    steps = {
        ((1, 900), (1000, 1000)): True,
        ((1, 40), (2, 70), (300, 310), (1500, 5207), (5, 9)): True,
        ((600, 6301),): True,
        ((500, 500), (500, 600)): False,
    }
    for lens, is_long in steps.items():
        contiguous.keys.fill_(float("nan"))
        contiguous.values.fill_(float("nan"))
        rows = make_rows(lens, shape)
        launched = Launch(
            split_rows=sum(queries < 9 for queries, _ in lens[:2]),
            split_queries=2,
            padded_tokens=3,
            tiles=None,
            split_tokens=256,
        )

        laid_out = attend(rows, shape, launch=launched, contiguous=contiguous)

        assert contiguous.keys.isnan().all() != is_long
        assert_right(rows, laid_out, Options())
        for ours, theirs in zip(laid_out, attend(rows, shape, launch=launched), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("queries", [1, 4])
def test_a_captured_graph_serves_every_smaller_batch_with_the_same_bits(queries: int) -> None:
    """Rows are padded with empty ones, and what an earlier, larger replay left behind is not read (H18)."""
    shape = Shape(8, 2, 128, 16, torch.bfloat16)
    bound = 12
    rows = make_rows([(queries, 100 + 211 * index) for index in range(bound)], shape)
    pool = pool_for(rows, shape, Options())
    launched = Launch(split_rows=bound, split_queries=queries, tiles=None, split_tokens=256)
    batch = make_batch(pool, rows, shape, launched)
    inputs = packed(rows, 0, shape)
    warm_up(pool, heads=8, variants=[Variant()], workspace=batch.workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*inputs, LAYER, batch, scale=128**-0.5)

    for count in (bound, 3, 7, 1):
        here = random.Random(count).sample(rows, count)
        padding = Launch(
            split_rows=bound, split_queries=queries, padded_rows=bound - count, padded_tokens=(bound - count) * queries
        )
        now = make_batch(pool, here, shape, padding, batch.workspace)
        for name in ("slot_mapping", "cu_seqlens_q", "kv_lens"):
            getattr(batch, name).copy_(getattr(now, name))
        batch.block_tables.zero_()
        batch.block_tables[:, : now.block_tables.shape[1]].copy_(now.block_tables)
        for static, fresh in zip(inputs, packed(here, padding.padded_tokens, shape), strict=True):
            static.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()

        for index, row in enumerate(here):
            alone, _ = attend([row], shape, launch=replace(launched, split_rows=1), pool=pool.clone())
            assert torch.equal(out[index * queries : (index + 1) * queries], alone)
        assert not out[count * queries :].any()


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_rotation_and_write_equal_separate_operations(
    dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compilation, which the first call makes, serves all numbers of tokens."""
    import triton

    shape, compiled = Shape(8, 2, head_dim, 16, dtype), list[str]()
    for tokens, padding in ((1, 0), (2, 3), (16, 0), (129, 3), (3000, 9)):
        for normed in (True, False):
            rows = make_rows([(tokens, tokens + 40)], shape)
            batch = make_batch(pool_for(rows, shape, Options()), rows, shape, Launch(padded_tokens=padding))
            separate = replace(batch, kv=batch.kv.clone())
            query, key, value = joined(*packed(rows, padding, shape))
            rotary = rotary_for(len(query), shape, normed=normed)
            out = torch.full((2, *query.shape), 7.0, dtype=dtype, device=DEVICE)
            launch.rotate_and_write(query, key, value, rotary, LAYER, batch, out=out[0])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                rotated = launch.rotate_and_write(query, key, value, rotary, LAYER, batch, out=out[0])
            batch.layer(LAYER).fill_(0)
            separate.layer(LAYER).fill_(0)
            graph.replay()

            wanted, wanted_key = rotary.apply(query, key)
            launch.write(wanted_key, value, LAYER, separate, out=out[1])
            atol = rtol = rotary_tolerance(dtype, normed=normed)
            torch.testing.assert_close(rotated[:tokens], wanted[:tokens], atol=atol, rtol=rtol)
            torch.testing.assert_close(batch.kv, separate.kv, atol=atol, rtol=rtol, equal_nan=True)
            assert torch.equal(*out)
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
    assert not compiled


def test_no_kernel_is_compiled_after_warm_up_p3(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    shape = Shape(6, 3, 64, 16, torch.float16)
    room = SplitKVWorkspace.allocate(query_tokens=64, kv_tokens=1024, heads=6, head_dim=64, device=DEVICE)
    warm_up(pool_for([], shape, Options()), heads=6, variants=[Variant(), Variant(sliding_window=9)], workspace=room)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))

    for count in (1, 2, 3, 16, 17):
        rows = make_rows([(1 + index % 4, 20 + 31 * index) for index in range(count)], shape)
        for split_rows in (0, count // 2, count):
            launched = Launch(split_rows=split_rows, split_queries=4, padded_tokens=count % 3, tiles=None)
            batch = make_batch(pool_for(rows, shape, Options()), rows, shape, launched, room)
            # Graphs are given parts of larger tensors, which begin anywhere.
            moved = torch.cat((batch.kv_lens[:1], batch.kv_lens))[1:]
            for window in (None, 1, 16, 33):
                paged_attention(
                    *packed(rows, count % 3, shape),
                    LAYER,
                    replace(batch, kv_lens=moved),
                    scale=0.1,
                    sliding_window=window,
                )

    assert not compiled


def test_no_launch_waits_for_the_device() -> None:
    shape = Shape(8, 2, 128, 16, torch.bfloat16)
    rows = make_rows([(1, 300), (40, 200)], shape)
    batch = make_batch(pool_for(rows, shape, Options()), rows, shape, Launch(split_rows=1, tiles=None))
    inputs = packed(rows, 0, shape)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that it does not see all of them
        torch.cuda.set_sync_debug_mode("error")
    paged_attention(*inputs, LAYER, batch, scale=0.1)


def test_blocks_beyond_2_to_the_31_elements_are_written_and_read() -> None:
    shape = Shape(4, 1, 128, 128, torch.bfloat16)
    block_elements = 2 * 2 * 128 * 128
    blocks = 2**31 // block_elements + 40
    row = make_rows([(1, 600)], shape)[0]
    chunk = make_rows([(260, 500)], shape, seed=8)[0]
    far = [
        replace(row, blocks=tuple(range(blocks - 5, blocks))),
        replace(chunk, blocks=tuple(range(blocks - 9, blocks - 5))),
    ]
    pool = torch.zeros(blocks, 2, 2, 128, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    pool[-40:] = pool_for(
        [replace(each, blocks=tuple(block - blocks + 40 for block in each.blocks)) for each in far], shape, Options()
    )[:40]

    outputs = attend(far, shape, launch=Launch(split_rows=1, tiles=None), pool=pool)

    assert_right(far, outputs, Options())
    assert not pool[: blocks - 40].any()
