"""Recurrent states of a packed batch: the state that each row reads, and the state that each row writes.

A row is one request's part of the batch. A state is a sequence's memory in the recurrent layers; it covers a token if
the token's input has been applied to it. A checkpoint is a saved state at the end of a block; later requests with the
same prefix start from it. A row may read a checkpoint that other rows also read, but it writes only to states of its
own. This module knows nothing of requests or streams. Only the thread that runs the forward pass calls it, on the
stream of that pass.

A written state never covers draft tokens, because the model may reject them. It covers all of the row's tokens before
the drafts. The layers' inputs for the drafts are kept separately. The row's next step replays the kept inputs of the
accepted drafts, and then applies the inputs of its own tokens:

    step            n                         n + 1, after a and b were accepted and d was sampled
    row             token t, drafts a b c     token d, drafts e f g
    state read      covers all before t       covers t
    replayed                                  a b
    state written   covers t                  covers d
    inputs kept     a b c                     e f g
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sidestream_kv.device.kinds import on_host
from sidestream_kv.kv.state_layout import RESERVED_STATES, StateLayout, StateTensor

Part = tuple[str, int]
"""Kind and index of a tensor of a state in one layer, see `StateTensor`."""
States = dict[Part, torch.Tensor]
"""The states of some rows in one layer: each tensor is `[rows, *shape]`."""
Advance = Callable[[torch.Tensor, States], torch.Tensor]
"""Computes a layer's outputs from its inputs, both `[rows, tokens, input_size]`, and updates the states in place."""


Kernels = Callable[[torch.Tensor, "StateBatch"], torch.Tensor]
"""Computes a layer's outputs from the packed inputs of a whole batch, both `[T, input_size]`. Reads and writes the
rows' states in the pool. The host reads no results, so the launch may be captured in a CUDA graph.
"""


# Recorded for a state that is computed from a wrong one: no later row, with any number of kept inputs, may begin there.
_INVALID = -(1 << 40)


class DraftInputs:
    """Each layer's inputs for the last step's drafts, by request slot (a request's index in the device state). The next
    step replays the inputs of the accepted drafts.

    max_drafts   largest number of drafts in one row
    first        int64 [slots]: position of the first draft of each slot
    count        int64 [slots]: number of drafts of each slot
    """

    def __init__(self, layout: StateLayout, num_slots: int, max_drafts: int, device: torch.device) -> None:
        shape = (num_slots, max_drafts, layout.input_size)
        dtype = getattr(torch, layout.input_dtype)
        self.max_drafts = max_drafts
        self._inputs = {layer: torch.empty(shape, dtype=dtype, device=device) for layer in layout.layers}
        # Blocking copies from the host. A fill on the device would run asynchronously on the current stream, and the
        # streams that use these tensors do not wait for that stream.
        self.first, self.count = (torch.zeros(num_slots, dtype=torch.int64).to(device) for _ in range(2))

    def of(self, layer: int) -> torch.Tensor:
        """The inputs of one layer, `[slots, max_drafts, input_size]`."""
        return self._inputs[layer]


class StatePool:
    """Views of the states in one span of memory, by layer.

    The last two states belong to no sequence: rows at position 0 read `zero`, which is all zeros, and padding writes
    `scratch`.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        layout: StateLayout,
        *,
        block_tokens: int,
        state_bytes: int | None = None,
        drafts: DraftInputs | None = None,
    ) -> None:
        """memory        uint8; divided into as many whole states as fit
        block_tokens  tokens in a block; the number of tokens that a checkpoint covers is a multiple of it
        state_bytes   bytes from the start of one state to the start of the next; None: there are no gaps
        drafts        kept inputs of drafts; None: rows have no drafts
        """
        self.layout = layout
        self.device = memory.device
        self.drafts = drafts
        self._block_tokens = block_tokens
        self._state_bytes = state_bytes or layout.state_bytes
        self.num_states = len(memory) // self._state_bytes
        self.zero, self.scratch = self.num_states - RESERVED_STATES, self.num_states - 1
        self._layers: dict[int, dict[Part, torch.Tensor]] = {}
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
            view = self._view(memory[: self.num_states * self._state_bytes], tensor, offset)
            self._layers.setdefault(tensor.layer, {})[tensor.kind, tensor.index] = view
        whole = memory[: self.num_states * self._state_bytes].view(self.num_states, -1)
        self.covered = whole[:, layout.covered_offset : layout.covered_offset + 8].view(torch.int64)[:, 0]
        """int64 [states]: number of tokens that each state covers, written by the step that made it."""
        whole[self.zero].zero_()

    def layer(self, layer: int) -> Mapping[Part, torch.Tensor]:
        """The tensors of all states in one layer: each tensor is `[states, *shape]`."""
        return self._layers[layer]

    def batch(
        self,
        reads: torch.Tensor,
        writes: torch.Tensor,
        checkpoints: torch.Tensor,
        *,
        slots: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        kv_lens: torch.Tensor,
        num_decode: int,
        decode_queries: int,
        chunks: Sequence[tuple[int, int]],
    ) -> StateBatch:
        """The states of a step with B rows.

        reads, writes    int64 [B]: ids of the states that each row reads and writes. Negative in `reads`: the row
                         starts a sequence; negative in `writes`: the row is padding
        checkpoints      int64 [B]: id of an additional state that a decode row writes if it reaches the end of a block;
                         negative: none
        slots            int64 [B]: request slots
        cu_seqlens_q     int64 [B + 1]: start of each row in the packed tokens, and the end of the last row
        kv_lens          int64 [B]: number of tokens of each row's sequence, including this step's tokens
        decode_queries   largest number of tokens in a decode row
        chunks           start and end of each row after the decode rows, in the packed tokens. May be empty if all
                         layers have `Kernels`, because then the host need not know these numbers

        The state that a row reads, together with the kept inputs of drafts, must cover exactly the tokens before the
        row. Otherwise, `StateBatch.finish` sets the row's logits to NaN; other rows are not affected. Then the row's
        request ends with an error, or is computed again if the load of its state failed.
        """
        reads = torch.where(reads < 0, self.zero, reads)
        writes = torch.where(writes < 0, self.scratch, writes)
        lengths = cu_seqlens_q.diff()
        starts, covered = kv_lens - lengths, self.covered[reads]
        behind, kept = starts - covered, torch.zeros_like(starts)
        if self.drafts is not None:
            first, count = self.drafts.first[slots], self.drafts.count[slots]
            kept[:num_decode] = torch.where(first == covered, count, 0)[:num_decode]
        wrong = (behind < 0) | (behind > kept)  # rule: state-covers-what-is-before-its-row
        covers = kv_lens.clone()
        covers[:num_decode] = starts[:num_decode] + 1  # rule: state-covers-no-draft
        border = covers // self._block_tokens * self._block_tokens
        # rule: checkpoint-is-written-if-its-border-is-reached
        checkpoints = torch.where((checkpoints >= 0) & (border > covered), checkpoints, self.scratch)
        tokens_to_border = border - covered
        # rule: state-after-a-wrong-one-is-wrong
        covers, border = covers.masked_fill(wrong, _INVALID), border.masked_fill(wrong, _INVALID)
        number = torch.arange(decode_queries, device=self.device)[:, None]
        own, packed = number < lengths[:num_decode], cu_seqlens_q[:num_decode] + number
        return StateBatch(
            pool=self,
            reads=reads,
            writes=writes,
            checkpoints=checkpoints,
            slots=slots,
            num_decode=num_decode,
            chunks=chunks,
            cu_seqlens_q=cu_seqlens_q,
            sources=torch.where(own, packed, 0),
            places=torch.where(own, packed + 1, 0),
            lengths=lengths,
            behind=behind.masked_fill(wrong, 0),  # with a wrong count, replay would read inputs that were never written
            covers=covers,
            border=border,
            tokens_to_border=tokens_to_border,
            wrong=wrong,
        )

    def _view(self, memory: torch.Tensor, tensor: StateTensor, offset: int) -> torch.Tensor:
        typed = memory.view(getattr(torch, tensor.dtype))
        size, strides = typed.element_size(), [1]
        for length in reversed(tensor.shape[1:]):
            strides.insert(0, strides[0] * length)
        step = self._state_bytes // size
        place = typed.storage_offset() + offset // size
        return typed.as_strided((self.num_states, *tensor.shape), (step, *strides), place)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StateBatch:
    """The states of one step's B rows. The first D rows are decode rows, with up to Q tokens each. All tensors are
    int64 [B] unless another shape is given.

    reads, writes      the state that each row reads, and the state that it writes
    checkpoints        the state that is written when the row reaches `border`; `StatePool.scratch`: none
    slots              request slots
    num_decode         D
    chunks             start and end of each row after the decode rows, in the packed tokens; empty if the host does not
                       know them
    cu_seqlens_q       [B + 1]: start of each row in the packed tokens
    sources            [Q, D]: packed positions of the tokens of decode rows; 0 for tokens that a row does not have
    places             [Q, D]: `sources` + 1, the index of each token in a buffer of outputs. Index 0 of this buffer
                       takes the outputs of tokens that a row does not have
    lengths            number of tokens of each row in this step
    behind             number of tokens to replay: accepted drafts of the last step. The state that the row reads does
                       not cover these drafts
    covers             number of tokens that the row's new state covers; `_INVALID` if it is computed from a wrong one
    border             `covers`, rounded down to the end of a block
    tokens_to_border   `border` minus the number of tokens that the read state covers; of no meaning for a wrong state
    wrong              bool: the state that the row reads, plus the replay, does not cover all tokens before the row
    """

    pool: StatePool
    reads: torch.Tensor
    writes: torch.Tensor
    checkpoints: torch.Tensor
    slots: torch.Tensor
    num_decode: int
    chunks: Sequence[tuple[int, int]]
    cu_seqlens_q: torch.Tensor
    sources: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor
    behind: torch.Tensor
    covers: torch.Tensor
    border: torch.Tensor
    tokens_to_border: torch.Tensor
    wrong: torch.Tensor

    def compute(
        self, layer: int, inputs: torch.Tensor, advance: Advance, *, kernels: Kernels | None = None
    ) -> torch.Tensor:
        """Compute a layer's outputs, `[T, input_size]`, for the packed inputs of the batch. Reads and writes the states
        of the rows. Padding may follow the inputs; the outputs of padding have no meaning.

        kernels   function that computes all rows. None: `advance` computes them, and `chunks` must not be empty if
                  there are rows after the decode rows
        """
        if kernels is not None:
            outputs = kernels(inputs, self)
            self._keep_inputs(layer, inputs)
            return outputs
        outputs = inputs.new_zeros(1 + len(inputs), inputs.shape[1])  # row 0: outputs for absent tokens of short rows
        if self.num_decode:
            # rule: kept-inputs-are-read-before-others-are-kept
            self._decode(layer, inputs, outputs, advance)
        self._keep_inputs(layer, inputs)
        tensors = self.pool.layer(layer)
        for row, (start, stop) in enumerate(self.chunks, self.num_decode):
            states = _gather(tensors, self.reads[row : row + 1])
            outputs[1 + start : 1 + stop] = advance(inputs[None, start:stop], states)[0]
            _scatter(tensors, self.writes[row : row + 1], states)
        return outputs[1:]

    def kept_inputs(self, layer: int) -> torch.Tensor:
        """The kept inputs of the decode rows' drafts, `[D * max_drafts, input_size]`; empty without drafts."""
        if self.pool.drafts is None or not self.num_decode:
            size = self.pool.layout.input_size
            return torch.empty(0, size, dtype=getattr(torch, self.pool.layout.input_dtype), device=self.pool.device)
        return self.pool.drafts.of(layer).index_select(0, self.slots[: self.num_decode]).flatten(0, 1)

    def finish(self, logits: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """After the last layer, record the number of tokens that each written state covers. Returns the logits `[N,
        vocab_size]`, with NaN for rows with a wrong state. `logits_indices` int64 [N]: packed position of each row of
        the logits.
        """
        pool = self.pool
        pool.covered.index_copy_(0, self.checkpoints, self.border)
        pool.covered.index_copy_(0, self.writes, self.covers)
        # rule: kept-inputs-know-their-tokens
        if pool.drafts is not None:
            counts = self.lengths - 1
            counts[self.num_decode :] = 0
            pool.drafts.first.index_copy_(0, self.slots, self.covers)
            pool.drafts.count.index_copy_(0, self.slots, counts)
        if on_host(pool.device) and not self.wrong.any():
            return logits  # without a copy
        rows = torch.searchsorted(self.cu_seqlens_q, logits_indices, right=True) - 1
        rows = rows.clamp(max=len(self.wrong) - 1)  # positions of padding are after the last row
        return logits.masked_fill(self.wrong[rows].unsqueeze(1), float("nan"))

    def _decode(self, layer: int, inputs: torch.Tensor, outputs: torch.Tensor, advance: Advance) -> None:
        rows, tensors, drafts = slice(0, self.num_decode), self.pool.layer(layer), self.pool.drafts
        behind, states = self.behind[rows], _gather(tensors, self.reads[rows])

        def checkpoint(advanced: torch.Tensor | int) -> None:
            """Write the checkpoints of the rows whose state reaches `border` after `advanced` tokens."""
            reached = self.tokens_to_border[rows] == advanced  # rule: checkpoint-is-written-at-its-border
            _scatter(tensors, torch.where(reached, self.checkpoints[rows], self.pool.scratch), states)

        if drafts is not None:
            kept = self.kept_inputs(layer).view(self.num_decode, drafts.max_drafts, -1)
            for number in range(int(behind.max()) if on_host(kept.device) else drafts.max_drafts):
                before = {part: state.clone() for part, state in states.items()}
                advance(kept[:, number : number + 1], states)
                replayed = number < behind  # rule: replay-ends-at-the-last-accepted-draft
                for part, state in states.items():
                    state.copy_(torch.where(replayed.view(-1, *[1] * (state.dim() - 1)), state, before[part]))
                checkpoint(number + 1)
        for number, (sources, places) in enumerate(zip(self.sources, self.places, strict=True)):
            new = inputs.index_select(0, sources)[:, None]
            outputs.index_copy_(0, places, advance(new, states)[:, 0])
            # rule: state-is-written-before-its-drafts
            if number == 0:
                _scatter(tensors, self.writes[rows], states)
            if number == 0 and drafts is not None:
                checkpoint(behind + 1)

    def _keep_inputs(self, layer: int, inputs: torch.Tensor) -> None:
        """Keep the inputs of this step's drafts. Call this after the replay, because it overwrites the inputs of the
        last step's drafts.
        """
        if self.pool.drafts is None or not self.num_decode:
            return
        for number, sources in enumerate(self.sources[1:]):
            # rule: inputs-of-drafts-are-kept
            self.pool.drafts.of(layer)[:, number].index_copy_(
                0, self.slots[: self.num_decode], inputs.index_select(0, sources)
            )


def _gather(tensors: Mapping[Part, torch.Tensor], ids: torch.Tensor) -> States:
    return {part: tensor.index_select(0, ids) for part, tensor in tensors.items()}


def _scatter(tensors: Mapping[Part, torch.Tensor], ids: torch.Tensor, states: States) -> None:
    for part, tensor in tensors.items():
        tensor.index_copy_(0, ids, states[part])
