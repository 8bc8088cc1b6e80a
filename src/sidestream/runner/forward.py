"""A step's forward pass, however it is launched: the model, and behind it what keeps up with it for drafting. On the
compute stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sidestream.attention.interface import AttentionBackend, AttentionBatch, BatchRows, ungated
from sidestream.device.base import Stream
from sidestream.runner.hidden_states import HiddenStates, PackedRows
from sidestream.runner.model import ForwardModel
from sidestream.runner.state import DecodeState
from sidestream.speculate import Proposer, StepTokens, devices


class Proposed(NamedTuple):
    """What was drafted.

    tokens   int64 `[rows, drafts]`, of the first rows that sample
    times    int64 `[3]`: when the pass began, had its drafts, and had verified them; ns of the device's clock
    """

    tokens: Tensor
    times: Tensor


class Computed(NamedTuple):
    """What a forward pass leaves behind, by place where a token is drawn.

    logits      `[N, vocab_size]`, in the model's dtype
    positions   int64 `[N]`
    hidden      `[N, hidden_size]`; None: nobody reads it, or each row has one place, and the state there
    proposed    None: nothing was drafted
    """

    logits: Tensor
    positions: Tensor
    hidden: Tensor | None = None
    proposed: Proposed | None = None

    def first(self, count: int, drafts: Tensor | None) -> Computed:
        """That of the first `count` places, with the drafts that the batch has; None: it has none."""
        hidden = None if self.hidden is None else self.hidden[:count]
        proposed = None if drafts is None or self.proposed is None else Proposed(drafts, self.proposed.times)
        return Computed(self.logits[:count], self.positions[:count], hidden, proposed)


class Forward:
    """The one way from packed tokens to logits, for passes that are launched kernel by kernel and for those that are
    captured.

    kv           the pool by layer, as attention takes it; with one block more than anybody holds for a proposer that
                 reads hidden states
    attention    makes a batch of each pass
    proposer     is shown every pass, if it keeps KV; None: nobody drafts
    keeps_up     whether it does
    """

    def __init__(
        self,
        model: ForwardModel,
        kv: Tensor,
        *,
        stream: Stream,
        attention: AttentionBackend,
        state: DecodeState,
        proposer: Proposer | None,
    ) -> None:
        self._stream = stream
        self._model = model
        self._kv = kv
        self._attention = attention
        self._proposer = proposer
        layout, hidden_size = model.layout, 0 if proposer is None else proposer.hidden_size
        behind = 0 if proposer is None else proposer.num_layers + layout.layers_for(hidden_size)
        self._layers_behind = range(layout.num_layers - behind, layout.num_layers)
        self._hidden = HiddenStates(kv, layout, state) if hidden_size else None
        self._numbers = torch.arange(state.num_slots + 2).to(kv.device)
        self.keeps_up = proposer is not None and proposer.num_layers > 0

    def draft(self, propose: Callable[[], Tensor]) -> Proposed:
        """The drafts of a pass that is about to run, which `propose` gives."""
        times = torch.empty(3, dtype=torch.int64, device=self._kv.device)
        self._stream.stamp(times[:1])
        tokens = propose()
        self._stream.stamp(times[1:2])
        return Proposed(tokens, times)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        *,
        places: Tensor,
        rows: PackedRows | None,
        before_layer: Callable[[int], None],
        proposed: Proposed | None,
        going_on: bool = False,
    ) -> Computed:
        """One pass over packed tokens, int64 `[T]`, at positions, int64 `[T]`.

        places int64 `[N]`: which of them a token is drawn behind · rows: None if nobody keeps up · before_layer: called
        with each layer behind the model's, in their order, before any of them is read or written · proposed: what the
        tokens hold of drafts · going_on: each row has one token and goes on from its step before, and `before_layer`
        waits for nothing: what there is to keep up with is known already
        """
        hidden, proposer, at_places = self._hidden, self._proposer, None
        if hidden is None or proposer is None or rows is None:
            logits = self._model.forward(tokens, positions, batch, places)
            if proposer is not None and rows is not None:
                for layer in self._layers_behind:
                    before_layer(layer)
                proposer.follow(StepTokens(tokens, positions, None, batch))
        else:
            states: list[Tensor] = []

            def left(everywhere: Tensor) -> None:
                states.append(everywhere)
                for layer in self._layers_behind:
                    before_layer(layer)
                if not going_on:
                    self._stream.on_side_stream(
                        lambda: proposer.follow(StepTokens(tokens, positions, hidden.before(everywhere, rows), batch))
                    )
                self._stream.on_side_stream(
                    lambda: hidden.keep(everywhere, rows, positions=positions, slots=batch.slot_mapping)
                )

            if going_on:
                self._stream.on_side_stream(
                    lambda: proposer.follow(StepTokens(tokens, positions, hidden.before_each(rows), batch))
                )
            logits = self._model.forward_with_hidden(tokens, positions, batch, places, left=left)
            self._stream.join()
            if proposed is not None:  # else each row goes on from its last token, of which it has the state
                at_places = states[0][places]
        if proposed is not None:
            self._stream.stamp(proposed.times[2:])
        return Computed(logits, positions[places], at_places, proposed)

    def one_token_each(
        self, tables: Tensor, positions: Tensor, last: Tensor, nobody: Tensor | None = None
    ) -> AttentionBatch:
        """A batch over the pool of rows with one token each, which wait for nothing: tables `[n, blocks]`, positions
        int64 `[n]`.

        last     int64 `[n]`: as far as a row has room; what would be behind that is there
        nobody   bool `[n]`: rows that write nothing and see nothing, which attention by torch does not know; None:
                 there are none
        """
        count, size = len(positions), self._model.layout.block_tokens
        if devices.has_kernels(tables):
            from sidestream.runner import launch  # Triton, which a CPU does not need

            slots, lengths = launch.one_token_each(tables, positions, last, nobody, block_tokens=size)
        else:
            positions = torch.minimum(positions, last)
            slots = tables.gather(1, (positions // size)[:, None]).squeeze(1).to(torch.int64) * size + positions % size
            lengths = positions + 1
            if nobody is not None:
                slots, lengths = torch.where(nobody, -1, slots), torch.where(nobody, 0, lengths)
        rows = BatchRows(
            slot_mapping=slots,
            block_tables=tables,
            cu_seqlens_q=self._numbers[: count + 1],
            kv_lens=lengths,
            decode_rows=count,
        )
        return self._attention.batch(self._kv, rows, ungated)
