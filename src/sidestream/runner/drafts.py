"""The drafts of one step: where they are put, what is drawn behind them, and how far each row goes.

A row with k drafts computes 1 + k tokens, and a token is drawn behind each of them: at k + 1 places. The draws that
count are those behind right drafts. All of it happens on the compute stream; what the host knows of it is how many
drafts each row has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestream.attention.interface import AttentionBatch
from sidestream.runner.forward import Computed
from sidestream.runner.inputs import StepInputs
from sidestream.runner.sample import SamplerOutput, sample
from sidestream.runner.state import DecodeState
from sidestream.speculate import Context, Proposer, accept_lengths
from sidestream.types import RowPlan


@dataclass(frozen=True, slots=True)
class Drafts:
    """The rows of a step that sample, in order, by how the host sees them.

    rows               row number of each
    places_in_flight   which row of the step each is
    starts             where each begins, if the host knows; else -1
    num_drafts         of each
    penalised          some row's draws depend on the tokens before them
    """

    rows: tuple[int, ...]
    places_in_flight: tuple[int, ...]
    starts: tuple[int, ...]
    num_drafts: tuple[int, ...]
    penalised: bool

    @classmethod
    def of(cls, rows: Sequence[RowPlan], state: DecodeState) -> Drafts:
        """Inside the step's work: rows that begin have begun."""
        places = tuple(at for at, row in enumerate(rows) if row.samples)
        numbers = tuple(rows[at].row for at in places)
        return cls(
            rows=numbers,
            places_in_flight=places,
            starts=tuple(rows[at].min_start if rows[at].is_certain else -1 for at in places),
            num_drafts=tuple(rows[at].drafts for at in places),
            penalised=state.any_penalised(numbers),
        )

    @property
    def most(self) -> int:
        """Drafts of the row that has most."""
        return max(self.num_drafts, default=0)

    @property
    def row_of_place(self) -> list[int]:
        """Row number of each place where a token is drawn."""
        return [row for row, count in zip(self.rows, self.num_drafts, strict=True) for _ in range(1 + count)]

    def propose(
        self, proposer: Proposer, state: DecodeState, attend: Callable[[Tensor, Tensor, Tensor], AttentionBatch]
    ) -> Tensor:
        """Draft for the rows that have drafts, and nothing for the others: int64 `[R, most]`.

        `attend` gives the batch of rows of the step, int64 `[n]`, with one token each at positions, int64 `[n]`, within
        bounds, int64 `[n]`.
        """
        drafted = torch.zeros(len(self.rows), self.most, dtype=torch.int64, device=state.lengths.device)
        at = [at for at, count in enumerate(self.num_drafts) if count]
        where, in_flight = (
            state.index([self.rows[each] for each in at]),
            state.index([self.places_in_flight[each] for each in at]),
        )
        # A row with fewer drafts than another has no room behind them: what is drafted there is for nothing, and
        # overwrites itself.
        starts = state.index([self.starts[each] for each in at])
        lengths = torch.where(starts < 0, state.lengths[where], starts)
        last = lengths + state.index([self.num_drafts[each] for each in at])
        context = Context(
            history=state.history[:, :-1],
            rows=where,
            lengths=lengths + 1,
            tokens=state.last[where],
            hidden=state.hidden[where],
            attend=lambda positions: attend(in_flight, positions, last),
        )
        return drafted.index_copy(0, state.index(at), proposer.propose(context, self.most))

    def put(self, tokens: Tensor, inputs: StepInputs, proposed: Tensor, state: DecodeState) -> Tensor:
        """The packed tokens with the drafts in their places."""
        chosen = [at * self.most + number for at, count in enumerate(self.num_drafts) for number in range(count)]
        return tokens.index_copy(0, inputs.drafted, proposed.view(-1)[state.index(chosen)])

    def draw(self, computed: Computed, state: DecodeState) -> tuple[SamplerOutput, Tensor]:
        """Draw at all places, and publish how far each row goes for the steps behind this one: what was drawn, and
        int64 `[R]` tokens.
        """
        most, positions = self.most, computed.positions
        proposed = None if computed.proposed is None else computed.proposed.tokens
        starts = [0]
        for count in self.num_drafts:
            starts.append(starts[-1] + 1 + count)
        # Of each row, its places; short rows repeat their last one.
        places = state.index(
            [
                start + min(number, count)
                for start, count in zip(starts, self.num_drafts, strict=False)
                for number in range(most + 1)
            ]
        ).view(len(self.rows), most + 1)
        row_of_place = self.row_of_place
        num_drafts = state.index(self.num_drafts)
        drawn = sample(
            computed.logits,
            row_of_place,
            positions + 1 - state.rules.prompt_len[state.index(row_of_place)],
            state,
            drafted=self._before(proposed, state) if proposed is not None and self.penalised else None,
        )
        where = state.index(self.rows)
        counts = publish(state, computed, drawn.tokens, where=where, places=places, num_drafts=num_drafts)
        if self.penalised:
            state.count(where, drawn.tokens[places], counts)
        return drawn, counts

    def _before(self, proposed: Tensor, state: DecodeState) -> Tensor:
        """What was drafted before each place: int64 `[N, most]`, -1 behind its end."""
        of_row = state.index([at for at, count in enumerate(self.num_drafts) for _ in range(1 + count)])
        number = state.index([number for count in self.num_drafts for number in range(1 + count)])
        return torch.where(torch.arange(self.most, device=proposed.device) < number[:, None], proposed[of_row], -1)


def publish(
    state: DecodeState,
    computed: Computed,
    tokens: Tensor,
    *,
    where: Tensor,
    places: Tensor,
    num_drafts: Tensor,
    nobody: Tensor | None = None,
) -> Tensor:
    """Let rows go on by what was drawn, for the steps behind this one to read: by how many tokens each does, int64
    `[R]` (H19).

    tokens       int64 `[N]`, drawn at all places
    where        int64 `[R]`: row numbers
    places       int64 `[R, K + 1]`: those of each row; a row with fewer drafts repeats its last one
    num_drafts   int64 `[R]`
    nobody       bool `[R]`: padding; None: there is none
    """
    by_row, starts, hidden = tokens[places], computed.positions[places[:, 0]], computed.hidden
    counts = torch.ones_like(places[:, 0])
    if computed.proposed is not None:
        counts = accept_lengths(computed.proposed.tokens, by_row, num_drafts)
    if nobody is not None:
        starts, counts = torch.where(nobody, 0, starts), torch.where(nobody, 1, counts)
    state.advance(where, starts, by_row, counts)
    if hidden is not None:
        state.leave(where, hidden[places.gather(1, counts[:, None] - 1).squeeze(1)])
    return counts
