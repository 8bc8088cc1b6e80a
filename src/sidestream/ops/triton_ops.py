"""The device operations as Triton kernels: for a GPU, or for tests in Triton's interpreter. Needs triton.

They enqueue on the current stream, and the host reads no device values, so CUDA graphs may capture them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sidestream.ops import draft_kernels, step_kernels
from sidestream.ops.interface import DraftRows, PackedRows, ResolvedInputs, SlotTensors
from sidestream.ops.torch_ops import Ops

# Number of Triton programs that should run at the same time when tokens are sampled at random.
_PROGRAMS = 512
# Number of low bits that are zero in every number of a dtype, after conversion to float32.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


class TritonOps(Ops):
    """Each operation of `Ops` as Triton kernels."""

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

    def take_forced(self, drafts: Tensor, forced: Tensor, history: Tensor, slots: Tensor, lengths: Tensor) -> None:
        grid: Any = draft_kernels.take_forced[(len(slots),)]
        strides = drafts.stride(0), forced.stride(0), history.stride(0)
        grid(drafts, forced, history, slots, lengths, *strides, drafts.shape[1], num_warps=1)

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
        out = ResolvedInputs(
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
            out.tokens, out.positions, out.kv_lens, out.slot_mapping, out.block_tables,
            num_tokens, len(last_tokens) - 1, block_tables.shape[1], width, 0 if drafts is None else drafts.shape[1],
            block_tokens, HAS_DRAFTS=drafts is not None, num_warps=4,
        )  # fmt: skip
        return out

    def draft_rows(
        self,
        positions: Tensor,
        first_tokens: Tensor,
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
        out = DraftRows(
            torch.empty_like(slots),
            torch.empty_like(slots),
            torch.empty_like(slots),
            torch.empty(count, dtype=torch.bool, device=slots.device),
            block_tables.new_empty(count, width),
            hidden.new_empty(count, hidden_size),
        )
        grid: Any = step_kernels.draft_rows[(count,)]
        grid(
            positions, first_tokens, kv_lens, slots, last_tokens, lengths, block_tables, hidden,
            out.tokens, out.lengths, out.bounds, out.padding.view(torch.uint8), out.block_tables, out.hidden,
            len(last_tokens) - 1, block_tables.shape[1], width, hidden_size, num_warps=4,
        )  # fmt: skip
        return out

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
        out = logits if dense else torch.empty(count, width, dtype=torch.float32, device=logits.device)
        grid: Any = step_kernels.penalise[(count, -(-width // step_kernels.PENALTY_TILE.value))]
        grid(
            logits, slots, sampling.view(torch.float64), output_counts, in_prompt.view(torch.uint8),
            slots if drafted is None else drafted, out,
            width, logits.stride(0), 0 if drafted is None else drafted.shape[1], num_warps=8,
        )  # fmt: skip
        return out

    def mask(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        count, words = masks.shape
        grid: Any = step_kernels.mask[(count, -(-words // step_kernels.MASK_TILE.value))]
        grid(logits, rows, masks, logits.shape[1], logits.stride(0), words, num_warps=4)

    def draw(
        self, logits: Tensor, slots: Tensor, output_indices: Tensor, sampling: Tensor, *, typical: bool = False
    ) -> tuple[Tensor, Tensor]:
        tokens, finite = self.argmax(logits)
        _draw(logits, slots, output_indices, finite, sampling, tokens, typical=typical)
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
        accept_lengths = torch.empty_like(sampling_rows)
        tracks_history = state.history.shape[1] > 0
        hidden = hidden if tracks_history else None
        counts_outputs = state.output_counts is not None
        grid: Any = step_kernels.advance[(len(sampling_rows),)]
        grid(
            sampling_rows, first_logits, slots, cu_seqlens_q, tokens, positions, tokens if drafts is None else drafts,
            tokens if hidden is None else hidden,
            state.last_tokens, state.lengths, state.history, state.hidden, accept_lengths,
            state.sampling.view(torch.float64), state.output_counts if counts_outputs else accept_lengths, decodes,
            0 if drafts is None else drafts.shape[1], state.history.shape[1], state.hidden.shape[1],
            state.output_counts.shape[1] if state.output_counts is not None else 0,
            TRACKS_HISTORY=tracks_history, TRACKS_HIDDEN=hidden is not None, COUNTS_OUTPUTS=counts_outputs, num_warps=1,
        )  # fmt: skip
        return accept_lengths

    def previous_hidden(self, hidden: Tensor, rows: PackedRows, by_slot: Tensor, by_block: Tensor) -> Tensor:
        out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        grid: Any = step_kernels.previous_hidden[(len(hidden),)]
        grid(
            hidden, rows.cu_seqlens_q, rows.slots, rows.hidden_sources, by_slot, by_block, out,
            len(rows.slots), hidden.stride(0), by_block.stride(0), hidden.shape[1], num_warps=4,
        )  # fmt: skip
        return out

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
    logits: Tensor,
    slots: Tensor,
    output_indices: Tensor,
    finite: Tensor,
    sampling: Tensor,
    tokens: Tensor,
    *,
    typical: bool,
) -> None:
    """Replace the argmax in `tokens` by a random sample, in rows of logits whose request samples at random."""
    (num_logit_rows, width), stride, unused_bits = logits.shape, logits.stride(0), _UNUSED_BITS[logits.dtype]
    max_parts, tile = step_kernels.PARTS.value, step_kernels.TILE.value
    tiles, num_digits = -(-width // tile), -(-(32 - unused_bits) // step_kernels.DIGIT_BITS.value)
    # Logits per program, so that about `_PROGRAMS` programs run, but at most `max_parts` programs for each row.
    part_size = max(-(-tiles * num_logit_rows // _PROGRAMS), -(-tiles // max_parts)) * tile
    parts = -(-width // part_size)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=logits.device)

    # Weights of the tokens that top-k keeps, and of those that all filters keep.
    top_k_sums, final_sums = zeros(num_logit_rows, max_parts), zeros(num_logit_rows, max_parts)
    min_ratios = torch.empty(num_logit_rows, dtype=torch.float32, device=logits.device)
    totals_shape = 2, num_logit_rows, max_parts, step_kernels.DIGIT_VALUES.value
    searches = [(zeros(*totals_shape), zeros(num_digits, num_logit_rows)) for _ in range(2)]  # top-k, top-p
    inputs = (logits, slots, finite.view(torch.uint8), sampling, sampling.view(torch.float64), tokens)
    search_threshold: Any = step_kernels.search_threshold[(num_logit_rows, parts)]
    sum_weights: Any = step_kernels.sum_weights[(num_logit_rows, parts)]
    sample_token: Any = step_kernels.sample_token[(num_logit_rows,)]
    for is_top_k, search in zip((True, False), searches, strict=True):
        for digit in range(num_digits):
            search_threshold(
                *inputs, top_k_sums, *search, width, stride, part_size, num_logit_rows, digit, num_digits,
                IS_TOP_K=is_top_k, UNUSED_BITS=unused_bits, num_warps=8,
            )  # fmt: skip
        sum_weights(
            *inputs, top_k_sums, *searches[0], *searches[1], top_k_sums if is_top_k else final_sums, min_ratios,
            width, stride, part_size, num_logit_rows, num_digits,
            ALL_FILTERS=not is_top_k, UNUSED_BITS=unused_bits, num_warps=8,
        )  # fmt: skip
    mean_and_distance = torch.empty(2, num_logit_rows, dtype=torch.float32, device=logits.device)
    if typical:
        keep_typical: Any = step_kernels.keep_typical[(num_logit_rows,)]
        keep_typical(
            logits, slots, *inputs[2:3], *inputs[4:], min_ratios, final_sums, mean_and_distance, width, stride,
            part_size, num_logit_rows, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    sample_token(
        logits, slots, output_indices, *inputs[2:], final_sums, min_ratios, mean_and_distance, width, stride, part_size,
        num_logit_rows, IS_TYPICAL=typical, num_warps=8, enable_fp_fusion=not typical,
    )  # fmt: skip
