"""Decode state that lives on the device, by row: the last token drawn, the blocks held, and what penalties need to know of earlier tokens.

Knows rows and tokens, never requests, blocks or logits. Touched only by work that runs on the compute stream, so that a row's
reset, its draws and its next reset are in order without a lock; the host never reads it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestream.errors import InvariantError
from sidestream.execute.upload import upload, upload_list
from sidestream.types import RowStart, SamplingSpec


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What the host knows of how one row draws, and the id lists that its draws need on the device.

    penalised   the row's output counts are kept, because a penalty reads them
    bias_ids    int64 `[n]`, distinct, each inside the vocabulary; `bias` float32 `[n]`
    forbidden   int64 `[m]`, ids that may not be drawn before `spec.min_tokens` outputs
    """

    spec: SamplingSpec
    penalised: bool
    bias_ids: Tensor
    bias: Tensor
    forbidden: Tensor

    @property
    def greedy(self) -> bool:
        """Whether the row takes its likeliest token. `top_k` 1 leaves no choice either."""
        return self.spec.temperature == 0 or self.spec.top_k == 1


class DecodeState:
    """Owner of the rows' device tensors; its single writer is the compute stream.

    last     int64 `[num_rows + 1]`, the last token committed to each row, or given when it began
    tables   int32 `[num_rows + 1, width]`, the blocks of each row, for captured forward passes; width 0 until `hold_tables`
    nobody   number of one row more, which padding uses: it draws nothing, and holds nothing that anybody reads

    The `[num_rows, vocab_size]` tables of penalties (5 bytes an entry) are allocated when the first row needs them.
    """

    def __init__(self, num_rows: int, vocab_size: int, *, device: torch.device | str = "cpu") -> None:
        self.num_rows = self.nobody = num_rows
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._rows: list[RowSampling | None] = [None] * num_rows
        # By a copy that is waited for: a kernel would run on a stream that orders nothing. Tokens of the vocabulary from the start, because
        # on a GPU a flight whose row could not begin would look up whatever lies here, and a wrong index ends the device.
        self.last = torch.zeros(num_rows + 1, dtype=torch.int64).to(self._device)
        self.tables = torch.zeros(num_rows + 1, 0, dtype=torch.int32, device=self._device)
        self._output_counts: Tensor | None = None
        self._in_prompt: Tensor | None = None

    def begin(self, row: int, start: RowStart) -> None:
        """Hand `row` to a new owner, or to the same one again after it was retracted: nothing of before is kept (H16, H18).

        Runs before the row's first chunk of an epoch. Ids outside the vocabulary are ignored.
        """
        spec = start.sampling
        bias = {token: value for token, value in spec.logit_bias.items() if 0 <= token < self.vocab_size}
        self._rows[row] = RowSampling(
            spec=spec,
            penalised=spec.repetition_penalty != 1 or spec.presence_penalty != 0 or spec.frequency_penalty != 0,
            bias_ids=self._ids(bias),
            bias=upload_list(list(bias.values()), self._device, torch.float32),
            forbidden=self._ids(spec.forbidden_until_min),
        )
        # Not assigned: a GPU would be waited for (P1).
        self.last[row : row + 1].fill_((0, *start.prompt[-1:], *start.outputs[-1:])[-1])
        if self.row(row).penalised:
            self._fill_tables(row, start)  # tables of other rows are never read, so they need no wiping

    def row(self, row: int) -> RowSampling:
        """How `row` draws. Raises InvariantError when it never began."""
        found = self._rows[row]
        if found is None:
            raise InvariantError(f"row {row} draws, but it never began: the row's first chunk must carry RowStart")
        return found

    def last_tokens(self, rows: Sequence[int]) -> Tensor:
        """The last token committed to each row, or given when it began: int64 `[len(rows)]`, a copy."""
        return self.last[self.index(rows)]

    def hold_tables(self, width: int) -> None:
        """Have tables of so many blocks a row, holding none. Before any work that uses them."""
        self.tables = torch.zeros(self.num_rows + 1, width, dtype=torch.int32).to(self._device)

    def place(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Write block ids at flat places of `tables`."""
        where, what = upload([torch.tensor(places), torch.tensor(blocks)], self._device)
        self.tables.view(-1).index_copy_(0, where, what.to(torch.int32))

    def commit(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Make `tokens`, int64 `[len(rows)]`, the rows' last tokens and count them. Each row at most once."""
        self.last[self.index(rows)] = tokens
        counted = [at for at, row in enumerate(rows) if self.row(row).penalised]
        if counted:
            counts, _ = self._tables()
            where = self.index([rows[at] for at in counted])
            counts.index_put_((where, tokens[self.index(counted)]), counts.new_ones(()), accumulate=True)

    def seen(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of penalised rows: output counts int32 and presence in the prompt bool, both `[len(rows), vocab_size]`, copies."""
        counts, in_prompt = self._tables()
        where = self.index(rows)
        return counts[where], in_prompt[where]

    def index(self, values: Sequence[int]) -> Tensor:
        """Host numbers as int64 on the device of this state."""
        return upload_list(values, self._device)

    def _ids(self, tokens: Iterable[int]) -> Tensor:
        return self.index([token for token in tokens if 0 <= token < self.vocab_size])

    def _fill_tables(self, row: int, start: RowStart) -> None:
        counts, in_prompt = self._tables()
        outputs = self._ids(start.outputs)
        counts[row].zero_()
        counts[row].index_add_(0, outputs, torch.ones_like(outputs, dtype=counts.dtype))
        in_prompt[row].zero_()
        in_prompt[row].index_fill_(0, self._ids(start.prompt), True)

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self._output_counts is None or self._in_prompt is None:
            shape = (self.num_rows, self.vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._output_counts, self._in_prompt
