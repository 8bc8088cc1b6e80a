"""The forward pass of a step, the same for eager and for captured steps: draft tokens, take inputs from device state,
run the model, compute the proposer's KV (`Proposer.follow`). Runs on the compute stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sidestream.attention.grouped import GroupedBatch, grouped_batch
from sidestream.attention.interface import AttentionBackend, AttentionBatch, BatchRows, ungated
from sidestream.attention.states import StateBatch, StatePool
from sidestream.ops import Ops
from sidestream.ops.interface import PackedRows, ResolvedInputs
from sidestream.runner.state import DecodeState
from sidestream.runner.step_inputs import SHORT_TOKENS, StepInputs
from sidestream.speculate import Context, Proposer, StepTokens
from sidestream_kv.device.base import Stream
from sidestream_kv.device.group import Group
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.state_layout import StateLayout
from sidestream_kv.kv.window_layout import WindowedLayers

if TYPE_CHECKING:  # importing transformers takes seconds
    from sidestream.models.lora import Adapters


class HiddenStates:
    """Keeps the model's hidden states from one step to the next, on the compute stream: the last one of each request
    slot, and the last one of each block. A block's hidden state is in the last layers of the block pool, whose owner
    this is, so it is stored and loaded with the block's KV.

    A proposer that reads hidden states uses, at each token, the hidden state of the position before. For a row's first
    token in a step, the slot has kept it from its last step. For the first token after an admission, the block before
    the token holds it (hazard H15). At the start of a sequence, it is zero.

    kv   the block pool; its last block is used by no request, and takes writes that are not kept
    """

    def __init__(self, kv: Tensor, layout: KVLayout, state: DecodeState, ops: Ops) -> None:
        self._state = state
        self._ops = ops
        self._block_tokens = layout.block_tokens
        hidden_size = state.hidden.shape[1]
        start = (layout.num_layers - layout.layers_for(hidden_size)) * kv[0, 0].numel()
        self._by_block = kv.view(kv.shape[0], -1)[:, start : start + hidden_size]

    def previous_by_slot(self, rows: PackedRows) -> Tensor:
        """The hidden state before each row, `[B, hidden_size]`. Only for steps in which every row has one token and
        continues its last step: their states are known before the step runs.
        """
        return self._state.hidden[rows.slots]

    def previous(self, hidden: Tensor, rows: PackedRows) -> Tensor:
        """The hidden state before each packed token, `[T, hidden_size]`. `hidden`: this step's hidden states."""
        return self._ops.previous_hidden(hidden, rows, self._state.hidden, self._by_block)

    def keep(self, hidden: Tensor, rows: PackedRows, *, positions: Tensor, slot_mapping: Tensor) -> None:
        """Keep hidden states of this step, `[T, hidden_size]`: each row's last hidden state in its slot, and the last
        hidden state of each complete block in the block.
        """
        self._ops.keep_hidden(
            hidden,
            rows,
            self._state.hidden,
            self._by_block,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tokens=self._block_tokens,
        )


Left = Callable[[Tensor], None]


class ForwardModel(Protocol):
    """The model that steps run."""

    @property
    def layout(self) -> KVLayout:
        """The layout of its KV."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        ...

    @property
    def state_layout(self) -> StateLayout | None:
        """The layout of its recurrent states; None: it has none."""
        ...

    @property
    def adapters(self) -> Adapters | None:
        """Its LoRA adapters; None: it can have none."""
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        logits_indices: Tensor,
        /,
        *,
        states: StateBatch | None = None,
        left: Left | None = None,
    ) -> Tensor:
        """Logits `[N, vocab_size]` at the packed positions `logits_indices`; on the compute stream. `states`: None for
        a model without recurrent state. `left`, for a proposer that reads hidden states, is called with the last
        layer's hidden states of all packed tokens, `[T, hidden_size]`, before the logits are computed.
        """
        ...


class Proposed(NamedTuple):
    """The drafts of a step.

    tokens   int64 `[decode rows, K]`; undefined in rows without drafts
    times    int64 `[3]`: times of the start of drafting, of its end, and of the end of the forward pass, in ns of the
             device's clock
    """

    tokens: Tensor
    times: Tensor


class ForwardOutput(NamedTuple):
    """The output of a forward pass, for N packed positions.

    logits      `[N, vocab_size]`, in the model's dtype
    positions   int64 `[N]`: positions of the tokens in their sequences
    hidden      `[N, hidden_size]`; None: the forward pass has already kept the hidden states that the slots need
    proposed    the step's drafts; None: it has none
    slot_mapping  int64 `[T]`: place of each packed token's KV in the block pool; None: the batch was empty
    """

    logits: Tensor
    positions: Tensor
    hidden: Tensor | None = None
    proposed: Proposed | None = None
    slot_mapping: Tensor | None = None


class Forward:
    """Computes a step's logits from its inputs.

    kv           the block pool. If the proposer reads hidden states, the pool has one block more than requests can use
    attention    makes the attention batch of each pass. If this backend reads lengths on the host, passes have no
                 padding
    proposer     makes drafts. A proposer with its own KV computes this KV in every pass. None: no drafts
    max_drafts   largest number of drafts of a row
    states       recurrent states; None: the model has none
    windows      the layers with blocks of their own; None: there are none
    group        the ranks that run the same passes; all of them verify the drafts that rank 0 made
    """

    def __init__(
        self,
        model: ForwardModel,
        kv: Tensor,
        *,
        stream: Stream,
        ops: Ops,
        attention: AttentionBackend,
        state: DecodeState,
        proposer: Proposer | None,
        max_drafts: int,
        states: StatePool | None = None,
        windows: WindowedLayers | None = None,
        group: Group | None = None,
    ) -> None:
        self._group = group
        self._stream = stream
        self._model = model
        self._states = states
        self._ops = ops
        self._attention = attention
        self._state = state
        self._proposer = proposer
        self._verify_tokens = 1 + max_drafts
        self._kv = kv
        self._device = kv.device
        self._block_tokens = model.layout.block_tokens
        self._places = None if windows is None else windows.places(model.layout.num_layers)
        layout = model.layout if windows is None else windows.blocks
        hidden_size = 0 if proposer is None else proposer.hidden_size
        own_layers = 0 if proposer is None else proposer.num_layers + layout.layers_for(hidden_size)
        self._proposer_layers = range(layout.num_layers - own_layers, layout.num_layers)
        self._hidden = HiddenStates(kv, layout, state, ops) if hidden_size else None
        self._follows = proposer is not None and proposer.num_layers > 0
        self.num_model_layers = self._proposer_layers.start
        """Number of the pool's first layers that hold the model's own KV."""
        # Offsets of the rows of a batch in which each row has one token.
        self._single_starts = torch.arange(state.num_slots + 2).to(kv.device)

    def step(
        self,
        inputs: StepInputs,
        before_layer: Callable[[int], None],
        *,
        gated: bool,
        before_states: Callable[[], None] = lambda: None,
    ) -> ForwardOutput:
        """Run the whole pass. `gated`: whether `before_layer` waits for loads."""
        state, ops = self._state, self._ops
        ops.update_block_tables(inputs.table_indices, inputs.block_ids, state.tables)
        continues = not gated and not inputs.sizes.chunks and not inputs.sizes.draft_len
        if self._attention.reads_lengths_on_host:
            inputs = inputs.without_padding()
        sizes = inputs.sizes
        if not sizes.num_tokens:  # the batch is empty: the whole buffer was padding
            empty = torch.zeros(0, device=self._device)
            return ForwardOutput(empty, empty.to(torch.int64))
        proposed = self._propose(inputs)
        resolved = ops.resolve_inputs(
            inputs.tokens,
            inputs.positions,
            inputs.token_slots,
            inputs.kv_lens,
            inputs.slots,
            last_tokens=state.last_tokens,
            lengths=state.lengths,
            block_tables=state.block_tables,
            drafts=self._by_slot(inputs, proposed),
            block_tokens=self._block_tokens,
            width=inputs.table_width,
        )
        attended = BatchRows(
            slot_mapping=resolved.slot_mapping,
            block_tables=resolved.block_tables.to(self._attention.table_dtype),
            cu_seqlens_q=inputs.cu_seqlens_q,
            kv_lens=resolved.kv_lens,
            decode_rows=sizes.decodes,
            decode_queries=self._verify_tokens if sizes.draft_len else 1,
            short_rows=sizes.split_chunks,
            short_queries=SHORT_TOKENS,
        )
        indices = inputs.logits_indices
        states = None
        if self._states is not None:
            before_states()
            begin = sizes.decodes + sizes.num_drafts
            states = self._states.batch(
                inputs.state_reads,
                inputs.state_writes,
                inputs.state_checkpoints,
                slots=inputs.slots,
                cu_seqlens_q=inputs.cu_seqlens_q,
                kv_lens=resolved.kv_lens,
                num_decode=sizes.decodes,
                decode_queries=1 + sizes.draft_len,
                chunks=[*itertools.pairwise(itertools.accumulate(inputs.chunk_lens, initial=begin))],
            )
        if (adapters := self._model.adapters) is not None:
            adapters.choose(state.adapters[inputs.token_slots])
        output = self.run(
            resolved.tokens,
            resolved.positions,
            self._batch(inputs, resolved, attended, before_layer),
            logits_indices=indices.clamp(min=0) if inputs.padded else indices,
            rows=PackedRows(inputs.cu_seqlens_q, inputs.slots, inputs.hidden_sources) if self._follows else None,
            before_layer=before_layer,
            proposed=proposed,
            continues=continues,
            states=states,
        )
        return output._replace(slot_mapping=resolved.slot_mapping)

    def _batch(
        self, inputs: StepInputs, resolved: ResolvedInputs, rows: BatchRows, before_layer: Callable[[int], None]
    ) -> AttentionBatch:
        """The batch of the model's own layers."""
        if self._places is None:
            return self._attention.batch(self._kv, rows, before_layer)
        tables = self._state.window_tables[:, : inputs.table_width]
        return grouped_batch(
            self._attention,
            self._kv,
            rows,
            tables[inputs.slots],
            pages_of=lambda at: tables[inputs.token_slots, at],
            positions=resolved.positions,
            places=self._places,
            before_layer=before_layer,
        )

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        *,
        logits_indices: Tensor,
        rows: PackedRows | None,
        before_layer: Callable[[int], None],
        proposed: Proposed | None,
        continues: bool = False,
        states: StateBatch | None = None,
    ) -> ForwardOutput:
        """Run the model over packed tokens, int64 `[T]`, at positions, int64 `[T]`; and compute the proposer's KV.

        logits_indices int64 `[N]` · rows: None if no proposer has its own KV · before_layer: called with each of the
        proposer's layers, in order, before the proposer reads or writes any of them · proposed: the drafts among the
        tokens · continues: each row has one token and continues its last step, and `before_layer` waits for nothing.
        If so, the proposer's inputs are known early, and it runs beside the model.
        """
        hidden, proposer, at_logits = self._hidden, self._proposer, None
        if hidden is None or proposer is None or rows is None:
            logits = self._logits(tokens, positions, batch, logits_indices, states)
            if proposer is not None and rows is not None:
                for layer in self._proposer_layers:
                    before_layer(layer)
                proposer.follow(StepTokens(tokens, positions, None, batch))
        else:
            outputs: list[Tensor] = []

            def left(everywhere: Tensor) -> None:
                outputs.append(everywhere)
                for layer in self._proposer_layers:  # rule: hidden-states-wait-for-their-load
                    before_layer(layer)
                if not continues:  # rule: proposer-runs-in-every-step
                    self._stream.on_side_stream(
                        lambda: proposer.follow(StepTokens(tokens, positions, hidden.previous(everywhere, rows), batch))
                    )
                self._stream.on_side_stream(
                    lambda: hidden.keep(everywhere, rows, positions=positions, slot_mapping=batch.slot_mapping)
                )

            if continues:
                self._stream.on_side_stream(
                    lambda: proposer.follow(StepTokens(tokens, positions, hidden.previous_by_slot(rows), batch))
                )
            logits = self._logits(tokens, positions, batch, logits_indices, states, left)
            self._stream.join()  # rule: proposer-branch-is-joined
            # Without drafts, each row continues after its slot's last token, and `hidden.keep` has kept the hidden
            # state of that token.
            if proposed is not None:
                at_logits = outputs[0][logits_indices]
        if proposed is not None:
            self._stream.stamp(proposed.times[2:])
        return ForwardOutput(logits, positions[logits_indices], at_logits, proposed)

    def _logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        indices: Tensor,
        states: StateBatch | None,
        left: Left | None = None,
    ) -> Tensor:
        logits = self._model.forward(tokens, positions, batch, indices, states=states, left=left)
        return logits if states is None else states.finish(logits, indices)

    def _propose(self, inputs: StepInputs) -> Proposed | None:
        """Draft tokens for the decode rows that may have drafts; None: there are no such rows."""
        sizes, state, proposer = inputs.sizes, self._state, self._proposer
        drafting = slice(sizes.first_drafting, sizes.decodes)
        if proposer is None or not sizes.draft_len or drafting.start == drafting.stop:
            return None
        times = torch.empty(3, dtype=torch.int64, device=self._device)
        self._stream.stamp(times[:1])
        slots = inputs.slots[drafting]
        rows = self._ops.draft_rows(
            inputs.positions,
            inputs.cu_seqlens_q[drafting],
            inputs.kv_lens[drafting],
            slots,
            last_tokens=state.last_tokens,
            lengths=state.lengths,
            block_tables=state.block_tables,
            hidden=state.hidden,
            width=inputs.table_width,
        )

        def attend(positions: Tensor) -> AttentionBatch:
            slot_mapping, kv_lens = self._ops.draft_slots(
                rows.block_tables, positions, rows.bounds, rows.padding, block_tokens=self._block_tokens
            )
            single = BatchRows(
                slot_mapping=slot_mapping,
                block_tables=rows.block_tables.to(self._attention.table_dtype),
                cu_seqlens_q=self._single_starts[: len(slots) + 1],
                kv_lens=kv_lens,
                decode_rows=len(slots),
            )
            batch = self._attention.batch(self._kv, single, ungated)
            return batch if self._places is None else GroupedBatch(batch, (), self._places)  # a proposer has no pages

        history = state.history[:, :-1]
        context = Context(history, slots, rows.lengths, rows.tokens, rows.hidden, attend, self._ops)
        tokens = proposer.propose(context, sizes.draft_len)
        # rule: forced-tokens-are-drafted
        self._ops.take_forced(tokens, state.forced, history, slots, rows.lengths)
        if self._group is not None:
            tokens = tokens.contiguous()
            self._group.broadcast(tokens)  # rule: drafts-are-those-of-rank-0
        self._stream.stamp(times[1:2])
        return Proposed(pad(tokens, (0, 0, drafting.start, 0)) if drafting.start else tokens, times)

    def _by_slot(self, inputs: StepInputs, proposed: Proposed | None) -> Tensor | None:
        """The drafts by request slot, `[S, K]`."""
        if proposed is None:
            return None
        tokens = proposed.tokens
        drafts = torch.zeros(len(self._state.last_tokens), tokens.shape[1], dtype=torch.int64, device=self._device)
        return drafts.index_copy_(0, inputs.slots[: len(tokens)], tokens)
