"""The device operations as Triton kernels: for a GPU, or for tests in Triton's interpreter. Needs triton.

They enqueue on the current stream, and the host reads no device values, so CUDA graphs may capture them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sidestream.ops import draft_kernels, step_kernels
from sidestream.ops.interface import DraftRows, PackedRows, ResolvedInputs, SlotTensors

# Number of Triton programs that should run at the same time when tokens are sampled at random.
_PROGRAMS = 512
# Number of low bits that are zero in every number of a dtype, after conversion to float32.
_SPARE_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


class TritonOps:
    """`Ops` as Triton kernels."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = logits.shape
        parts = -(-width // draft_kernels.LANES.value)
        maxima = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
        indices = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
        first: Any = draft_kernels.argmax_of_parts[(rows, parts)]
        first(logits, maxima, indices, width, logits.stride(0), parts, num_warps=8)
        second: Any = draft_kernels.argmax_of_maxima[(rows,)]
        second(maxima, indices, tokens, finite.view(torch.uint8), parts, num_warps=1)
        return tokens, finite

    def match_ngram(
        self, history: Tensor, slots: Tensor, lengths: Tensor, count: int, *, longest: int, shortest: int
    ) -> Tensor:
        drafts = torch.empty(len(slots), count, dtype=torch.int64, device=history.device)
        grid: Any = draft_kernels.match_ngram[(len(slots),)]
        grid(
            history, slots, lengths, drafts, history.shape[1], history.stride(0), longest, shortest, count, num_warps=4
        )
        return drafts

    def update_block_tables(self, indices: Tensor, block_ids: Tensor, block_tables: Tensor) -> None:
        grid: Any = step_kernels.update_block_tables[(-(-len(indices) // step_kernels.LANES.value),)]
        grid(indices, block_ids, block_tables, len(indices), num_warps=4)

    def resolve_inputs(
        self,
        packed: Tensor,
        positions: Tensor,
        token_slots: Tensor,
        kv_lens: Tensor,
        slots: Tensor,
        *,
        last_tokens: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        drafts: Tensor | None,
        block_tokens: int,
        width: int,
    ) -> ResolvedInputs:
        num_tokens, num_rows = len(packed), len(slots)
        to = ResolvedInputs(
            torch.empty_like(packed),
            torch.empty_like(packed),
            torch.empty_like(kv_lens),
            torch.empty_like(packed),
            block_tables.new_empty(num_rows, width),
        )
        grid: Any = step_kernels.resolve_inputs[(-(-num_tokens // step_kernels.LANES.value) + num_rows,)]
        grid(
            packed, positions, token_slots, kv_lens, slots, last_tokens, lengths, block_tables,
            last_tokens if drafts is None else drafts,
            to.tokens, to.positions, to.kv_lens, to.slot_mapping, to.block_tables,
            num_tokens, len(last_tokens) - 1, block_tables.shape[1], width, 0 if drafts is None else drafts.shape[1],
            block_tokens, DRAFTS=drafts is not None, num_warps=4,
        )  # fmt: skip
        return to

    def draft_rows(
        self,
        positions: Tensor,
        starts: Tensor,
        kv_lens: Tensor,
        slots: Tensor,
        *,
        last_tokens: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        hidden: Tensor,
        width: int,
    ) -> DraftRows:
        count, hidden_size = len(slots), hidden.shape[1]
        to = DraftRows(
            torch.empty_like(slots),
            torch.empty_like(slots),
            torch.empty_like(slots),
            torch.empty(count, dtype=torch.bool, device=slots.device),
            block_tables.new_empty(count, width),
            hidden.new_empty(count, hidden_size),
        )
        grid: Any = step_kernels.draft_rows[(count,)]
        grid(
            positions, starts, kv_lens, slots, last_tokens, lengths, block_tables, hidden,
            to.tokens, to.lengths, to.bounds, to.padding.view(torch.uint8), to.block_tables, to.hidden,
            len(last_tokens) - 1, block_tables.shape[1], width, hidden_size, num_warps=4,
        )  # fmt: skip
        return to

    def draft_slots(
        self, block_tables: Tensor, positions: Tensor, bounds: Tensor, padding: Tensor, *, block_tokens: int
    ) -> tuple[Tensor, Tensor]:
        slot_mapping, kv_lens = torch.empty_like(positions), torch.empty_like(positions)
        grid: Any = step_kernels.draft_slots[(len(positions),)]
        grid(
            block_tables, positions, bounds, padding.view(torch.uint8), slot_mapping, kv_lens, block_tokens,
            block_tables.shape[1], num_warps=1,
        )  # fmt: skip
        return slot_mapping, kv_lens

    def penalise(
        self,
        logits: Tensor,
        slots: Tensor,
        sampling: Tensor,
        output_counts: Tensor,
        in_prompt: Tensor,
        drafted: Tensor | None,
    ) -> Tensor:
        count, width = logits.shape
        dense = logits.dtype == torch.float32 and logits.is_contiguous()
        to = logits if dense else torch.empty(count, width, dtype=torch.float32, device=logits.device)
        grid: Any = step_kernels.penalise[(count, -(-width // step_kernels.WIDE.value))]
        grid(
            logits, slots, sampling.view(torch.float64), output_counts, in_prompt.view(torch.uint8),
            slots if drafted is None else drafted, to,
            width, logits.stride(0), 0 if drafted is None else drafted.shape[1], num_warps=8,
        )  # fmt: skip
        return to

    def draw(self, logits: Tensor, slots: Tensor, output_indices: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
        tokens, finite = self.argmax(logits)
        _draw(logits, slots, output_indices, finite, sampling, tokens)
        return tokens, finite

    def advance(
        self,
        tokens: Tensor,
        positions: Tensor,
        drafts: Tensor | None,
        hidden: Tensor | None,
        state: SlotTensors,
        *,
        sampling_rows: Tensor,
        first_logits: Tensor,
        slots: Tensor,
        cu_seqlens_q: Tensor,
        decodes: int,
    ) -> Tensor:
        accepted = torch.empty_like(sampling_rows)
        keeps = state.history.shape[1] > 0
        hidden = hidden if keeps else None
        counted = state.output_counts is not None
        grid: Any = step_kernels.advance[(len(sampling_rows),)]
        grid(
            sampling_rows, first_logits, slots, cu_seqlens_q, tokens, positions, tokens if drafts is None else drafts,
            tokens if hidden is None else hidden,
            state.last_tokens, state.lengths, state.history, state.hidden, accepted,
            state.sampling.view(torch.float64), state.output_counts if counted else accepted, decodes,
            0 if drafts is None else drafts.shape[1], state.history.shape[1], state.hidden.shape[1],
            state.output_counts.shape[1] if state.output_counts is not None else 0,
            KEEPS=keeps, HIDDEN=hidden is not None, COUNTED=counted, num_warps=1,
        )  # fmt: skip
        return accepted

    def previous_hidden(self, hidden: Tensor, rows: PackedRows, by_slot: Tensor, by_block: Tensor) -> Tensor:
        to = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        grid: Any = step_kernels.previous_hidden[(len(hidden),)]
        grid(
            hidden, rows.cu_seqlens_q, rows.slots, rows.origins, by_slot, by_block, to,
            len(rows.slots), hidden.stride(0), by_block.stride(0), hidden.shape[1], num_warps=4,
        )  # fmt: skip
        return to

    def keep_hidden(
        self,
        hidden: Tensor,
        rows: PackedRows,
        by_slot: Tensor,
        by_block: Tensor,
        *,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tokens: int,
    ) -> None:
        grid: Any = step_kernels.keep_hidden[(len(hidden) + len(rows.slots),)]
        grid(
            hidden, positions, slot_mapping, rows.cu_seqlens_q, rows.slots, by_slot, by_block,
            len(hidden), hidden.stride(0), by_block.stride(0), hidden.shape[1], block_tokens, num_warps=4,
        )  # fmt: skip


def _draw(
    logits: Tensor, slots: Tensor, output_indices: Tensor, finite: Tensor, sampling: Tensor, tokens: Tensor
) -> None:
    """Replace the argmax in `tokens` by a random sample, in rows of logits whose request samples at random."""
    (places, width), stride, spare = logits.shape, logits.stride(0), _SPARE_BITS[logits.dtype]
    tiles, turns = -(-width // step_kernels.TILE.value), -(-(32 - spare) // step_kernels.BITS.value)
    # Logits per program, so that about `_PROGRAMS` programs run, but at most `PARTS` programs for each row.
    span = max(-(-tiles * places // _PROGRAMS), -(-tiles // step_kernels.PARTS.value)) * step_kernels.TILE.value
    parts = -(-width // span)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=logits.device)

    kept, left = zeros(places, step_kernels.PARTS.value), zeros(places, step_kernels.PARTS.value)
    floors = torch.empty(places, dtype=torch.float32, device=logits.device)
    searched = [
        (zeros(2, places, step_kernels.PARTS.value, step_kernels.DIGITS.value), zeros(turns, places)) for _ in range(2)
    ]  # top-k, top-p
    asked = (logits, slots, finite.view(torch.uint8), sampling, sampling.view(torch.float64), tokens)
    search: Any = step_kernels.search[(places, parts)]
    weigh: Any = step_kernels.weigh[(places, parts)]
    pick: Any = step_kernels.pick[(places,)]
    for counted, (masses, found) in zip((True, False), searched, strict=True):
        for number in range(turns):
            search(
                *asked,
                kept,
                masses,
                found,
                width,
                stride,
                span,
                places,
                number,
                turns,
                COUNTED=counted,
                SPARE=spare,
                num_warps=8,
            )
        weigh(
            *asked, kept, *searched[0], *searched[1], kept if counted else left, floors,
            width, stride, span, places, turns,
            FINAL=not counted, SPARE=spare, num_warps=8,
        )  # fmt: skip
    pick(logits, slots, output_indices, *asked[2:], left, floors, width, stride, span, num_warps=8)
