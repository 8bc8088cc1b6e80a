"""Compiles the attention kernels before serving: during serving, a kernel's first launch would wait for all pending
work of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sidestream.attention.triton.launch import DeviceBatch, paged_attention
from sidestream.attention.triton.workspace import SplitKVWorkspace, Tiles


@dataclass(frozen=True, slots=True)
class Variant:
    """Options that differ between a model's layers; None: the option is off. Each combination of options that are on
    needs its own compiled kernel. Different values of an option use the same kernel.
    """

    sliding_window: int | None = None
    softcap: float | None = None


def warm_up(
    kv: torch.Tensor | tuple[torch.Tensor, ...],
    *,
    heads: int,
    variants: Sequence[Variant],
    workspace: SplitKVWorkspace | None,
    tiles: Tiles | None = None,
    index_dtype: torch.dtype = torch.int32,
) -> None:
    """Compile and launch every kernel that batches over `kv` will use.

    Includes the kernels for splits of KV if `workspace` is given. `index_dtype` is the type of block_tables,
    cu_seqlens_q and kv_lens. Blocks the calling thread during the compilation; neither reads nor writes the pool. If
    `kv` has a tensor for each layer, all must have equal strides, because the launch uses only the first tensor.
    """
    device = kv.device if isinstance(kv, torch.Tensor) else kv[0].device
    padding_batch = DeviceBatch(  # a batch of one padding token and one empty row
        kv,
        slot_mapping=torch.full((1,), -1, dtype=torch.int64, device=device),
        block_tables=torch.zeros(1, 1, dtype=index_dtype, device=device),
        cu_seqlens_q=torch.zeros(2, dtype=index_dtype, device=device),
        kv_lens=torch.zeros(1, dtype=index_dtype, device=device),
        workspace=workspace,
        tiles=tiles,
    )
    pool = padding_batch.layer(0)
    query, key = (
        torch.zeros(1, count, pool.shape[4], dtype=pool.dtype, device=device) for count in (heads, pool.shape[3])
    )
    for batch in (
        (padding_batch, replace(padding_batch, split_rows=1), replace(padding_batch, short_rows=1))
        if workspace
        else (padding_batch,)
    ):
        for variant in variants:
            paged_attention(
                query, key, key, 0, batch, scale=1.0, sliding_window=variant.sliding_window, softcap=variant.softcap
            )
