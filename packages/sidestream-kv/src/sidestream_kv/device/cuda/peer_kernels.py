"""Triton kernels of an all-reduce (sum) over the GPUs of all ranks. Each GPU maps device memory of the others.

Each rank writes its values into an inbox of each other GPU, waits until the values of all other ranks are in its own
inbox, and adds all values in the order of the ranks. So all ranks get equal bits. A sum takes as long as one message
over the link between the GPUs; NCCL needs several messages.

A call of a kernel has a number, which the kernel counts in device memory, so that captured calls count, too. Two calls
in a row use two halves of an inbox. Call n + 2 overwrites the values of call n. No rank reads these any more: when call
n + 1 has ended here, all other ranks have begun call n + 1, so they have ended call n.

All programs of a call must run at the same time, because they wait for programs of other ranks. So a call has at most
as many programs as a GPU can run at once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sidestream_kv.device.kinds import on_gpu

_LANES = 512
_TILE = 8192
_TILE_WARPS = 16
_PROGRAMS = 128
# The word that ends all waits is in host memory. GPUs read it one warp after the other, 0.7 us each: with a read every
# 256 polls, a sum of 512 warps took 320 us, so that the other ranks waited, read the word, and were late in turn: 320
# us in each call. A wait of so many polls is about ten milliseconds, which no rank waits for others call after call.
_POLLS = 16384

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Dtypes that can be added, and how a kernel takes the values of a 32-bit word apart."""


@triton.jit  # type: ignore[untyped-decorator]
def _low(word, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The value in the lower half of a word, or in the whole word of float32; as float32."""
    if DTYPE == 0:
        value = word.to(tl.float32, bitcast=True)
    elif DTYPE == 1:
        value = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = (word << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _high(word, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The value in the upper half of a word, as float32."""
    if DTYPE == 1:
        value = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = (word & -65536).to(tl.float32, bitcast=True)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _joined(low, high, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The word of two values."""
    if DTYPE == 0:
        word = low.to(tl.int32, bitcast=True)
    elif DTYPE == 1:
        upper = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word = upper | (low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    else:
        upper = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word = upper | (low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    return word


@triton.jit
def _ended(stop, calls):  # type: ignore[no-untyped-def]
    """Whether the sums were aborted: 0 or 1. It notes that in device memory, where later waits find it at once."""
    ended = tl.load(stop, volatile=True)
    tl.store(calls, ended, mask=ended != 0)
    return ended


@triton.jit(do_not_specialize=["values", "inboxes", "calls", "abort", "count"])  # type: ignore[untyped-decorator]
def _add_few(  # type: ignore[no-untyped-def]
    values,
    inboxes,
    calls,
    abort,
    count,
    RANK: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    POLLS: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    """Add `count` words. A slot of an inbox holds a word and the number of the call: a slot is written at once, so a
    reader that sees the number has the word. Slots: [2 halves, SIZE ranks, WORDS], 8 bytes each.
    """
    if OVERLAP:
        gdc_wait()
    block = tl.program_id(0)
    mine = values.to(tl.int64).to(tl.pointer_type(tl.int32))
    boxes = inboxes.to(tl.int64).to(tl.pointer_type(tl.int64))
    ended = calls.to(tl.int64).to(tl.pointer_type(tl.int32))
    counter = ended + 1 + block
    stop = abort.to(tl.int64).to(tl.pointer_type(tl.int32))
    call = tl.load(counter) + 1
    at = block * LANES + tl.arange(0, LANES)
    inside = at < count
    own = tl.load(mine + at, mask=inside, other=0)
    half = (call & 1) * SIZE * WORDS
    number = call.to(tl.int64) << 32
    slot = (own.to(tl.int64) & 0xFFFFFFFF) | number
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            box = tl.load(boxes + rank).to(tl.pointer_type(tl.int64))
            tl.store(box + half + RANK * WORDS + at, slot, mask=inside)
    box = tl.load(boxes + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros([LANES], tl.float32)
    high = tl.zeros([LANES], tl.float32)
    for rank in tl.static_range(SIZE):
        word = own
        if rank != RANK:
            slots = box + half + rank * WORDS + at
            got = tl.load(slots, mask=inside, other=0, volatile=True)
            missing = tl.sum((inside & ((got >> 32) != call)).to(tl.int32)) * (1 - tl.load(ended))
            polls = 0
            while missing > 0:
                got = tl.load(slots, mask=inside, other=0, volatile=True)
                missing = tl.sum((inside & ((got >> 32) != call)).to(tl.int32))
                polls += 1
                if polls % POLLS == 0:
                    missing = missing * (1 - _ended(stop, ended))
            word = got.to(tl.int32)
        low += _low(word, DTYPE)
        if DTYPE != 0:
            high += _high(word, DTYPE)
    tl.store(mine + at, _joined(low, high, DTYPE), mask=inside)
    tl.debug_barrier()  # all threads have read the counter
    tl.store(counter, call)


@triton.jit  # type: ignore[untyped-decorator]
def _send_tile(  # type: ignore[no-untyped-def]
    mine,
    boxes,
    tile,
    count,
    call,
    RANK: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Write a tile of this rank's words, and then the number of the call, into the inboxes of the other ranks."""
    at = tile * TILE + tl.arange(0, TILE)
    own = tl.load(mine + at, mask=at < count, other=0)
    half = (call & 1) * SIZE
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            box = tl.multiple_of(tl.load(boxes + rank).to(tl.pointer_type(tl.int32)), 16)
            tl.store(box + (half + RANK) * WORDS + at, own, mask=at < count)
    tl.debug_barrier()  # behind the stores of all threads
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            box = tl.load(boxes + rank).to(tl.pointer_type(tl.int32))
            number = box + 2 * SIZE * WORDS + (half + RANK) * (WORDS // TILE) + tile
            tl.atomic_xchg(number, call, sem="release", scope="sys")


@triton.jit  # type: ignore[untyped-decorator]
def _sum_tile(  # type: ignore[no-untyped-def]
    mine,
    boxes,
    stop,
    ended,
    tile,
    count,
    call,
    RANK: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    POLLS: tl.constexpr,  # noqa: N803
):
    """Wait for a tile of all other ranks, and replace this rank's words by the sum."""
    at = tile * TILE + tl.arange(0, TILE)
    half = (call & 1) * SIZE
    box = tl.multiple_of(tl.load(boxes + RANK).to(tl.pointer_type(tl.int32)), 16)
    own = tl.load(mine + at, mask=at < count, other=0)
    low = tl.zeros([TILE], tl.float32)
    high = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(SIZE):
        word = own
        if rank != RANK:
            number = box + 2 * SIZE * WORDS + (half + rank) * (WORDS // TILE) + tile
            missing = (tl.atomic_add(number, 0, sem="acquire", scope="sys") - call) * (1 - tl.load(ended))
            polls = 0
            while missing != 0:
                missing = tl.atomic_add(number, 0, sem="acquire", scope="sys") - call
                polls += 1
                if polls % POLLS == 0:
                    missing = missing * (1 - _ended(stop, ended))
            tl.debug_barrier()
            word = tl.load(box + (half + rank) * WORDS + at, mask=at < count, other=0, cache_modifier=".cg")
        low += _low(word, DTYPE)
        if DTYPE != 0:
            high += _high(word, DTYPE)
    tl.store(mine + at, _joined(low, high, DTYPE), mask=at < count)


@triton.jit(do_not_specialize=["values", "inboxes", "calls", "abort", "quads"])  # type: ignore[untyped-decorator]
def _add_many(  # type: ignore[no-untyped-def]
    values,
    inboxes,
    calls,
    abort,
    quads,
    RANK: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    POLLS: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    """Add `4 * quads` words in tiles. A program writes its next tile to the other ranks before it waits for theirs. The
    number of the call after a tile shows that the tile is complete. Words: [2 halves, SIZE ranks, WORDS], 4 bytes each;
    after them the numbers: [2 halves, SIZE ranks, WORDS // TILE], 4 bytes each.
    """
    if OVERLAP:
        gdc_wait()
    program = tl.program_id(0)
    # The alignment lets each thread move 16 bytes at once.
    mine = tl.multiple_of(values.to(tl.int64).to(tl.pointer_type(tl.int32)), 16)
    words = quads * 4
    boxes = inboxes.to(tl.int64).to(tl.pointer_type(tl.int64))
    ended = calls.to(tl.int64).to(tl.pointer_type(tl.int32))
    counter = ended + 1 + program
    stop = abort.to(tl.int64).to(tl.pointer_type(tl.int32))
    call = tl.load(counter) + 1
    tiles = tl.cdiv(words, TILE)
    tile = program
    if tile < tiles:
        _send_tile(mine, boxes, tile, words, call, RANK, SIZE, WORDS, TILE)
    while tile < tiles:
        following = tile + tl.num_programs(0)
        if following < tiles:
            _send_tile(mine, boxes, following, words, call, RANK, SIZE, WORDS, TILE)
        _sum_tile(mine, boxes, stop, ended, tile, words, call, RANK, SIZE, WORDS, DTYPE, TILE, POLLS)
        tile = following
    tl.debug_barrier()  # all threads have read the counter
    tl.store(counter, call)


@functools.cache
def _overlap(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose programs start while the previous kernel ends, and then wait for its end: this saves
    the time of the start. On for Hopper and later GPUs; off for older GPUs and in Triton's interpreter.
    """
    on = on_gpu(device) and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": on, "launch_pdl": True} if on else {"OVERLAP": False}


def can_add(dtype: torch.dtype) -> bool:
    """Whether the kernels add values of this dtype."""
    return dtype in _KINDS


def few_bytes(size: int, words: int) -> int:
    """Bytes of an inbox of `add_few` for calls of up to `words` words."""
    return 2 * size * words * 8


def many_bytes(size: int, words: int) -> int:
    """Bytes of an inbox of `add_many` for calls of up to `words` words, a multiple of `_TILE`."""
    return 2 * size * (words + words // _TILE) * 4


def counters(words: int) -> int:
    """Number of words (int32, zeros at first) that count the calls of `add_few` with up to `words` words, or of
    `add_many`. The first counter tells whether an abort was seen.
    """
    return 1 + max(-(-words // _LANES), _PROGRAMS)


def add_few(
    values: torch.Tensor, inboxes: torch.Tensor, calls: torch.Tensor, abort: torch.Tensor, *, rank: int, words: int
) -> None:
    """Add values over all ranks, in place, on the current stream. Fast for few values: each word is written together
    with a number, so the other ranks need no further message.

    values    contiguous, up to `4 * words` bytes, a multiple of 16, at an address that is a multiple of 16
    inboxes   int64 `[ranks]`: addresses of the inboxes of all ranks, of `few_bytes` bytes, zeros at first
    calls     see `counters`; only for this function
    abort     int32 in pinned host memory; not 0: the kernel stops waiting for other ranks within 20 ms, later calls of
              the same function at once, and their results have no meaning
    """
    count = values.nbytes // 4
    grid: Any = _add_few[(triton.cdiv(count, _LANES),)]
    grid(
        values.data_ptr(),
        inboxes.data_ptr(),
        calls.data_ptr(),
        abort.data_ptr(),
        count,
        rank,
        len(inboxes),
        words,
        _KINDS[values.dtype],
        _LANES,
        _POLLS,
        num_warps=4,
        **_overlap(values.device),
    )


def add_many(
    values: torch.Tensor, inboxes: torch.Tensor, calls: torch.Tensor, abort: torch.Tensor, *, rank: int, words: int
) -> None:
    """As `add_few`, for many values: the inboxes have `many_bytes` bytes."""
    grid: Any = _add_many[(_PROGRAMS,)]
    grid(
        values.data_ptr(),
        inboxes.data_ptr(),
        calls.data_ptr(),
        abort.data_ptr(),
        values.nbytes // 16,
        rank,
        len(inboxes),
        words,
        _KINDS[values.dtype],
        _TILE,
        _POLLS,
        num_warps=_TILE_WARPS,
        **_overlap(values.device),
    )
