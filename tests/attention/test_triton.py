"""The kernels against the plain formula, and what a result may depend on. On a GPU if there is one, else in Triton's
interpreter.
"""

from __future__ import annotations

import importlib
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_rig import (
    DEVICE,
    LAYER,
    TILES,
    Launch,
    Options,
    Shape,
    assert_right,
    attend,
    make_batch,
    make_rows,
    packed,
    pool_for,
    random_step,
)

from sidestream.attention.interface import KVShape
from sidestream.attention.triton import (
    ContiguousKV,
    DeviceBatch,
    SplitKVWorkspace,
    Tile,
    Tiles,
    Variant,
    launch,
    paged_attention,
    warm_up,
)
from sidestream.errors import ConfigError, InvariantError
from sidestream_kv.kv.layout import AttentionChunk

triton = pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

pytestmark = pytest.mark.slow

ON_GPU = DEVICE == "cuda"

# decode, verification of 3, decode of a first token; then a whole prompt, a continued chunk, a chunk of one token, a
# long one
MIXED = [(1, 30), (3, 150), (1, 1), (9, 9), (6, 21), (1, 13), (40, 75)]
IN_SPLITS = Launch(split_rows=3, split_queries=3)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is not a number: whatever is not written shows."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        fresh = empty(*args, **options)
        return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", poisoned)


def test_kv_of_a_draft_model_may_have_another_number_of_heads() -> None:
    """Rows in splits and whole; more heads than the pool's own model has, and fewer numbers in all."""
    inner, shape = Shape(heads=4, kv_heads=1, head_dim=16), Shape(heads=3, kv_heads=1, head_dim=32)
    other = KVShape(1, inner.kv_heads, inner.head_dim, inner.heads)
    rows = make_rows(MIXED, inner)
    alone = pool_for(rows, inner, Options())
    pool = torch.full((len(alone), 2, 2, 16, shape.kv_heads, shape.head_dim), float("nan"), device=DEVICE)
    there = other.at_the_end_of(pool)
    there[:, 0] = alone[:, LAYER]
    assert there.data_ptr() != pool.data_ptr()
    workspace = SplitKVWorkspace.allocate(
        query_tokens=64, kv_tokens=160, heads=3, head_dim=32, device=DEVICE, tokens=64, draft=other
    )
    whole = pool_for(rows, inner, Options())
    expected = make_batch(whole, rows, inner, IN_SPLITS)
    batch = replace(expected, kv=pool, workspace=workspace, tiles=None).with_kv_shape(other)
    query, key, value = packed(rows, 0, inner)
    got = batch.attend(query, key, value, 0, scale=0.25)
    wanted = paged_attention(query, key, value, LAYER, replace(expected, tiles=None), scale=0.25)
    assert torch.equal(got, wanted)
    assert torch.equal(there[:, 0].nan_to_num(), whole[:, LAYER].nan_to_num())
    assert pool.view(len(pool), -1)[:, : -other.values(16)].isnan().all()
    with pytest.raises(InvariantError, match=r"8 heads with head_dim 32: .* made for 3 heads with head_dim 32"):
        workspace.with_kv_shape(KVShape(1, 1, 32, 8))


@pytest.mark.parametrize(("kv_heads", "block_tokens"), [(2, 16), (1, 48), (2, 128)])
@pytest.mark.parametrize("lens", [[(1, 30), (70, 160), (9, 9)], [(130, 130)], [(3, 20), (67, 67), (1, 13)]], ids=str)
def test_a_long_chunk_has_the_same_bits_over_contiguous_kv_in_every_batch(
    lens: list[tuple[int, int]], kv_heads: int, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LONG_TOKENS", 64)
    shape = Shape(6, kv_heads, 64, block_tokens, torch.bfloat16 if ON_GPU else torch.float16)
    rows, options = make_rows(lens, shape), Options()
    split = Launch(split_rows=1 if lens[0][0] < 9 else 0, split_queries=3, padded_tokens=2, tiles=None)
    contiguous = ContiguousKV.allocate(
        kv_heads=kv_heads, head_dim=64, kv_tokens=256, dtype=shape.dtype, device=torch.device(DEVICE)
    )
    assert contiguous is not None
    for part in (contiguous.keys, contiguous.values):
        part.fill_(float("nan"))

    got = attend(rows, shape, options, split, contiguous=contiguous)

    assert_right(rows, got, options)
    assert not got[-1].any()
    long = max(rows, key=lambda row: len(row.query))
    for part, kv in ((contiguous.keys, long.key), (contiguous.values, long.value)):
        end = -(-len(kv) // 128) * 128
        assert torch.equal(part[:, : len(kv)], kv.transpose(0, 1))
        assert not part[:, len(kv) : end].any()
        assert part[:, end:].isnan().all()
    if ON_GPU:  # the interpreter's products depend on how many lines a tile has
        for ours, theirs in zip(got, attend(rows, shape, options, split), strict=True):
            assert torch.equal(ours, theirs)


def test_chunks_with_less_than_half_of_the_tokens_are_read_from_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "LONG_TOKENS", 64)
    shape = Shape(head_dim=64, dtype=torch.float16)
    rows, options = make_rows([(40, 70), (40, 40)], shape), Options()
    contiguous = ContiguousKV.allocate(
        kv_heads=2, head_dim=64, kv_tokens=128, dtype=shape.dtype, device=torch.device(DEVICE)
    )
    assert contiguous is not None
    contiguous.keys.fill_(float("nan"))

    assert_right(rows, attend(rows, shape, options, Launch(tiles=None), contiguous=contiguous), options)
    assert contiguous.keys.isnan().all()


def test_rows_longer_than_the_contiguous_buffer_are_refused() -> None:
    shape = Shape(head_dim=64, dtype=torch.float16)
    contiguous = ContiguousKV.allocate(
        kv_heads=2, head_dim=64, kv_tokens=60, dtype=shape.dtype, device=torch.device(DEVICE)
    )
    rows = make_rows([(9, 140)], shape)
    with pytest.raises(InvariantError, match="rows of up to 144 tokens, laid out contiguously: there is room for 128"):
        attend(rows, shape, contiguous=contiguous)
    assert (
        ContiguousKV.allocate(kv_heads=2, head_dim=96, kv_tokens=60, dtype=torch.float16, device=torch.device(DEVICE))
        is None
    )


def test_writing_kv_without_attention_gives_the_same_pool() -> None:
    shape = Shape()
    rows = make_rows(MIXED, shape)
    query, key, value = packed(rows, 0, shape)
    pools = [pool_for(rows, shape, Options()) for _ in range(2)]
    attending, writing = (make_batch(pool, rows, shape, IN_SPLITS) for pool in pools)
    paged_attention(query, key, value, LAYER, attending, scale=0.25)
    writing.write(key, value, LAYER)
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (2, 2, Options()),
        (6, 2, Options(sliding_window=5)),
        (6, 2, Options(sliding_window=AttentionChunk(5))),
        (4, 1, Options(sliding_window=AttentionChunk(40), sinks=True)),
        (4, 1, Options(softcap=1.5)),
        (6, 2, Options(sliding_window=40, softcap=1.5, sinks=True)),
        (6, 2, Options(sinks=True)),
        (6, 2, Options(alibi=True)),
        (4, 1, Options(sliding_window=40, softcap=1.5, alibi=True)),
    ],
    ids=str,
)
def test_a_mixed_batch_over_scattered_blocks_equals_the_formula(heads: int, kv_heads: int, options: Options) -> None:
    shape = Shape(heads=heads, kv_heads=kv_heads)
    rows = make_rows(MIXED, shape)

    assert_right(rows, attend(rows, shape, options, IN_SPLITS), options)


@pytest.mark.parametrize(("head_dim", "block_tokens"), [(64, 16), (80, 48), (96, 128), (128, 32), (256, 64), (512, 16)])
def test_head_and_block_sizes_need_not_be_multiples_of_the_tiles(head_dim: int, block_tokens: int) -> None:
    shape = Shape(heads=2, kv_heads=1, head_dim=head_dim, block_tokens=block_tokens)
    rows = make_rows([(1, 150), (7, 60)], shape)
    options = Options(sliding_window=100)

    assert_right(rows, attend(rows, shape, options, Launch(split_rows=1)), options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [Options(), Options(softcap=1.5)], ids=str)
def test_errors_of_every_dtype_stay_within_rounding_with_default_tiles(dtype: torch.dtype, options: Options) -> None:
    if dtype == torch.bfloat16 and not ON_GPU:
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers: needs a GPU")
    shape = Shape(head_dim=64, dtype=dtype)
    rows = make_rows(MIXED, shape)

    assert_right(rows, attend(rows, shape, options, replace(IN_SPLITS, tiles=None)), options)


@pytest.mark.parametrize("seed", range(60 if ON_GPU else 6))
def test_random_batches_equal_the_formula_and_padding_changes_no_result(seed: int) -> None:
    draws = random.Random(seed)
    lens, launched = random_step(draws, 1500 if ON_GPU else 140, 20 if ON_GPU else 4)
    group, kv_heads = draws.choice(((1, 1), (1, 3), (2, 2), (3, 2), (7, 1)))
    dtype = draws.choice((torch.float16, torch.float32))
    shape = Shape(group * kv_heads, kv_heads, draws.choice((16, 24, 64)), draws.choice((16, 32, 64)), dtype)
    options = Options(draws.choice((None, 1, draws.randint(2, 100))), draws.choice((None, 2.0)), bool(seed % 2))
    rows = make_rows(lens, shape, seed)
    pool = pool_for(rows, shape, options)
    before = pool.clone()

    *outputs, padding = attend(rows, shape, options, launched, pool)

    assert_right(rows, outputs, options)
    assert not padding.any()
    if not launched.separate:
        assert_only_written(rows, shape, before, pool)


def assert_only_written(rows: Any, shape: Shape, before: torch.Tensor, after: torch.Tensor) -> None:
    """After a step the pool holds its keys and values; all else is as it was."""
    expected = before.clone()
    for row in rows:
        for position, slot in zip(
            range(row.start, len(row.key)), row.slots(range(row.start, len(row.key)), shape.block_tokens), strict=True
        ):
            expected[slot // shape.block_tokens, LAYER, 0, slot % shape.block_tokens] = row.key[position]
            expected[slot // shape.block_tokens, LAYER, 1, slot % shape.block_tokens] = row.value[position]
    torch.testing.assert_close(after, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, Options()),
        (torch.float16, Options(sliding_window=33)),
        (torch.float16, Options(sliding_window=AttentionChunk(33))),
        (torch.float16, Options(softcap=1.5)),
    ],
    ids=str,
)
def test_a_row_gives_the_same_bits_in_any_batch_order_and_padding(dtype: torch.dtype, options: Options) -> None:
    shape = Shape(dtype=dtype)
    rows = make_rows([(1, 30), (3, 80), (1, 1), (9, 9), (1, 13), (20, 45)], shape)
    together = attend(rows, shape, options, replace(IN_SPLITS, short_rows=1, short_queries=9))
    order = [2, 0, 1, 3, 5, 4]

    roomy = Launch(
        split_rows=3,
        split_queries=5,
        short_rows=1,
        short_queries=30,
        padded_rows=2,
        padded_tokens=7,
        wider=9,
        index_dtype=torch.int64,
    )
    shuffled = attend([rows[index] for index in order], shape, options, roomy)

    for index, row in enumerate(rows):
        queries = len(row.query)
        launched = Launch(
            split_rows=int(index < 3), split_queries=queries, short_rows=int(index == 3), short_queries=queries
        )
        (alone, _) = attend([row], shape, options, launched)
        assert torch.equal(alone, together[index])
        assert torch.equal(alone, shuffled[order.index(index)])


@pytest.mark.parametrize("narrow", [1, 2, 16])
@pytest.mark.parametrize("options", [Options(), Options(sliding_window=150), Options(AttentionChunk(150))], ids=str)
def test_a_short_chunk_has_wide_splits_after_its_narrow_ones(
    narrow: int, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape()
    rows = make_rows([(1, 300), (7, 413), (3, 130), (2, 64)], shape)
    launched = Launch(split_rows=1, short_rows=3, short_queries=7, narrow=narrow)
    outputs = attend(rows, shape, options, launched)
    assert_right(rows, outputs, options)
    monkeypatch.setattr(launch, "_PROGRAMS", 5)
    for expected, given in zip(outputs, attend(rows, shape, options, launched), strict=True):
        assert torch.equal(expected, given)


def test_wide_splits_change_no_bit_of_decode_rows() -> None:
    shape = Shape()
    rows = make_rows([(1, 300), (2, 413)], shape)
    alike = [attend(rows, shape, launch=Launch(split_rows=2, split_queries=2, narrow=narrow)) for narrow in (1, 16)]
    assert all(torch.equal(one, other) for one, other in zip(*alike, strict=True))


@pytest.mark.parametrize("programs", [1, 3])
def test_the_number_of_programs_changes_no_bit_of_a_split_row(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape()
    rows = make_rows([(1, 270), (4, 150)], shape)
    launched = Launch(split_rows=2, split_queries=4)
    usual = attend(rows, shape, launch=launched)
    monkeypatch.setattr(launch, "_PROGRAMS", programs)

    for expected, given in zip(usual, attend(rows, shape, launch=launched), strict=True):
        assert torch.equal(expected, given)


@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize(
    ("in_splits", "options"),
    [
        (True, Options()),
        (False, Options()),
        (True, Options(33)),
        (False, Options(33, 1.5)),
        (False, Options(AttentionChunk(33))),
    ],
    ids=str,
)
def test_other_queries_of_its_row_change_no_bit_of_a_query(in_splits: bool, options: Options) -> None:
    """Verification accepts what decode would have said, and a chunk cut elsewhere gives the same KV."""
    shape = Shape(heads=2, kv_heads=1)
    (row,) = make_rows([(40, 160)], shape)

    def bits(step: Any) -> torch.Tensor:
        return attend([step], shape, options, Launch(split_rows=int(in_splits), split_queries=len(step.query)))[0]

    whole = bits(row)
    for queries in (1, 7):
        assert torch.equal(bits(row.last(queries)), whole[-queries:])
    for kv_len in (143,):
        assert torch.equal(bits(row.cut(kv_len)), whole[: kv_len - 120])


@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(), Options()),
        (Shape(heads=6), Options(150)),
        (Shape(heads=2, kv_heads=1), Options(AttentionChunk(33), sinks=True)),
        (Shape(heads=2, kv_heads=1, head_dim=48), Options(100, 1.5, alibi=True)),
        (Shape(dtype=torch.float16), Options(sinks=True)),
    ],
    ids=str,
)
def test_an_invariant_query_has_the_same_bits_decoded_verified_and_in_any_chunk(
    shape: Shape, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row crosses borders of splits; a query is that of a decode row, of a verified draft, or of a chunk."""
    rows = make_rows([(90, 290), (5, 70), (20, 20)], shape)
    launched = Launch(invariant=True)
    whole = attend(rows, shape, options, launched)
    assert_right(rows, whole, options)
    for queries, programs in ((1, 40), (3, 1), (17, 40)):
        monkeypatch.setattr(launch, "_PROGRAMS", programs)
        for split_rows in (3, 1, 0):
            last = [row.last(queries) for row in rows]
            how = replace(launched, split_rows=split_rows, split_queries=queries + 1, padded_rows=2, padded_tokens=5)
            for got, expected in zip(attend(last, shape, options, how)[:3], whole[:3], strict=True):
                assert torch.equal(got, expected[-queries:])
    cut = attend([rows[0].cut(263), rows[1].cut(67)], shape, options, launched)
    assert torch.equal(cut[0], whole[0][:63])
    assert torch.equal(cut[1], whole[1][:2])


def test_rows_without_queries_change_no_other_row() -> None:
    shape = Shape()
    rows = make_rows([(1, 30), (0, 20), (2, 70), (0, 9), (5, 40)], shape)

    outputs = attend(rows, shape, launch=Launch(split_rows=3, split_queries=2))

    assert_right(rows, outputs, Options())


def test_a_launch_of_padding_only_returns_zeros_and_writes_no_block() -> None:
    shape = Shape()
    pool = pool_for([], shape, Options())

    for split_rows in (0, 4):
        (padding,) = attend([], shape, launch=Launch(split_rows=split_rows, padded_rows=4, padded_tokens=6), pool=pool)

        assert padding.shape == (6, 4, 16)
        assert not padding.any()
        assert pool.isnan().all()


def test_batches_of_more_rows_than_one_search_covers_are_correct() -> None:
    shape = Shape(heads=1, kv_heads=1)
    rows = make_rows([(1, 1 + index % 5) for index in range(130)], shape)

    assert_right(rows, attend(rows, shape), Options())


def test_queries_keys_and_values_may_be_strided_views() -> None:
    shape = Shape()
    rows = make_rows([(1, 30), (6, 21)], shape)
    launched = Launch(split_rows=1)
    query, key, value = packed(rows, 0, shape)
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    side_by_side = torch.cat((key, value), 1)
    batch = make_batch(pool_for(rows, shape, Options()), rows, shape, launched)

    out = paged_attention(by_head, side_by_side[:, :2], side_by_side[:, 2:], LAYER, batch, scale=0.25)

    assert_right(rows, out.split([1, 6]), Options())


def test_a_layer_is_not_read_or_written_before_its_load_h5() -> None:
    shape = Shape()
    rows = make_rows([(1, 30)], shape)
    loaded = pool_for(rows, shape, Options())
    pool = torch.full_like(loaded, float("nan"))
    opened = []

    def gate(layer: int) -> None:
        assert pool.isnan().all()
        pool.copy_(loaded)
        opened.append(layer)

    batch = replace(make_batch(pool, rows, shape, Launch()), before_layer=gate)
    out = paged_attention(*packed(rows, 0, shape), LAYER, batch, scale=0.25)

    assert opened == [LAYER]
    assert_right(rows, [out], Options())


def test_warm_up_launches_every_variant_and_does_not_change_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape()
    pool = pool_for([], shape, Options())
    workspace = SplitKVWorkspace.allocate(query_tokens=1, kv_tokens=16, heads=4, head_dim=16, device=DEVICE)
    launched = []
    kernels = launch._kernels()
    for name in ("write", "attend", "combine"):
        monkeypatch.setattr(kernels, name, _Recorder(name, getattr(kernels, name), launched))

    variants = [Variant(window, cap) for window in (None, 9, AttentionChunk(9)) for cap in (None, 2.0)]
    warm_up(pool, heads=4, variants=variants, workspace=workspace, tiles=TILES)

    assert pool.isnan().all()
    attends = {
        (options["WIDE_TOKENS"], options["WINDOW"], options["CAPPED"]) for name, options in launched if name == "attend"
    }
    assert attends == {(wide, window, cap) for wide in (0, 256, 512) for window in (0, 1, 2) for cap in (False, True)}
    assert {options["WINDOW"] for name, options in launched if name == "combine"} == {0, 1, 2}


class _Recorder:
    """A kernel that notes how it is launched."""

    def __init__(self, name: str, kernel: Any, launched: list[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.kernel, self.launched = name, kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.launched.append((self.name, options))
            self.kernel[grid](*args, **options)

        return launch


def test_the_first_launch_without_triton_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launch._kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "sidestream.attention.triton.kernels")
    importlib.reload(sys.modules["sidestream.attention.triton.batch"])

    with pytest.raises(ConfigError, match="needs triton"):
        launch._kernels()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split_rows": 3}, "split_rows is 3, short_rows 0: the batch has 2 rows"),
        ({"split_rows": 2, "short_rows": 1}, "split_rows is 2, short_rows 1: the batch has 2 rows"),
        ({"split_rows": 1, "workspace": None}, "give workspace"),
        (
            {"split_rows": 2, "split_queries": 9},
            r"7 query tokens over rows of up to 32 tokens: the workspace has room for 2 over 64",
        ),
        ({"kv_lens": torch.zeros(3, dtype=torch.int32)}, "B, B \\+ 1 and B expected"),
        ({"kv_lens": torch.zeros(2)}, "kv_lens is torch.float32"),
    ],
    ids=["rows", "short", "workspace", "room", "lengths", "dtype"],
)
def test_an_inconsistent_batch_raises(change: dict[str, Any], message: str) -> None:
    shape = Shape()
    rows = make_rows([(1, 30), (6, 21)], shape)
    workspace = SplitKVWorkspace.allocate(query_tokens=2, kv_tokens=64, heads=4, head_dim=16, device=DEVICE, tokens=64)
    batch = replace(make_batch(pool_for(rows, shape, Options()), rows, shape, Launch()), workspace=workspace)

    with pytest.raises(InvariantError, match=message):
        replace(batch, **change)


def test_unsupported_shapes_are_refused() -> None:
    shape = Shape(block_tokens=8)
    rows = make_rows([(1, 30)], shape)
    with pytest.raises(ConfigError, match="block_tokens is 8: these kernels need a multiple of 16"):
        make_batch(pool_for(rows, shape, Options()), rows, shape, Launch())

    shape = Shape(head_dim=1024)
    rows = make_rows([(1, 30)], shape)
    with pytest.raises(ConfigError, match="head_dim is 1024"):
        attend(rows, shape)

    with pytest.raises(ConfigError, match="a split of 100 KV tokens"):
        SplitKVWorkspace.allocate(query_tokens=1, kv_tokens=100, heads=1, head_dim=16, device="cpu", tokens=100)


def test_tensors_that_do_not_fit_the_pool_raise() -> None:
    shape = Shape()
    rows = make_rows([(1, 30)], shape)
    batch: DeviceBatch = make_batch(pool_for(rows, shape, Options()), rows, shape, Launch())
    query, key, value = packed(rows, 0, shape)

    for bad, message in (
        ((query.half(), key, value), "one dtype of"),
        ((query[:, :3], key, value), "do not fit a pool of 2 heads of 16"),
        ((query.repeat(2, 1, 1), key.repeat(2, 1, 1), value.repeat(2, 1, 1)), "2 query tokens, 1 slots"),
    ):
        with pytest.raises(InvariantError, match=message):
            paged_attention(*bad, LAYER, batch, scale=0.25)
    with pytest.raises(InvariantError, match="scale is -1"):
        paged_attention(query, key, value, LAYER, batch, scale=-1)


def test_tiles_of_other_shapes_agree_within_rounding() -> None:
    shape = Shape()
    rows = make_rows([(1, 30), (3, 150), (20, 75)], shape)
    for tiles in (
        Tiles(Tile(16, 64, 4, 1), Tile(16, 64, 4, 1), Tile(16, 64, 4, 1)),
        Tiles(Tile(64, 32, 4, 2), Tile(32, 16, 4, 2), Tile(64, 16, 4, 2)),
    ):
        assert_right(
            rows,
            attend(
                rows, shape, launch=Launch(split_rows=1, split_queries=3, short_rows=1, short_queries=3, tiles=tiles)
            ),
            Options(),
        )
