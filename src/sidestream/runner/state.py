"""Decode state that lives on the device, by row: the last token drawn, the blocks held, how the next one is drawn and
what penalties need to know of earlier tokens, and, where tokens are drafted, all tokens and how many they are: then the
host learns a step late how far a row went.

Knows rows and tokens, never requests, blocks or logits. Touched only by work that runs on the compute stream, so that a
row's reset, its draws and its next reset are in order without a lock; the host never reads it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.device.kinds import CPU
from sidestream.errors import InvariantError
from sidestream.runner.rules import COLUMNS, SamplingTensors, sampling_row
from sidestream.runner.upload import Uploads
from sidestream.speculate import devices
from sidestream.types import RowStart, SamplingSpec


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What the host knows of how one row draws: `SamplingTensors` say the rest on the device.

    bias_ids    int64 `[n]`, distinct, each inside the vocabulary; `bias` float32 `[n]`
    forbidden   int64 `[m]`, ids inside the vocabulary that may not be drawn before `spec.min_tokens` outputs; empty if
                that is 0
    """

    spec: SamplingSpec
    bias_ids: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    forbidden: npt.NDArray[np.int64]


class DecodeState:
    """Owner of the rows' device tensors; its single writer is the compute stream.

    last     int64 `[num_slots + 1]`, the last token committed to each row, or given when it began
    tables   int32 `[num_slots + 1, width]`, the blocks of each row, for captured forward passes; width 0 until
             `hold_tables`
    rules    how each row draws
    lengths  int64 `[num_slots + 1]`, of a row that has drawn: how many of its tokens have KV, which is where its last
             token goes
    history  int32 `[num_slots + 1, width + 1]`, all tokens of each row up to and with its last one; empty without
             `max_len`. The last column takes what is thrown away
    hidden   `[num_slots + 1, hidden_size]`: what the model's last layer left at the last position that has KV
    nobody   number of one row more, which padding uses: it draws nothing, and holds nothing that anybody reads

    `lengths`, `history` and `hidden` are kept by `advance` and `leave`, where tokens are drafted. The `[num_slots + 1,
    vocab_size]` tables of penalties (5 bytes an entry) are allocated when the first row needs them, on a GPU before
    serving.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        device: torch.device | str = CPU,
        uploads: Uploads | None = None,
        max_len: int = 0,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`uploads` brings what steps need of the host's numbers; None: on a CPU. `max_len`: tokens of a row at most,
        if they are kept; `dtype`: that of hidden states.
        """
        self.num_slots = self.padding_slot = num_slots
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._uploads = uploads or Uploads(device)
        self._rows: list[RowSampling | None] = [None] * num_slots
        # By a copy that is waited for: a kernel would run on a stream that orders nothing. Tokens of the vocabulary
        # from the start, because on a GPU a step whose row could not begin would look up whatever lies here, and a
        # wrong index ends the device.
        self.last = torch.zeros(num_slots + 1, dtype=torch.int64).to(self._device)
        self.tables = torch.zeros(num_slots + 1, 0, dtype=torch.int32, device=self._device)
        self.rules = SamplingTensors.greedy(num_slots + 1, self._device)
        self.lengths = torch.zeros(num_slots + 1, dtype=torch.int64).to(self._device)
        # Zeros of numpy, here and below: a fill by several threads would leave this thread with a team of its own, and
        # torch's threads of the forward pass wake late ever after where there are more of them than cores (a step of
        # SmolLM2-135M took 85 ms instead of 45).
        self.history = torch.from_numpy(np.zeros((num_slots + 1, max_len + 1 if max_len else 0), np.int32)).to(
            self._device
        )
        zeros = torch.from_numpy(np.zeros((num_slots + 1) * max(1, hidden_size) * dtype.itemsize, np.uint8))
        self.hidden = zeros.view(dtype).view(num_slots + 1, -1)[:, :hidden_size].to(self._device)
        self._output_counts: Tensor | None = None
        self._in_prompt: Tensor | None = None

    @property
    def keeps_history(self) -> bool:
        """Whether tokens are drafted."""
        return self.history.shape[1] > 0

    def begin(self, begins: Sequence[tuple[int, RowStart]]) -> None:
        """Hand rows to new owners, or to the same ones again after they were preempted: nothing of before is kept (H16,
        H18).

        Runs before each row's first chunk of an epoch, for all rows of a step at once: a hundred requests that come
        together would be hundreds of launches. Ids outside the vocabulary are ignored.
        """
        for row, start in begins:
            spec = start.sampling
            bias = {token: value for token, value in spec.logit_bias.items() if 0 <= token < self.vocab_size}
            banned = [token for token in spec.forbidden_until_min if spec.min_tokens and 0 <= token < self.vocab_size]
            self._rows[row] = RowSampling(
                spec, np.array([*bias], np.int64), np.array([*bias.values()], np.float32), np.array(banned, np.int64)
            )
        counts = [len(start.prompt) + len(start.outputs) for _, start in begins]
        lasts = [(0, *start.prompt[-1:], *start.outputs[-1:])[-1] for _, start in begins]
        # From where a row's tokens are among all of them to where they belong.
        shifts = [
            row * self.history.shape[1] - before
            for (row, _), before in zip(begins, accumulate(counts, initial=0), strict=False)
        ]
        numbers = torch.tensor([[row for row, _ in begins], lasts, shifts, counts])
        rules = torch.tensor([sampling_row(start.sampling, prompt_len=len(start.prompt)) for _, start in begins]).view(
            -1, len(COLUMNS)
        )
        (where, last, shift, count), rules = self._uploads.together([numbers, rules])
        self.keep(where, last)  # not assigned: a GPU would be waited for (P1)
        self.rules.numbers[where] = rules
        if self.keeps_history and (total := sum(counts)):
            known = np.fromiter(
                chain.from_iterable(chain(start.prompt, start.outputs) for _, start in begins), np.int32, total
            )
            places = torch.arange(total, device=self._device) + torch.repeat_interleave(shift, count, output_size=total)
            self.history.view(-1)[places] = self._uploads.together([torch.from_numpy(known)])[0]
        for row, start in begins:
            if start.sampling.penalised:
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
        self.tables = torch.zeros(self.num_slots + 1, width, dtype=torch.int32).to(self._device)

    def place(self, places: Tensor, blocks: Tensor) -> None:
        """Write block ids at flat places of `tables`, both int64 `[n]`; none at -1."""
        if devices.has_kernels(places):
            from sidestream.runner import launch  # Triton, which a CPU does not need

            launch.place(places, blocks, self.tables)
            return
        real = places >= 0
        self.tables.view(-1)[places[real]] = blocks[real].to(torch.int32)

    def place_numbers(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """The same by numbers of the host."""
        self.place(*self._uploads.together([torch.tensor(places), torch.tensor(blocks)]))

    def commit(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Make `tokens`, int64 `[len(rows)]`, the rows' last tokens and count them. Each row at most once."""
        where = self.index(rows)
        self.keep(where, tokens)
        if self.any_penalised(rows):
            self.count(where, tokens[:, None], torch.ones_like(tokens))

    def any_penalised(self, rows: Iterable[int]) -> bool:
        """Whether a draw of one of them depends on the tokens before it."""
        return any(self.row(row).spec.penalised for row in rows)

    def keep(self, where: Tensor, tokens: Tensor) -> None:
        """Make `tokens`, int64 `[R]`, the last ones of rows, int64 `[R]`. Each row at most once."""
        self.last[where] = tokens

    def advance(self, where: Tensor, starts: Tensor, drawn: Tensor, counts: Tensor) -> None:
        """Rows, int64 `[R]`, whose last token was at position `starts`, int64 `[R]`, go on by the first `counts`, int64
        `[R]`, of `drawn`, int64 `[R, n]`.

        Each row at most once, but for `nobody`. The only writer of what the next step takes from here (H19).
        """
        place = torch.arange(drawn.shape[1], device=self._device)
        taken = place < counts[:, None]
        self.keep(where, drawn.gather(1, counts[:, None] - 1).squeeze(1))
        self.lengths[where] = starts + counts
        thrown_away = self.history.shape[1] - 1
        positions = torch.where(taken, starts[:, None] + 1 + place, thrown_away).clamp(max=thrown_away)
        self.history[where[:, None], positions] = drawn.to(torch.int32)

    def count(self, where: Tensor, drawn: Tensor, counts: Tensor) -> None:
        """Count the first `counts`, int64 `[R]`, of `drawn`, int64 `[R, n]`, as output of those of the rows, int64
        `[R]`, whose draws depend on it.
        """
        output_counts, _ = self.seen_tables()
        taken = (torch.arange(drawn.shape[1], device=self._device) < counts[:, None]) & self.rules.penalised[where][
            :, None
        ]
        output_counts.index_put_((where[:, None], drawn), taken.to(output_counts.dtype), accumulate=True)

    def leave(self, where: Tensor, hidden: Tensor) -> None:
        """Keep copies of hidden states, `[R, hidden_size]`, at the last positions of rows, int64 `[R]`; each row at
        most once, but for `nobody` (H19).
        """
        self.hidden[where] = hidden

    def seen(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Of penalised rows, int64 `[R]`: output counts int32 and presence in the prompt bool, both `[R, vocab_size]`,
        copies.
        """
        counts, in_prompt = self.seen_tables()
        return counts[where], in_prompt[where]

    def seen_tables(self) -> tuple[Tensor, Tensor]:
        """Output counts int32 and presence in the prompt bool, both `[num_slots + 1, vocab_size]`, by row; those of
        other than penalised rows mean nothing.
        """
        if self._output_counts is None or self._in_prompt is None:
            shape = (self.num_slots + 1, self.vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._output_counts, self._in_prompt

    def index(self, values: Sequence[int] | npt.NDArray[np.int64]) -> Tensor:
        """Host numbers as int64 on the device of this state."""
        return self.numbers(values)

    def numbers(self, values: Sequence[float] | npt.NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        """Host numbers on the device of this state."""
        return self._uploads.numbers(values, dtype)

    def _ids(self, tokens: Iterable[int]) -> Tensor:
        return self.index([token for token in tokens if 0 <= token < self.vocab_size])

    def _fill_tables(self, row: int, start: RowStart) -> None:
        counts, in_prompt = self.seen_tables()
        outputs = self._ids(start.outputs)
        counts[row].zero_()
        counts[row].index_add_(0, outputs, torch.ones_like(outputs, dtype=counts.dtype))
        in_prompt[row].zero_()
        in_prompt[row].index_fill_(0, self._ids(start.prompt), True)
