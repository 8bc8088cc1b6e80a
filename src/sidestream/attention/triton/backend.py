"""The attention backend for GPUs: Triton kernels, and the buffers shared by all steps.

A row is one request's part of a batch. A split is a part of a row's KV that one program reduces, as in FlashDecoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sidestream.attention.interface import AttentionSpec, BatchRows
from sidestream.attention.triton import flash
from sidestream.attention.triton.launch import DeviceBatch
from sidestream.attention.triton.workspace import LONG_TOKENS, ContiguousKV, SplitKVWorkspace
from sidestream_kv.device.kinds import on_gpu


@dataclass(frozen=True, slots=True, eq=False)
class TritonAttention:
    """See `AttentionBackend`. The KV of decode rows and of short prefill chunks is reduced in splits, the KV of all
    other rows in one pass. The exact bits of a row's result depend on this choice.

    workspace    memory for the partial results of splits
    contiguous   memory for a contiguous copy of chunks' KV, with FlashAttention-3 if it is installed; None: every
                 row's KV is read from its blocks
    invariant    the bits of a row's result do not depend on that choice: see `BatchLocation`
    """

    workspace: SplitKVWorkspace
    contiguous: ContiguousKV | None = None
    invariant: bool = False

    @classmethod
    def supports(cls, device: torch.device) -> bool:
        return on_gpu(device)

    @classmethod
    def token_bytes(cls, spec: AttentionSpec) -> int:
        splits = SplitKVWorkspace.token_bytes(
            spec.query_tokens, heads=spec.heads, head_dim=spec.value_dim, tokens=_split_tokens(spec)
        )
        if spec.latent_dim or spec.batch_invariant:
            return splits
        return splits + 2 * spec.kv_heads * spec.head_dim * spec.dtype.itemsize

    @classmethod
    def create(cls, spec: AttentionSpec, *, kv_tokens: int, chunk_tokens: int) -> TritonAttention:
        workspace = SplitKVWorkspace.allocate(
            query_tokens=spec.query_tokens,
            kv_tokens=kv_tokens,
            heads=spec.heads,
            head_dim=spec.value_dim,
            device=spec.device,
            tokens=_split_tokens(spec),
            draft=spec.draft,
        )
        if spec.batch_invariant:
            return cls(workspace, invariant=True)
        # Without a long chunk in the warm-up, kernels for long chunks are not compiled. They do not read latents.
        if chunk_tokens < LONG_TOKENS or spec.latent_dim:
            return cls(workspace)
        contiguous = ContiguousKV.allocate(
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            kv_tokens=workspace.kv_tokens,  # the block tables of captured graphs have this length
            dtype=spec.dtype,
            device=spec.device,
        )
        if contiguous is None:
            return cls(workspace)
        found = flash.find(spec.heads, contiguous.keys, contiguous.values)
        return cls(workspace, ContiguousKV(contiguous.keys, contiguous.values, contiguous.tile, found))

    @property
    def table_dtype(self) -> torch.dtype:
        return torch.int32

    @property
    def max_kv_tokens(self) -> int:
        return self.workspace.kv_tokens

    @property
    def reads_lengths_on_host(self) -> bool:
        return False

    def batch(self, kv: torch.Tensor, rows: BatchRows, before_layer: Callable[[int], None]) -> DeviceBatch:
        return DeviceBatch(
            kv=kv,
            slot_mapping=rows.slot_mapping,
            block_tables=rows.block_tables,
            cu_seqlens_q=rows.cu_seqlens_q,
            kv_lens=rows.kv_lens,
            split_rows=rows.decode_rows,
            split_queries=rows.decode_queries,
            short_rows=rows.short_rows,
            short_queries=rows.short_queries,
            workspace=self.workspace,
            contiguous=self.contiguous,
            before_layer=before_layer,
            invariant=self.invariant,
        )


def _split_tokens(spec: AttentionSpec) -> int:
    """KV tokens of a split. Few programs read the latents of a row, because all heads share them, so splits of latents
    are shorter. Shorter still, the memory for partial results would grow further.
    """
    return 128 if spec.latent_dim else 256
