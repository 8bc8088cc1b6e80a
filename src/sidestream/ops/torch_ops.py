"""The device operations in torch: for a CPU, and as the reference in tests of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.ops.accept import accept_lengths
from sidestream.ops.interface import FROM_SLOT, DraftRows, PackedRows, ResolvedInputs, SlotTensors
from sidestream.ops.rules import SamplingTensors
from sidestream.ops.torch_sampling import argmax, draw, penalise


class TorchOps:
    """`Ops` in torch."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return argmax(logits)

    def match_ngram(
        self, history: Tensor, slots: Tensor, lengths: Tensor, count: int, *, longest: int, shortest: int
    ) -> Tensor:
        """See `Ops.match_ngram`. Reads `[R, width]` numbers once for each suffix length."""
        history, lengths = history[slots], lengths[:, None]
        width = history.shape[1]
        position = torch.arange(width, device=history.device)
        last = (lengths - 1).clamp(min=0)
        # After n iterations, matched[r, p] is the length, up to n, of the row's suffix that also ends at position p.
        matched = torch.zeros_like(history)
        matches = position < last
        for back in range(longest):
            wanted = history.gather(1, (last - back).clamp(min=0))
            matches = matches & (history.roll(back, 1) == wanted) & (position >= back)
            matched += matches
        # The rank orders matches by length, and equally long matches by position.
        rank = torch.where(matched >= shortest, matched.to(torch.int64) * width + position, -1)
        best, _ = rank.max(1, keepdim=True)
        found = torch.where(best >= 0, best % width, last - 1)
        positions = found + 1 + torch.arange(count, device=history.device) % (last - found)
        return history.gather(1, positions).to(torch.int64)

    def update_block_tables(self, indices: Tensor, block_ids: Tensor, block_tables: Tensor) -> None:
        real = indices >= 0
        block_tables.view(-1)[indices[real]] = block_ids[real].to(torch.int32)

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
        tokens = torch.where(packed < 0, last_tokens[token_slots], packed)
        if drafts is not None:
            number = (-2 - packed).clamp(min=0)
            tokens = torch.where(packed < -1, drafts[token_slots, number], tokens)
        positions = torch.where(positions < 0, lengths[token_slots] - 1 - positions, positions)
        kv_lens = torch.where(kv_lens < 0, lengths[slots] - kv_lens, kv_lens)
        block_ids = block_tables[token_slots, positions // block_tokens]
        padding = token_slots == len(last_tokens) - 1
        slot_mapping = torch.where(padding, -1, block_ids * block_tokens + positions % block_tokens)
        return ResolvedInputs(tokens, positions, kv_lens, slot_mapping, block_tables[:, :width][slots])

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
        known = positions[first_tokens]
        length = torch.where(known < 0, lengths[slots], known)
        bounds = (torch.where(kv_lens < 0, length - kv_lens, kv_lens) - 1).clamp(min=0)  # padding rows have length 0
        padding = slots == len(last_tokens) - 1
        return DraftRows(last_tokens[slots], length + 1, bounds, padding, block_tables[:, :width][slots], hidden[slots])

    def draft_slots(
        self, block_tables: Tensor, positions: Tensor, bounds: Tensor, padding: Tensor, *, block_tokens: int
    ) -> tuple[Tensor, Tensor]:
        positions = torch.minimum(positions, bounds)  # rule: drafting-stays-in-the-blocks-of-its-row
        block_ids = block_tables.gather(1, (positions // block_tokens)[:, None]).squeeze(1).to(torch.int64)
        slot_mapping = block_ids * block_tokens + positions % block_tokens
        return torch.where(padding, -1, slot_mapping), torch.where(padding, 0, positions + 1)

    def penalise(
        self,
        logits: Tensor,
        slots: Tensor,
        sampling: Tensor,
        output_counts: Tensor,
        in_prompt: Tensor,
        drafted: Tensor | None,
    ) -> Tensor:
        """See `Ops.penalise`. Reads device values."""
        return penalise(logits, slots, SamplingTensors(sampling), output_counts, in_prompt, drafted)

    def draw(self, logits: Tensor, slots: Tensor, output_indices: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
        return draw(logits, slots, output_indices, SamplingTensors(sampling))

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
        row, padding = sampling_rows.clamp(min=0), sampling_rows < 0
        # rule: padding-rows-sample-no-token
        slot = torch.where(padding, len(state.last_tokens) - 1, slots[row])
        width = 0 if drafts is None else drafts.shape[1]
        num_drafts = torch.zeros_like(row)
        if width:
            num_drafts = torch.where(row < decodes, cu_seqlens_q[row + 1] - cu_seqlens_q[row] - 1, num_drafts)
        # Indices of the logits of each row; a row with fewer drafts repeats its last index.
        number = torch.arange(width + 1, device=row.device)
        logit = first_logits[:, None] + torch.minimum(number, num_drafts[:, None])
        logit = logit.clamp(max=len(tokens) - 1)
        drawn, accepted = tokens[logit], torch.ones_like(row)
        if drafts is not None:
            # rule: only-verified-drafts-are-accepted
            accepted = accept_lengths(drafts[row.clamp(max=len(drafts) - 1)], drawn, num_drafts)
            accepted = torch.where(padding, 1, accepted)
        last = (accepted - 1)[:, None]
        taken = number < accepted[:, None]
        # rule: sampled-token-stays-on-the-device, last-token-is-the-last-accepted-one
        state.last_tokens[slot] = drawn.gather(1, last).squeeze(1)
        if ignored_column := max(0, state.history.shape[1] - 1):
            start = torch.where(padding, 0, positions[logit[:, 0]])
            state.lengths[slot] = start + accepted  # rule: length-is-published-by-its-step
            column = torch.where(taken, start[:, None] + 1 + number, ignored_column).clamp(max=ignored_column)
            # rule: accepted-run-is-published-before-the-next-step-reads-it
            state.history[slot[:, None], column] = drawn.to(torch.int32)
            if hidden is not None:
                # rule: hidden-state-is-of-the-last-accepted-token
                state.hidden[slot] = hidden[logit.gather(1, last).squeeze(1)]
        if state.output_counts is not None:
            # rule: accepted-tokens-count-for-later-penalties
            counted = (taken & SamplingTensors(state.sampling).penalised[slot][:, None]).to(torch.int32)
            state.output_counts.index_put_((slot[:, None], drawn), counted, accumulate=True)
        return accepted

    def previous_hidden(self, hidden: Tensor, rows: PackedRows, by_slot: Tensor, by_block: Tensor) -> Tensor:
        sources = rows.hidden_sources[:, None]
        first = torch.where(sources == FROM_SLOT, by_slot[rows.slots], 0)
        first = torch.where(sources >= 0, by_block[rows.hidden_sources.clamp(min=0)], first)
        starts, stops, nowhere = rows.cu_seqlens_q[:-1], rows.cu_seqlens_q[1:], len(hidden)
        shifted = torch.cat([hidden[-1:], hidden])  # one row more, which takes the writes of rows without tokens
        return shifted.index_copy(0, torch.where(stops > starts, starts, nowhere), first)[:nowhere]

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
        completes = ((positions + 1) % block_tokens == 0) & (slot_mapping >= 0)
        # rule: hidden-state-is-written-to-its-block
        by_block[torch.where(completes, slot_mapping // block_tokens, len(by_block) - 1)] = hidden
        # rule: next-chunk-reads-the-hidden-state-of-the-last-chunk
        by_slot[rows.slots] = hidden[(rows.cu_seqlens_q[1:] - 1).clamp(min=0)]
