"""Toy models for tests. The next token is a hash of every KV byte that the model attends to, so one stale byte changes
the text.

As in a transformer, a token reads the KV of layer N up to its position, and its KV of layer N + 1 depends on that. So a
read that is too early leads to wrong KV, even in a prefill chunk that samples no token. There are no weights and no
rounding: an output is bit-equal to the reference, or it is wrong.

    ToyModel            a model with keys and values only
    RecurrentToyModel   also writes a recurrent state into each KV block when the block is full
    StatefulToyModel    also keeps one recurrent state per sequence, outside the KV pool
    ToyDraftHead        drafts next tokens; the number of correct drafts is known in advance
    ToyProposer         makes a ToyDraftHead the draft proposer of an engine
    ToyItself           a proposer that drafts with the model itself, on any device
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sidestream.attention.grouped import GroupedBatch
from sidestream.attention.interface import AttentionBatch
from sidestream.attention.paged import PagedBatch
from sidestream.attention.states import StateBatch, States
from sidestream.attention.triton import DeviceBatch
from sidestream.errors import InvariantError
from sidestream.runner.forward import Left
from sidestream.speculate import Context, StepTokens
from sidestream_kv.kv.layout import KVLayout, window_start
from sidestream_kv.kv.state_layout import StateLayout, StateTensor

_Hashes = npt.NDArray[np.int64]
_PRIME = (1 << 31) - 1
_WRONG_DRAFTS = 4
# Hash weights: `_WEIGHTS` for each position and each of the 4 numbers of its KV; `_PARTS` for each of the 4 numbers.
_WEIGHTS = np.arange(1, 4 * 4096 + 1, dtype=np.int64).reshape(-1, 4) * 48271 % _PRIME
_PARTS = np.arange(4) * 611953
STATE_WIDTH = 40
"""Size of a `StatefulToyModel`'s state in numbers. Only the last number is used."""


def _blocks_of(batch: AttentionBatch) -> PagedBatch:
    """The blocks of layers without a window, which hold a draft head's KV."""
    found = batch.blocks if isinstance(batch, GroupedBatch) else batch
    assert isinstance(found, PagedBatch)
    return found


def paged_layer(batch: AttentionBatch, layer: int) -> tuple[PagedBatch, int]:
    """The batch that holds a layer of the model, and the layer's index there. On the host only."""
    found, index = batch.of_layer(layer) if isinstance(batch, GroupedBatch) else (batch, layer)
    if not isinstance(found, PagedBatch):
        raise InvariantError(f"a toy model reads the pool itself, and cannot read it from a {type(found).__name__}")
    return found, index


class ToyModel:
    """A model whose KV is computed from token, position, layer and the KV of earlier layers, and whose next token is
    computed from the KV that it reads in the pool. The layers `windowed` have a sliding window, if there is one.

    The logits are zero except for one token, so greedy and random sampling give the same token. `eos_every`: about one
    in `eos_every` tokens is the end of sequence, id 0; 0: none. `leaves_hidden` adds two layers to the pool: for a
    `ToyProposer`'s own KV, and for hidden states. `window`: tokens of the sliding windows, or an `AttentionChunk`;
    0: there are none.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        num_layers: int = 3,
        vocab_size: int = 97,
        max_model_len: int = 512,
        eos_every: int = 0,
        leaves_hidden: bool = False,
        window: int = 0,
        windowed: Sequence[int] = (0, 2),
    ) -> None:
        if max_model_len > len(_WEIGHTS):
            raise InvariantError(
                f"max_model_len is {max_model_len}: a toy model has weights for {len(_WEIGHTS)} tokens"
            )
        windows = tuple(window if layer in windowed else 0 for layer in range(num_layers)) if window else ()
        self.layout = KVLayout(num_layers + 2 * leaves_hidden, 1, 2, block_tokens, "float32", windows)
        self.state_layout: StateLayout | None = None
        self.adapters = None
        self.needs_chunk_lengths = False
        self.padding_token: int | None = None
        self.hidden_size = 4 * block_tokens
        self._num_layers = num_layers
        self._hidden_after: dict[tuple[int, ...], int] = {}
        self.vocab_size = vocab_size
        self.num_heads = 1
        self.max_model_len = max_model_len
        self.eos_token_ids = (0,)
        self.fingerprint = (
            f"toy-{num_layers}-{vocab_size}-{eos_every}-{'x'.join(map(str, windows))}" + "-hidden" * leaves_hidden
        )
        self._eos_every = eos_every

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        logit_rows: torch.Tensor,
        *,
        states: StateBatch | None = None,
        left: Left | None = None,
    ) -> torch.Tensor:
        """See `ForwardModel.forward`; `states` and `left` on the host only. The hidden state of a token is one number
        that depends on all KV up to the token. The number is repeated `hidden_size` times, which fills one layer of a
        block.
        """
        self._advance_states(tokens, states)
        if isinstance(batch, DeviceBatch):
            return self._forward_on_device(tokens, positions, batch, logit_rows)
        mixed = self._run_layers(tokens, positions, batch)
        if left is not None:
            numbers = [[float(self.hidden(self._seen_at(batch, index, mixed)))] for index in range(len(tokens))]
            left(torch.tensor(numbers).expand(-1, self.hidden_size))
        return self._logits(batch, logit_rows, mixed)

    def hidden(self, seen: npt.NDArray[np.int64]) -> int:
        """The hidden state of a token that attended to the KV hashed in `seen`. Exact in float32, never 0."""
        return 1 + self._hash(seen) % (1 << 20)

    def hidden_after(self, tokens: Sequence[int]) -> int:
        """The hidden state after `tokens`, computed without a KV pool; 0 if `tokens` is empty."""
        given = tuple(tokens)
        if given not in self._hidden_after:
            self._hidden_after[given] = self.hidden(self._reference(np.array(given))) if given else 0
        return self._hidden_after[given]

    def _run_layers(self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> _Hashes:
        """Write and read every layer. Returns int64 `[T]`: for each token, a hash of all KV that it attends to."""
        ids, size = tokens.numpy(), self.layout.block_tokens
        mixed = np.zeros(len(ids), dtype=np.int64)
        for layer in range(self._num_attended):
            paged, index = paged_layer(batch, layer)
            slots, ends, pool = paged.slot_mapping.numpy(), np.array(paged.cu_seqlens_q), paged.kv.numpy()
            rows = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            # Index of each token among the KV of its row. Not the position: drafts beyond a row's blocks have higher
            # positions.
            at = (np.array(paged.kv_lens) - ends[1:])[rows] + np.arange(len(ids))
            tables = paged.block_tables[:, : self.layout.num_blocks_for(max(paged.kv_lens, default=0))].numpy()
            paged.before_layer(index)
            written = _written(ids, positions.numpy(), layer, mixed).reshape(-1, 2, 2)
            pool[slots // size, index, :, slots % size, 0, :] = written
            there = pool[tables, index, :, :, 0].swapaxes(2, 3).reshape(len(tables), tables.shape[1] * size, 4)
            mixed = _mixed(mixed, _seen(_sums(there), rows, at, self.layout.window_of(layer)))
        self._after_layers(batch)
        return mixed

    def _logits(self, batch: AttentionBatch, logit_rows: torch.Tensor, mixed: npt.NDArray[np.int64]) -> torch.Tensor:
        logits = torch.zeros(len(logit_rows), self.vocab_size)
        for at, index in enumerate(logit_rows.tolist()):
            logits[at, self.next_token(self._seen_at(batch, index, mixed))] = 100.0
        return logits

    def _seen_at(self, batch: AttentionBatch, index: int, mixed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers that determine the next token after the batch's token `index`."""
        return mixed[index : index + 1]

    def _forward_on_device(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: DeviceBatch, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """The same results as `forward`, bit by bit, computed without host synchronisation, so that a CUDA graph can
        capture it.
        """
        pool, size, layers = batch.kv, self.layout.block_tokens, self._num_attended
        if not isinstance(pool, torch.Tensor) or layers != self.layout.num_layers:
            raise InvariantError("on a GPU, a toy model needs a single KV pool, and cannot have a recurrent state")
        # Padding rows repeat the write of the first real token, to that token's slot. If there is no real token, they
        # write back the bytes that are already there.
        real = batch.slot_mapping >= 0
        first = real.to(torch.int64).argmax(keepdim=True)
        slots = torch.where(real, batch.slot_mapping, batch.slot_mapping[first].clamp(min=0))
        blocks, offsets = slots // size, slots % size
        tables = batch.block_tables.clamp(min=0).to(torch.int64)
        part, packed = (torch.arange(count, device=tokens.device) for count in (4, len(tokens)))
        rows = (batch.cu_seqlens_q[1:][None, :] <= packed[:, None]).sum(1).clamp(max=len(tables) - 1)
        at = (batch.kv_lens[rows] - batch.cu_seqlens_q[1:][rows] + packed).clamp(min=0, max=tables.shape[1] * size - 1)
        weights = torch.arange(1, 4 * tables.shape[1] * size + 1, device=tokens.device).view(-1, 4) * 48271 % _PRIME
        mixed = torch.zeros_like(tokens)
        for layer in range(layers):
            batch.before_layer(layer)
            base = tokens * 7919 + positions * 104729 + layer * 1299709 + mixed
            written = ((base[:, None] + part * 611953) % (1 << 20)).to(torch.float32).view(-1, 2, 2)
            there = pool[blocks, layer, :, offsets, 0]
            written = torch.where(real[:, None, None], written, torch.where(real.any(), written[first], there))
            pool[blocks, layer, :, offsets, 0] = written
            seen = pool[tables, layer, :, :, 0].transpose(2, 3).reshape(len(tables), -1, 4).view(torch.int32)
            sums = (seen.to(torch.int64) * weights % _PRIME).sum(2).cumsum(1)
            seen_sums = sums[rows, at]
            if window := self.layout.window_of(layer):
                before = window_start(at, window) - 1
                seen_sums = seen_sums - torch.where(before >= 0, sums[rows, before.clamp(min=0)], 0)
            mixed = (mixed * 69621 + seen_sums) % _PRIME
        mixed = mixed[logit_rows] * 48271 % _PRIME * 69621 % _PRIME
        drawn = 1 + mixed // 7 % (self.vocab_size - 1)
        if self._eos_every:
            drawn = torch.where(mixed % self._eos_every == 0, 0, drawn)
        return torch.zeros(len(logit_rows), self.vocab_size, device=tokens.device).scatter_(1, drawn[:, None], 100.0)

    def next_token(self, seen: npt.NDArray[np.int64]) -> int:
        """The next token, given the KV hashed to the numbers `seen`, int64 `[N]`."""
        mixed = self._hash(seen)
        if self._eos_every and mixed % self._eos_every == 0:
            return 0
        return 1 + mixed // 7 % (self.vocab_size - 1)

    def _hash(self, seen: npt.NDArray[np.int64]) -> int:
        weights = (np.arange(1, seen.size + 1, dtype=np.int64) * 48271 % _PRIME).reshape(seen.shape)
        return int((seen * weights % _PRIME).sum() % _PRIME) * 69621 % _PRIME

    def expected(self, prompt: Sequence[int], num_outputs: int) -> list[int]:
        """The reference output of the model after `prompt`, computed without a KV pool."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_outputs:
            tokens.append(self.next_token(self._reference(np.array(tokens))))
            if tokens[-1] == 0 and self._eos_every:
                break
        return tokens[len(prompt) :]

    @property
    def _num_attended(self) -> int:
        """Layers that hold keys and values of tokens."""
        return self._num_layers

    def _after_layers(self, batch: AttentionBatch) -> None:
        """Hook for subclasses: more writes, after all keys and values are written."""

    def _advance_states(self, tokens: torch.Tensor, states: StateBatch | None) -> None:
        """Hook for subclasses: read and write the recurrent states, before the first layer."""

    def _reference(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers that `_seen_at` gives for the last token, computed from the tokens without a KV pool."""
        return self._computed(tokens)[1][-1:]

    def _computed(self, tokens: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Keys and values, float32 `[layers, 2, T, 2]`, and the result of `_run_layers`, computed without a KV pool."""
        positions, layers = np.arange(len(tokens)), []
        mixed = np.zeros(len(tokens), dtype=np.int64)
        for layer in range(self._num_attended):
            layers.append(_written(tokens, positions, layer, mixed))
            mixed = _mixed(mixed, _seen(_sums(layers[-1])[None], 0, positions, self.layout.window_of(layer)))
        return np.stack(layers).reshape(len(layers), -1, 2, 2).swapaxes(1, 2), mixed


class RecurrentToyModel(ToyModel):
    """A toy model with a recurrent state in its KV pool: an extra layer, written once per block, together with the
    block's last token.

    The state of a block is a hash of the previous state and of the block's keys and values; the next token depends on
    the states of all complete blocks. A block without its state must not count as a cache hit: its use would change the
    text (hazard H15).
    """

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        num_layers: int = 3,
        vocab_size: int = 97,
        max_model_len: int = 512,
        eos_every: int = 0,
        leaves_hidden: bool = False,
    ) -> None:
        """`num_layers` does not include the layer for the state."""
        super().__init__(
            block_tokens=block_tokens,
            num_layers=num_layers + 1,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_every=eos_every,
            leaves_hidden=leaves_hidden,
        )
        self.fingerprint = f"toy-recurrent-{num_layers}-{vocab_size}-{eos_every}" + "-hidden" * leaves_hidden

    @property
    def _num_attended(self) -> int:
        return self._num_layers - 1

    def _after_layers(self, batch: AttentionBatch) -> None:
        assert isinstance(batch, PagedBatch)
        batch.before_layer(self._num_attended)
        size = self.layout.block_tokens
        for row, (start, stop) in enumerate(itertools.pairwise(batch.cu_seqlens_q)):
            table, length = batch.block_tables[row].tolist(), batch.kv_lens[row]
            for index in range((length - (stop - start)) // size, length // size):
                before = _bits(self._states(batch.kv, table[index - 1 : index])) if index else None
                block = batch.kv[table[index], : self._num_attended, :, :, 0].numpy()
                batch.kv[table[index], self._num_attended, :, :, 0] = torch.from_numpy(_state(before, _bits(block)))

    def _seen_at(self, batch: AttentionBatch, index: int, mixed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        assert isinstance(batch, PagedBatch)
        row = bisect.bisect_right(batch.cu_seqlens_q, index) - 1
        length = batch.kv_lens[row] - (batch.cu_seqlens_q[row + 1] - 1 - index)
        complete = batch.block_tables[row][: length // self.layout.block_tokens].tolist()
        return np.append(super()._seen_at(batch, index, mixed), _bits(self._states(batch.kv, complete)))

    def _states(self, pool: torch.Tensor, blocks: Sequence[int]) -> npt.NDArray[np.float32]:
        return pool[list(blocks), self._num_attended, :, :, 0].numpy()

    def _reference(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        size = self.layout.block_tokens
        kv, mixed = self._computed(tokens)
        seen = _bits(kv)
        states: list[npt.NDArray[np.int64]] = []
        for start in range(0, len(tokens) - size + 1, size):
            states.append(_bits(_state(states[-1] if states else None, seen[:, :, start : start + size])))
        return np.concatenate([mixed[-1:], *(state.ravel() for state in states)])


class StatefulToyModel(ToyModel):
    """A toy model with KV and a recurrent state, like a hybrid model. The state is one number per sequence, and each
    token changes it. The next token depends on the KV and on the state.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        num_layers: int = 3,
        vocab_size: int = 97,
        max_model_len: int = 512,
        eos_every: int = 0,
        leaves_hidden: bool = False,
        window: int = 0,
    ) -> None:
        super().__init__(
            block_tokens=block_tokens,
            num_layers=num_layers,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_every=eos_every,
            leaves_hidden=leaves_hidden,
            window=window,
        )
        # Only the last number is used: it lies at the end, as the last layer of a KV block does.
        self.state_layout = StateLayout((StateTensor(0, "recurrent", 0, (STATE_WIDTH,), "float32"),), 1, "float32")
        self.fingerprint = f"toy-stateful-{num_layers}-{vocab_size}-{eos_every}-{window}" + "-hidden" * leaves_hidden
        self._after: list[int] = []  # the state after each packed token of the current forward

    def state_after(self, tokens: Sequence[int]) -> int:
        """The state after `tokens`, computed without any pool; exact in float32."""
        state = 0
        for token in tokens:
            state = _recurred(state, token)
        return state

    def _advance_states(self, tokens: torch.Tensor, states: StateBatch | None) -> None:
        if states is not None:
            self._after = states.compute(0, tokens[:, None].float(), _advance)[:, 0].long().tolist()

    def _seen_at(self, batch: AttentionBatch, index: int, mixed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.append(super()._seen_at(batch, index, mixed), self._after[index])

    def _reference(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.append(super()._reference(tokens), self.state_after(tokens.tolist()))


def _recurred(state: int, token: int) -> int:
    """The state after one more token."""
    return (state * 48271 + token * 7919 + 1) % (1 << 20)


def _advance(inputs: torch.Tensor, states: States) -> torch.Tensor:
    """The states after each token, exact in float32; NaN behind a token or a state that was never written. Of a row
    whose replay has ended, such tokens are read, and the states behind them are dropped.
    """
    state, outputs = states["recurrent", 0], torch.empty_like(inputs)
    for row, tokens in enumerate(inputs[:, :, 0].tolist()):
        number = float(state[row, -1])
        for index, token in enumerate(tokens):
            number = number + token if math.isnan(number + token) else float(_recurred(int(number), int(token)))
            outputs[row, index, 0] = number
        state[row, -1] = number
    return outputs


class Wrapped:
    """What a model around a toy model, `inner`, takes from it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.layout: KVLayout = inner.layout
        self.state_layout: StateLayout | None = inner.state_layout
        self.adapters = None
        self.needs_chunk_lengths: bool = inner.needs_chunk_lengths
        self.padding_token: int | None = inner.padding_token
        self.vocab_size: int = inner.vocab_size
        self.num_heads: int = inner.num_heads
        self.hidden_size: int = inner.hidden_size
        self.max_model_len: int = inner.max_model_len
        self.eos_token_ids: tuple[int, ...] = inner.eos_token_ids


@dataclass(frozen=True, slots=True)
class SpeculativeRun:
    """The result of a loop of draft and verification: the tokens, and the accept length of each round."""

    tokens: tuple[int, ...]
    accept_lengths: tuple[int, ...]


class ToyDraftHead:
    """Drafts `width` tokens from a hidden value on the device. All methods are pure functions, so the correct accept
    lengths are known.

    If the hidden value belongs to the context, `accepted` drafts are correct, between 0 and `width`. With a stale
    value, no draft is correct. The text stays correct, because the model verifies every draft, so only the accept
    lengths show the error (hazard H19).
    """

    def __init__(self, model: ToyModel, *, width: int = 3) -> None:
        self.model = model
        self.width = width

    def hidden(self, context: Sequence[int]) -> int:
        """The hidden value after `context`: from 1 to 2**31, different for nearly all contexts."""
        mixed = 1
        for token in context:
            mixed = (mixed * 48271 + token + 1) % _PRIME
        return mixed + 1

    def accepted(self, context: Sequence[int]) -> int:
        """Number of drafts that the model accepts after `context`."""
        return self.hidden(context) // 11 % (self.width + 1)

    def drafts(self, context: Sequence[int], hidden: int) -> tuple[int, ...]:
        """The drafts after `context`, made from the hidden value `hidden`."""
        right = self.accepted(context) if hidden == self.hidden(context) else 0
        truth = self.model.expected(context, self.width)
        truth += [0] * (self.width - len(truth))
        # Never equal to `token`, and small: the biased tokens of the torture test are small, too, and may be accepted.
        wrong = [1 + token % min(_WRONG_DRAFTS, self.model.vocab_size - 1) for token in truth]
        return tuple(truth[:right] + wrong[right:])

    def accept_length(self, context: Sequence[int], drafts: Sequence[int]) -> int:
        """Number of leading `drafts` that equal the model's next tokens."""
        pairs = zip(drafts, self.model.expected(context, len(drafts)), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def verify(self, context: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """The output of one verification: the accepted drafts and one more token of the model."""
        return self.model.expected(context, self.accept_length(context, drafts) + 1)

    def expected(self, prompt: Sequence[int], rounds: int) -> SpeculativeRun:
        """The reference of a speculative loop, in which every round uses the correct hidden value."""
        context, accept_lengths = list(prompt), []
        for _ in range(rounds):
            drafts = self.drafts(context, self.hidden(context))
            accept_lengths.append(self.accept_length(context, drafts))
            context += self.verify(context, drafts)
        return SpeculativeRun(tuple(context[len(prompt) :]), tuple(accept_lengths))


class HiddenSource(Protocol):
    """Computes the hidden states that a toy model must leave."""

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state, whose values are all equal."""
        ...

    def hidden_after(self, tokens: Sequence[int]) -> int: ...


class ToyProposer:
    """Drafts like a `ToyDraftHead`, from the state of each row on the device. If that state is stale, all drafts are
    wrong, which the accept lengths show.

    model   a model with hidden states. The row's last hidden state must match its tokens, and so must the hidden state
            before each token, which `follow` keeps as KV. None: hidden states are not checked
    """

    name = "toy"

    def __init__(self, head: ToyDraftHead, *, model: HiddenSource | None = None) -> None:
        self.head = head
        self._model = model
        self.hidden_size, self.num_layers = (0, 0) if model is None else (model.hidden_size, 1)

    def propose(self, context: Context, count: int) -> torch.Tensor:
        """See `Proposer.propose`; `count` is at most the head's width. Reads the state on the host, so the device must
        be the host or simulated.
        """
        drafts = []
        for row, (history, length) in enumerate(
            zip(context.history[context.rows].tolist(), context.lengths.tolist(), strict=True)
        ):
            tokens = history[:length]
            fresh = self._model is None or self._knows(context, row, tokens)
            drafts.append(self.head.drafts(tokens, self.head.hidden(tokens) if fresh else 0)[:count])
        if self._model is not None:
            # A real draft head writes KV at the positions of its drafts. Write wrong KV there, which `follow` must
            # overwrite.
            for step in range(count):
                self._keep(_blocks_of(context.attend(context.lengths - 1 + step)), torch.full((len(drafts), 1), -1.0))
        return torch.tensor(drafts, dtype=torch.int64)

    def _knows(self, context: Context, row: int, tokens: list[int]) -> bool:
        """Whether hidden state and KV match the row's tokens."""
        assert self._model is not None
        batch = _blocks_of(context.attend(context.lengths - 1))
        kept = batch.kv[batch.block_tables[row], -2].permute(0, 2, 1, 3, 4).reshape(-1, 4)[: len(tokens) - 1]
        expected = [float(self._model.hidden_after(tokens[:position])) for position in range(len(tokens))]
        return context.hidden[row].tolist() == expected[-1:] * self.hidden_size and kept.tolist() == [
            [value] * 4 for value in expected[:-1]
        ]

    def follow(self, step: StepTokens) -> None:
        """See `Proposer.follow`. Stores the hidden state before each token in the second to last layer of the pool."""
        assert step.before is not None
        batch = _blocks_of(step.batch)
        batch.before_layer(batch.kv.shape[1] - 2)
        self._keep(batch, step.before[:, :1])

    def _keep(self, batch: PagedBatch, values: torch.Tensor) -> None:
        layer, size = batch.kv.shape[1] - 2, batch.kv.shape[3]
        batch.kv[batch.slot_mapping // size, layer, :, batch.slot_mapping % size, 0] = values[:, :, None].expand(
            -1, 2, 2
        )


class ToyItself:
    """Drafts the model's own next tokens after each row's last token; at every position that is a multiple of
    `wrong_every`, it drafts a wrong token. Never synchronises with the host.

    It reads the same KV as the engine's steps. If the KV is stale or belongs to another request, its drafts are
    rejected. It also writes KV, which the verification overwrites.
    """

    name = "toy"
    hidden_size = num_layers = 0

    def __init__(self, model: ToyModel, *, wrong_every: int = 5) -> None:
        self._model = model
        self._wrong_every = wrong_every

    def propose(self, context: Context, count: int) -> torch.Tensor:
        positions = context.lengths - 1
        tokens = context.tokens
        every = torch.arange(len(tokens), device=tokens.device)
        drafts = []
        for _ in range(count):
            drawn = self._model.forward(tokens, positions, context.attend(positions), every).argmax(-1)
            wrong = 1 + drawn % (self._model.vocab_size - 1)
            tokens, positions = torch.where(positions % self._wrong_every == 0, wrong, drawn), positions + 1
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def follow(self, step: StepTokens) -> None:
        """Does nothing: this proposer has no state."""


def _written(
    tokens: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    layer: int,
    mixed: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    """Keys and values of each token, float32 `[T, 4]`: whole numbers below 2**20, exact in float32. `mixed`: see
    `_mixed`.
    """
    base = tokens * 7919 + positions * 104729 + (layer * 1299709) + mixed
    return ((base[:, None] + _PARTS) % (1 << 20)).astype(np.float32)


def _sums(kv: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """For each position, a weighted sum of the bits of `kv[..., T, 4]` up to the position; int64 `[..., T]`."""
    products = kv.view(np.int32) * _WEIGHTS[: kv.shape[-2]]
    products %= _PRIME
    sums: npt.NDArray[np.int64] = products.sum(-1).cumsum(-1)
    return sums


def _seen(
    sums: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | int, at: npt.NDArray[np.int64], window: int
) -> npt.NDArray[np.int64]:
    """Of `_sums` `[rows, T]`, the part that a token at position `at` of a row sees with a sliding window; 0: none."""
    seen: npt.NDArray[np.int64] = sums[rows, at]
    if window:
        before = window_start(at, window) - 1
        seen = seen - np.where(before >= 0, sums[rows, np.maximum(before, 0)], 0)
    return seen


def _mixed(mixed: npt.NDArray[np.int64], sums: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each token, a hash of the KV of all layers so far, below 2**31. `sums` is `_seen` of the last layer."""
    return (mixed * 69621 + sums) % _PRIME


def _state(before: npt.NDArray[np.int64] | None, block: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The state after a block, float32 `[2, T, 2]`: computed from the bits of the block's KV `[layers, 2, T, 2]` and
    from the previous state.
    """
    weights = (np.arange(1, block.size + 1, dtype=np.int64) * 16807 % _PRIME).reshape(block.shape)
    mixed: npt.NDArray[np.int64] = (block * weights % _PRIME).sum(axis=0)
    if before is not None:
        mixed = mixed + before.reshape(mixed.shape) * 69621 % _PRIME
    state: npt.NDArray[np.float32] = ((mixed + mixed.sum() % _PRIME) % (1 << 20)).astype(np.float32)
    return state


def _bits(kv: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The bits of each value as a number."""
    return np.ascontiguousarray(kv).view(np.int32).astype(np.int64)
