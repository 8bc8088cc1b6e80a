"""FlashAttention-3 for the rows of long steps. Here a stand-in with the schema of the wheels; on a Hopper GPU with a
wheel, the wheel itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
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
    make_batch,
    make_rows,
    packed,
    pool_for,
)

from sidestream.attention.interface import AttentionSpec
from sidestream.attention.triton import LONG_TOKENS, ContiguousKV, TritonAttention, flash, launch, paged_attention

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

ON_GPU = DEVICE == "cuda"
SHAPE = Shape(4, 2, 64, dtype=torch.float16)

# As both wheels print it.
SCHEMA = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,Tensor? q_v = None,"
    "Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,"
    "Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,"
    "int? max_seqlen_k = None,Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,"
    "Tensor? rotary_cos = None,Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,"
    "Tensor? k_descale = None,Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,"
    "int window_size_left = -1,int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,"
    "bool is_rotary_interleaved = False,Tensor? scheduler_metadata = None,int num_splits = 0,bool? pack_gqa = None,"
    "int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)


@dataclass
class StandIn:
    """Computes as FlashAttention-3 does: it reads keys in tiles of 128 from a row's first key on, and multiplies those
    after the row's last key by 0. `rows` has the number of queries of each row that was computed, call by call.
    """

    rows: list[list[int]] = field(default_factory=list)
    failure: str = ""
    constant: float | None = None

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        given = dict(
            zip((part.name for part in torch.ops.flash_stand_in.fwd.default._schema.arguments), args, strict=False)
        )
        out = given["out"]
        if self.failure:
            raise RuntimeError(self.failure)
        if self.constant is None:
            self._compute(**given)
        else:
            out.fill_(self.constant)
        return out, out.new_empty(0), out.new_empty(0), out.new_empty(0)

    def _compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **given: Any) -> None:
        lengths = [given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")]
        assert all(part.dtype == torch.int32 and part.is_contiguous() for part in lengths)
        assert given["is_causal"] and given["num_splits"] == 1 and given["max_seqlen_q"] == len(q)
        assert len(lengths[0]) == len(lengths[1]) == len(lengths[2]) + 1 == len(lengths[3]) + 1
        self.rows.append([])
        for first, begin, queries, keys in zip(*(part.tolist() for part in lengths), strict=False):
            if queries:
                self.rows[-1].append(queries)
                tile = slice(begin, begin + -(-keys // 128) * 128)
                key, value = (part[tile].float().repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
                scores = torch.einsum("qhd,khd->hqk", q[first : first + queries].float(), key) * given["softmax_scale"]
                positions = torch.arange(len(key))
                hidden = positions > positions[keys - queries : keys, None]
                weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                out[first : first + queries] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)


on_cpu = pytest.mark.skipif(ON_GPU, reason="a GPU runs the wheel itself, below")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """An installed wheel; steps are long from 64 tokens on."""
    monkeypatch.setattr(launch, "LONG_TOKENS", 64)
    monkeypatch.setattr(launch, "_PROGRAMS", 6)
    monkeypatch.setattr(flash, "_WHEELS", ("no_such_wheel", "flash_stand_in"))
    monkeypatch.setitem(sys.modules, "flash_stand_in._C", ModuleType("_C"))
    wheel, stand_in = torch.library.Library("flash_stand_in", "DEF"), StandIn()
    wheel.define(SCHEMA)
    wheel.impl("fwd", stand_in, "CPU")
    yield stand_in
    wheel._destroy()


def contiguous_for(shape: Shape, kv_tokens: int) -> ContiguousKV:
    made = ContiguousKV.allocate(
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        kv_tokens=kv_tokens,
        dtype=shape.dtype,
        device=torch.device(DEVICE),
    )
    assert made is not None
    return replace(made, flash=flash.find(shape.heads, made.keys, made.values))


@on_cpu
@pytest.mark.parametrize(
    ("lens", "launched", "kv_tokens", "computed"),
    [
        ([(80, 80)], Launch(), 128, [80]),
        ([(1, 30), (3, 150), (9, 20), (40, 75), (20, 140), (33, 33)], Launch(2, 3, 1, 9, 2, 5), 640, [40, 20, 33]),
        ([(30, 100), (40, 129), (9, 20), (20, 30)], Launch(padded_rows=1), 384, [30, 40]),
        ([(30, 100), (0, 9), (40, 140), (9, 20)], Launch(index_dtype=torch.int64), 512, [30, 40, 9]),
        ([(1, 1 + index % 5) for index in range(131)], Launch(padded_tokens=3), 130 * 128, [1] * 130),
    ],
    ids=["one", "mixed", "no room", "empty", "many"],
)
def test_rows_that_fit_are_computed_and_all_others_read_from_their_blocks(
    lens: list[tuple[int, int]], launched: Launch, kv_tokens: int, computed: list[int], stand_in: StandIn
) -> None:
    rows = make_rows(lens, SHAPE)
    contiguous = contiguous_for(SHAPE, kv_tokens)
    stand_in.rows.clear()

    *outputs, padding = attend(rows, SHAPE, launch=replace(launched, tiles=None), contiguous=contiguous)

    assert stand_in.rows == [computed]
    assert_right(rows, outputs, Options())
    assert not padding.any()


@on_cpu
def test_the_triton_kernels_leave_the_results_of_computed_rows(stand_in: StandIn) -> None:
    rows = make_rows([(30, 100), (40, 129), (9, 20)], SHAPE)
    contiguous = contiguous_for(SHAPE, 384)
    stand_in.constant = 2.0

    *computed, last, _ = attend(rows, SHAPE, launch=Launch(tiles=None), contiguous=contiguous)

    assert all((part == 2).all() for part in computed)
    assert_right(rows[2:], [last], Options())


@on_cpu
def test_keys_and_values_that_are_not_numbers_stay_in_their_row(stand_in: StandIn) -> None:
    rows = make_rows([(50, 70), (40, 90), (40, 40)], SHAPE)
    rows[1].value[5] = rows[1].key[7] = float("nan")

    outputs = attend(rows, SHAPE, launch=Launch(tiles=None), contiguous=contiguous_for(SHAPE, 384))

    assert stand_in.rows[-1] == [50, 40, 40]
    assert outputs[1].isnan().any()
    assert_right(rows[::2], outputs[::2], Options())


@on_cpu
@pytest.mark.parametrize(
    ("options", "queries"),
    [(Options(sinks=True), 80), (Options(sliding_window=9), 80), (Options(softcap=2.0), 80), (Options(), 60)],
    ids=["sinks", "window", "softcap", "short step"],
)
def test_other_options_and_short_steps_stay_on_the_triton_kernels(
    options: Options, queries: int, stand_in: StandIn
) -> None:
    rows, contiguous = make_rows([(queries, 90)], SHAPE), contiguous_for(SHAPE, 128)
    stand_in.rows.clear()

    assert_right(rows, attend(rows, SHAPE, options, Launch(tiles=None), contiguous=contiguous), options)
    assert not stand_in.rows


@on_cpu
def test_no_row_is_copied_before_its_load_and_its_write_h5(stand_in: StandIn) -> None:
    rows = make_rows([(40, 90), (40, 70)], SHAPE)
    loaded = pool_for(rows, SHAPE, Options())
    pool = torch.full_like(loaded, float("nan"))
    batch = replace(
        make_batch(pool, rows, SHAPE, Launch(tiles=None)),
        contiguous=contiguous_for(SHAPE, 256),
        before_layer=lambda layer: pool.copy_(loaded),
    )

    out = paged_attention(*packed(rows, 0, SHAPE), LAYER, batch, scale=SHAPE.head_dim**-0.5)

    assert stand_in.rows[-1] == [40, 40]
    assert_right(rows, out.split(40), Options())


def backend() -> TritonAttention:
    spec = AttentionSpec(
        heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=torch.device(DEVICE), query_tokens=4
    )
    return TritonAttention.create(spec, kv_tokens=256, chunk_tokens=LONG_TOKENS)


@on_cpu
def test_a_backend_uses_a_wheel_that_computes(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        contiguous = backend().contiguous
    assert contiguous is not None and contiguous.flash is torch.ops.flash_stand_in.fwd
    assert stand_in.rows == [[128]]
    assert not contiguous.values.any()
    assert "prefill attends with FlashAttention-3 from flash_stand_in" in caplog.text


@on_cpu
@pytest.mark.parametrize("failure", ["This build has no varlen.\nC++ frames", ""], ids=["raises", "wrong"])
def test_a_wheel_that_fails_or_computes_wrongly_is_logged_and_not_used(
    failure: str, stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.failure, stand_in.constant = failure, None if failure else 2.0
    contiguous = backend().contiguous
    assert contiguous is not None and contiguous.flash is None
    reason = failure.partition("\n")[0] or "its result for a row of equal values is wrong"
    assert caplog.messages == [f"flash_stand_in is installed and not used, other kernels attend: {reason}"]


@on_cpu
def test_without_a_wheel_nothing_is_said_and_the_triton_kernels_attend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flash, "_WHEELS", ("no_such_wheel",))
    contiguous = backend().contiguous
    assert contiguous is not None and contiguous.flash is None
    assert not caplog.records


BIG = Shape(32, 8, 128, 16, torch.bfloat16)
STEPS = {
    "1 x 8192": [(8192, 8192)],
    "4 x 2048": [(2048, 2048)] * 4,
    "16 x 512": [(512, 512)] * 16,
    "1 x 4096 behind 12288": [(4096, 16384)],
    "16 x 512 behind 300": [(512, 812)] * 16,
    "mixed": [(1, 900), (1, 31), (9, 700), (600, 3000), (37, 37), (300, 8000), (1, 1)],
    "no room": [(300, 12000), (500, 16384), (400, 400)],
}


@pytest.fixture
def with_wheel() -> ContiguousKV:
    if not ON_GPU or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    contiguous = contiguous_for(BIG, 16384)
    if contiguous.flash is None:
        pytest.skip("needs a wheel of FlashAttention-3: flash_attn_3 or fa3_fwd")
    return contiguous


def assert_near(rows: list[Row], ours: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> None:
    """Short rows beside the formula, long ones beside the Triton kernels, which other tests hold beside the formula."""
    for row, mine, theirs in zip(rows, ours, given, strict=False):
        error = (mine.float() - theirs.float()).norm(dim=-1) / mine.float().norm(dim=-1)
        assert error.max() < 0.02  # both round the weights and the result to 2**-8
        if len(row.key) <= 1024:
            assert_right([row], [theirs], Options())


@pytest.mark.gpu
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_steps_of_real_sizes_are_near_the_triton_kernels(lens: list[tuple[int, int]], with_wheel: ContiguousKV) -> None:
    rows = make_rows(lens, BIG)
    launched = Launch(2 * (len(lens) == 7), 1, int(len(lens) == 7), 9, 3, 5, tiles=None, split_tokens=256)
    calls = StandIn()

    def recorded(*args: Any, **given: Any) -> None:
        assert with_wheel.flash is not None
        with_wheel.flash(*args, **given)
        calls.rows.append(given["seqused_q"].tolist())

    given = attend(rows, BIG, launch=launched, contiguous=replace(with_wheel, flash=recorded))

    assert sum(calls.rows[0]) == sum(queries for queries, _ in lens[launched.split_rows + launched.short_rows :]) - (
        900 if len(lens) == 3 else 0
    )
    assert_near(rows, attend(rows, BIG, launch=launched), given)
    assert not given[-1].any()


@pytest.mark.gpu
def test_a_captured_step_serves_smaller_steps_with_the_bits_of_eager_ones(with_wheel: ContiguousKV) -> None:
    bound, tokens = 8, 4096
    rows = make_rows([(512, 512 + 700 * index) for index in range(bound)], BIG)
    pool = pool_for(rows, BIG, Options())
    batch = replace(make_batch(pool, rows, BIG, Launch(tiles=None)), contiguous=with_wheel)
    inputs = packed(rows, 0, BIG)
    paged_attention(*inputs, LAYER, batch, scale=128**-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*inputs, LAYER, batch, scale=128**-0.5)

    for here in (rows, rows[5:2:-1], rows[:1], [rows[7].last(100), rows[1].last(13)]):
        total = sum(len(row.query) for row in here)
        padding = Launch(padded_rows=bound - len(here), padded_tokens=tokens - total, tiles=None)
        now = make_batch(pool, here, BIG, padding)
        for name in ("slot_mapping", "cu_seqlens_q", "kv_lens"):
            getattr(batch, name).copy_(getattr(now, name))
        batch.block_tables.zero_()
        batch.block_tables[:, : now.block_tables.shape[1]].copy_(now.block_tables)
        for static, fresh in zip(inputs, packed(here, padding.padded_tokens, BIG), strict=True):
            static.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()

        eager = attend(here, BIG, launch=padding, pool=pool.clone(), contiguous=with_wheel)
        for mine, theirs in zip(out.split([*(len(row.query) for row in here), tokens - total]), eager, strict=True):
            assert torch.equal(mine, theirs)
        assert_near(here, attend(here, BIG, launch=padding, pool=pool.clone()), eager)
        assert not out[total:].any()


@pytest.mark.gpu
def test_the_bits_of_a_row_do_not_depend_on_other_rows_that_the_wheel_computes(with_wheel: ContiguousKV) -> None:
    rows = make_rows([(700, 900), (600, 4000), (513, 513)], BIG)
    together = attend(rows, BIG, launch=Launch(tiles=None), contiguous=with_wheel)
    for row, bits in zip(rows, together, strict=False):
        alone = attend([row], BIG, launch=Launch(tiles=None, padded_rows=2), contiguous=with_wheel)[0]
        assert torch.equal(alone, bits)
