"""Compile all kernels but those that copy bytes for an H100, and print their names; no GPU is needed. Run by
test_kernels_compile.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sidestream.attention.triton import gated_delta_chunks as chunks
from sidestream.attention.triton import gated_delta_kernels as gated_delta
from sidestream.attention.triton import invariant_kernels as invariant
from sidestream.attention.triton import kernels as attention
from sidestream.ops import adapter_kernels, draft_kernels, expert_kernels, product_kernels, products, step_kernels
from sidestream_kv.device.cuda import kernels as copies

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 << 10  # of one program on an H100
LONG, INT, BF16, FLOAT, FP8 = "*i64", "*i32", "*bf16", "*fp32", "*fp8e4nv"


def compiled(
    kernel: Any,
    *types: str,
    warps: int = 4,
    stages: int = 3,
    overlap: bool = False,
    **constants: bool | int | str | tl.dtype,
) -> None:
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    values = {(names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": overlap}
    binary = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=values), target=TARGET, options=options
    )
    assert binary.metadata.shared <= SHARED_BYTES, f"{kernel.fn.__name__} needs {binary.metadata.shared} shared bytes"
    ptx = binary.asm["ptx"]
    if overlap:  # no way out, and nothing written, before the kernel in front of it has ended
        wait = ptx.find("griddepcontrol.wait")
        assert 0 < wait < min(ptx.find("st.global"), ptx.find("ret;")), f"{kernel.fn.__name__} does not wait first"
    print(kernel.fn.__name__)


compiled(step_kernels.update_block_tables, LONG, LONG, INT, "i32")
compiled(step_kernels.draft_rows, *[LONG] * 6, INT, BF16, *[LONG] * 3, "*u8", INT, BF16, *["i32"] * 4)
for drafts in (True, False):
    compiled(step_kernels.resolve_inputs, *[LONG] * 7, INT, *[LONG] * 5, INT, *["i32"] * 6, HAS_DRAFTS=drafts)
compiled(step_kernels.draft_slots, INT, LONG, LONG, "*u8", LONG, LONG, "i32", "i32")
for history, hidden in ((True, True), (True, False), (False, False)):
    for outputs in (True, False):
        compiled(
            step_kernels.advance, *[LONG] * 7, BF16, LONG, LONG, INT, BF16, LONG, "*fp64", INT, *["i32"] * 5,
            TRACKS_HISTORY=history, TRACKS_HIDDEN=hidden, COUNTS_OUTPUTS=outputs,
        )  # fmt: skip
for logits, unused in ((BF16, 16), ("*fp16", 13), (FLOAT, 0)):
    inputs = (LONG, "*u8", LONG, "*fp64", LONG)
    for which in (True, False):
        compiled(
            step_kernels.search_threshold, logits, *inputs, *[LONG] * 3, *["i32"] * 6, warps=8, IS_TOP_K=which,
            UNUSED_BITS=unused,
        )  # fmt: skip
        compiled(
            step_kernels.sum_weights, logits, *inputs, *[LONG] * 6, FLOAT, *["i32"] * 5, warps=8, ALL_FILTERS=which,
            UNUSED_BITS=unused,
        )  # fmt: skip
    compiled(step_kernels.keep_typical, logits, LONG, "*u8", "*fp64", LONG, FLOAT, LONG, FLOAT, *["i32"] * 4, warps=8)
    for which in (True, False):
        compiled(
            step_kernels.sample_token, logits, LONG, LONG, *inputs[1:], LONG, FLOAT, FLOAT, *["i32"] * 4, warps=8,
            IS_TYPICAL=which,
        )  # fmt: skip
    compiled(step_kernels.penalise, logits, LONG, "*fp64", INT, "*u8", LONG, FLOAT, *["i32"] * 3, warps=8)
    compiled(step_kernels.mask, logits, LONG, INT, *["i32"] * 3, warps=4)
compiled(step_kernels.previous_hidden, BF16, LONG, LONG, LONG, BF16, BF16, BF16, *["i32"] * 4)
compiled(step_kernels.keep_hidden, BF16, *[LONG] * 4, BF16, BF16, *["i32"] * 5)
compiled(draft_kernels.argmax_of_parts, BF16, "*fp32", INT, *["i32"] * 3)
compiled(draft_kernels.argmax_of_maxima, "*fp32", INT, LONG, "*u8", "i32")
compiled(draft_kernels.match_ngram, INT, LONG, LONG, LONG, *["i32"] * 5)
compiled(draft_kernels.take_forced, LONG, LONG, INT, LONG, LONG, *["i32"] * 4)
for experts in (32, 129):
    compiled(
        expert_kernels.sort_by_expert, LONG, *[INT] * 4, "i32", "i32",
        EXPERTS=experts, PADDED=256 if experts > 32 else 32, ROWS=16, PART=32, CHUNK=256,
    )  # fmt: skip
for dtype, rows in ((BF16, 16), (BF16, 64), (FLOAT, 16), (FLOAT, 64)):
    outputs, inputs, stages = (64, 128, 3) if rows == 16 else (128, 64, 4)
    for gate in ("clamped", "relu2", ""):
        compiled(
            expert_kernels.multiply_by_expert, *[dtype] * 4, INT, INT, dtype, *["i32"] * 10, stages=stages,
            EXPERTS=128, SORTED=True, GATHER=bool(gate), BIAS=True, GATE=gate, ALTERNATE=True, ROWS=rows,
            OUTPUTS=outputs, INPUTS=inputs, PRECISION="ieee",
        )  # fmt: skip
compiled(
    expert_kernels.multiply_by_expert, *[BF16] * 4, INT, LONG, BF16, *["i32"] * 10,
    EXPERTS=128, SORTED=False, GATHER=True, BIAS=False, GATE="silu", ALTERNATE=False, ROWS=16, OUTPUTS=64, INPUTS=128,
    PRECISION="ieee",
)  # fmt: skip
for gate in ("silu", "gelu", "clamped", "relu2"):
    compiled(expert_kernels.activate, BF16, BF16, *["i32"] * 3, GATE=gate, LANES=1024)
compiled(
    expert_kernels.add_by_token, BF16, FLOAT, INT, BF16, BF16, *["i32"] * 3,
    SORTED=True, SHARED=True, ADDED=True, TOP=8, LANES=512, warps=2,
)  # fmt: skip
for score in ("", "softmax", "sigmoid"):
    compiled(
        expert_kernels.largest_of_rows, FLOAT, FLOAT, BF16, LONG, "i32", "i32", "fp32",
        COUNT=6, WIDTH=128, PLACES=8, SCORE=score, CORRECTED=bool(score), NORMALISED=bool(score), warps=1,
    )  # fmt: skip
for dtype, tokens, outputs in ((BF16, 32, 32), (BF16, 64, 64), (FLOAT, 64, 64)):
    compiled(
        adapter_kernels.add_adapters, *[dtype] * 4, *["i32"] * 5,
        COLUMNS=128, CHUNK=128, TOKENS=tokens, OUTPUTS=outputs, PRECISION="ieee",
    )  # fmt: skip
for row in products._ROW:
    for whole in (True, False):
        compiled(
            product_kernels.multiply_row, *[BF16] * 4, "i32", "i32", overlap=True,
            BIAS=whole, WHOLE=whole, INPUTS=12288 if whole else 11000, OUTPUTS=row.outputs, CHUNK=row.inputs,
            STAGES=row.stages, OVERLAP=True,
        )  # fmt: skip
for dtype, tiles in ((BF16, products._HALF), (FLOAT, products._FLOAT)):
    for tile, whole in itertools.product(tiles, (True, False)):
        compiled(
            product_kernels.multiply, *[dtype] * 4, *["i32"] * 5, warps=tile.warps, stages=tile.stages,
            BIAS=whole, WHOLE=whole, ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, GROUP=8,
            PRECISION="ieee",
        )  # fmt: skip

for pool, kv_heads, size, value_size, width in (
    (BF16, 8, 128, 128, 1024),
    (FP8, 8, 128, 128, 1024),
    (BF16, 1, 512, 64, 512),
):
    compiled(
        attention.write, BF16, BF16, pool, LONG, BF16, LONG, *["i32"] * 9,
        KV_HEADS=kv_heads, OUT_WIDTH=4096, HEAD_DIM=size, VALUE_DIM=value_size, BLOCK_TOKENS=16, WIDTH=width,
        OVERLAP=True,
    )  # fmt: skip
for pool, size, normed in ((BF16, 128, True), (BF16, 80, False), (FP8, 128, True)):
    compiled(
        attention.rotate_and_write, *[BF16] * 7, pool, LONG, BF16, BF16, LONG, "i32", "i32", "fp32", *["i32"] * 12,
        warps=2, NORMED=normed, KV_HEADS=8, GROUP=4, HALF=size // 2, PADDED_HALF=64, BLOCK_TOKENS=16, LINES=16,
        OVERLAP=True,
    )  # fmt: skip
for step, high in ((2, 1), (1, 32)):  # GLM-4.7-Flash's 20 heads
    compiled(
        attention.write_latents, *[BF16] * 8, LONG, BF16, LONG, "i32", "fp32", *["i32"] * 10,
        HEADS=20, PADDED_HEADS=32, LATENT_DIM=512, PADDED_LATENT=512, HALF=32, PADDED_HALF=32, STEP=step, HIGH=high,
        OUT_WIDTH=20 * 512, BLOCK_TOKENS=16, OVERLAP=True,
    )  # fmt: skip
for pool, size, (split, wide, lines, keys, warps, stages) in (
    *itertools.product(
        (BF16, FP8), (128,), ((0, 0, 128, 64, 8, 3), (256, 256, 16, 32, 2, 3), (256, 512, 64, 32, 4, 3))
    ),
    *itertools.product((BF16,), (512,), ((0, 0, 32, 32, 8, 2), (256, 256, 16, 32, 8, 2))),
):
    compiled(
        attention.attend, BF16, pool, BF16, BF16, *[FLOAT] * 4, INT, LONG, LONG, INT, *["i32"] * 5, "fp32", "fp32",
        *["i32"] * 7, warps=warps, stages=stages, overlap=True, SPLIT_TOKENS=split, NARROW_SPLITS=16, WIDE_TOKENS=wide,
        WINDOW=True, CAPPED=True, SINKS=True, ALIBI=lines > 16, KV_HEADS=8, GROUP=4, HEAD_DIM=size, PADDED_DIM=size,
        ROTATED_DIM=0, PADDED_ROTATED=16, BLOCK_TOKENS=16, BLOCK_M=lines, BLOCK_N=keys, OVERLAP=True,
    )  # fmt: skip
# GLM-4.7-Flash's 20 heads, and 64 of DeepSeek-V3's 128.
for split, wide, groups, group, lines, keys in (
    (0, 0, 1, 20, 64, 32),
    (128, 128, 1, 20, 32, 64),
    (128, 128, 2, 64, 64, 64),
    (128, 256, 2, 64, 64, 32),
):
    compiled(
        attention.attend, *[BF16] * 4, *[FLOAT] * 4, INT, LONG, LONG, INT, *["i32"] * 5, "fp32", "fp32", *["i32"] * 7,
        warps=8, stages=2, overlap=True, SPLIT_TOKENS=split, NARROW_SPLITS=16, WIDE_TOKENS=wide, WINDOW=False,
        CAPPED=False, SINKS=False, ALIBI=False, KV_HEADS=groups, GROUP=group, HEAD_DIM=512, PADDED_DIM=512,
        ROTATED_DIM=64, PADDED_ROTATED=64, BLOCK_TOKENS=16, BLOCK_M=lines, BLOCK_N=keys, OVERLAP=True,
    )  # fmt: skip
for size in (128, 512):
    compiled(
        attention.combine, *[FLOAT] * 3, BF16, BF16, LONG, LONG, *["i32"] * 4, warps=1, overlap=True,
        SPLIT_TOKENS=256, NARROW_SPLITS=16, WIDE_TOKENS=512, WINDOW=False, SINKS=True, HEADS=32,
        HEAD_DIM=size, PADDED_DIM=size, OVERLAP=True,
    )  # fmt: skip
for size, stages, warps in ((128, 3, 4), (256, 2, 8)):
    compiled(
        invariant.attend_in_splits, *[BF16] * 4, *[FLOAT] * 4, INT, LONG, LONG, *["i32"] * 4, "fp32", "fp32",
        *["i32"] * 7, warps=warps, stages=stages, overlap=True, SPLIT_TOKENS=256, WINDOW=True, CAPPED=True, SINKS=True,
        ALIBI=True, KV_HEADS=8, GROUP=4, HEAD_DIM=size, PADDED_DIM=size, BLOCK_TOKENS=16, BLOCK_M=64, BLOCK_N=32,
        OVERLAP=True,
    )  # fmt: skip
    compiled(
        invariant.merge, *[FLOAT] * 3, BF16, BF16, LONG, LONG, *["i32"] * 3, warps=1, overlap=True,
        SPLIT_TOKENS=256, WINDOW=True, SINKS=True, HEADS=32, HEAD_DIM=size, PADDED_DIM=size, OVERLAP=True,
    )  # fmt: skip
for pool, size in ((BF16, 16), (FP8, 16), (BF16, 48)):
    compiled(
        attention.gather_contiguous, pool, BF16, BF16, INT, INT, LONG, LONG, *["i32"] * 9,
        HEAD_DIM=128, BLOCK_TOKENS=size, BLOCK_N=64, ROW_MULTIPLE=128,
    )  # fmt: skip
tile = "tensordesc<bf16[64, 128]>"
compiled(
    attention.attend_contiguous,
    BF16,
    tile,
    tile,
    BF16,
    BF16,
    INT,
    LONG,
    LONG,
    *["i32"] * 3,
    "fp32",
    "i32",
    "i32",
    SINKS=True,
    GROUP=4,
    BLOCK_M=64,
    BLOCK_N=64,
    KV_HEADS=8,
    HEAD_DIM=128,
)

compiled(
    gated_delta.convolve, *[BF16] * 6, *[LONG] * 4, *["i32"] * 5, CHANNELS=256, TOKENS=32,
)  # fmt: skip
compiled(
    gated_delta.recur, *[BF16] * 12, FLOAT, *[LONG] * 7, *["i32"] * 6, "fp32",
    KEY_HEADS=16, VALUE_HEADS=32, KEY_SIZE=128, VALUE_SIZE=128, VALUES=32, CONV_CHANNELS=64,
)  # fmt: skip
compiled(gated_delta.norm, *[BF16] * 4, "i32", "fp32", HEADS=32, SIZE=128)
sizes = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_SIZE": 128, "VALUE_SIZE": 128}
for dtype, precision in ((BF16, "tf32"), (FLOAT, "tf32x3")):
    compiled(
        chunks.solve, *[dtype] * 5, FLOAT, LONG, LONG, "i32", "i32",
        **sizes, TOKENS=64, PRECISION="tf32x3",
    )  # fmt: skip
    compiled(
        chunks.advance, *[dtype] * 5, FLOAT, dtype, FLOAT, *[LONG] * 4, *["i32"] * 3, "fp32",
        stages=1, **sizes, VALUES=32, TOKENS=64, PRECISION=precision,
    )  # fmt: skip
for unpacks, table in ((False, True), (True, True), (True, False)):
    compiled(
        copies.pack_vectors, "i64", "i64", "i32", "i32",
        ELEMENTS=128, DTYPE=tl.bfloat16, UNPACKS=unpacks, TABLE=table, ROWS=32, LANES=128,
    )  # fmt: skip
