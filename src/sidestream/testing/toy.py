"""Models whose next token is a hash of every KV byte they must attend to: one stale byte changes the text.

No weights, no arithmetic that rounds: their outputs are equal or wrong. For tests and for the torture test.

    ToyModel            keys and values of every token
    RecurrentToyModel   and, inside each block, a state that the block's end leaves behind
    ToyDraftHead        guesses the next tokens of either, and is right a known number of times
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sidestream.attention.paged import AttentionBatch, PagedBatch
from sidestream.errors import InvariantError
from sidestream.kv.layout import KVLayout

_PRIME = (1 << 31) - 1


class ToyModel:
    """Writes numbers made of token, position and layer into the KV pool, and draws from the sum of what it reads there.

    The logits are zero but for one token, so greedy and sampled draws agree. `eos_every` makes about one token in so many
    the end of sequence, id 0.
    """

    def __init__(
        self, *, block_tokens: int = 4, num_layers: int = 3, vocab_size: int = 97, max_model_len: int = 512, eos_every: int = 0
    ) -> None:
        self.layout = KVLayout(num_layers, 1, 2, block_tokens, "float32")
        self.vocab_size = vocab_size
        self.num_heads = 1
        self.max_model_len = max_model_len
        self.eos_token_ids = (0,)
        self.fingerprint = f"toy-{num_layers}-{vocab_size}-{eos_every}"
        self._eos_every = eos_every

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, logit_rows: torch.Tensor) -> torch.Tensor:
        """See `ForwardModel.forward`. Only on a CPU."""
        if not isinstance(batch, PagedBatch):
            raise InvariantError("a toy model reads the pool by itself: run it on the cpu device")
        pool = batch.kv
        size = self.layout.block_tokens
        blocks, offsets = batch.slots // size, batch.slots % size
        for layer in range(self._num_attended):
            batch.before_layer(layer)
            written = _written(tokens.numpy(), positions.numpy(), layer)
            pool[blocks, layer, :, offsets, 0, :] = torch.from_numpy(written).view(len(tokens), 2, 2)
        self._after_layers(batch)
        last_row = {stop - 1: row for row, stop in enumerate(batch.query_starts[1:])}
        logits = torch.zeros(len(logit_rows), self.vocab_size)
        for at, packed in enumerate(logit_rows.tolist()):
            row = last_row[packed]
            logits[at, self.next_token(self._seen(pool, batch.block_tables[row], batch.kv_lens[row]))] = 100.0
        return logits

    def next_token(self, seen: npt.NDArray[np.int64]) -> int:
        """The token drawn after KV `seen`, the bits of its numbers as int64 `[layers, 2, length, 2]`."""
        weights = (np.arange(1, seen.size + 1, dtype=np.int64) * 48271 % _PRIME).reshape(seen.shape)
        mixed = int((seen * weights % _PRIME).sum() % _PRIME) * 69621 % _PRIME
        if self._eos_every and mixed % self._eos_every == 0:
            return 0
        return 1 + mixed // 7 % (self.vocab_size - 1)

    def expected(self, prompt: Sequence[int], num_outputs: int) -> list[int]:
        """What the model draws after `prompt`, computed without any pool: the reference."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_outputs:
            tokens.append(self.next_token(self._reference(np.array(tokens))))
            if tokens[-1] == 0 and self._eos_every:
                break
        return tokens[len(prompt) :]

    @property
    def _num_attended(self) -> int:
        """Layers that hold keys and values of tokens."""
        return self.layout.num_layers

    def _after_layers(self, batch: PagedBatch) -> None:
        """What a variant writes once all keys and values are there."""

    def _seen(self, pool: torch.Tensor, table: torch.Tensor, length: int) -> npt.NDArray[np.int64]:
        """What the next token of a row depends on, read from its blocks."""
        count = self.layout.num_blocks_for(length)
        blocks = pool[table[:count], : self._num_attended]
        return _bits(blocks.transpose(0, 1).transpose(1, 2).reshape(self._num_attended, 2, -1, 2)[:, :, :length].numpy())

    def _reference(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same, computed from the tokens."""
        return _bits(_keys_and_values(tokens, self._num_attended))


class RecurrentToyModel(ToyModel):
    """A toy model with a recurrent state: one more layer, of which a block's share is written when its last token is.

    The state of a block is a hash of the state before it and of the block's keys and values; the next token depends on the states
    of all complete blocks. A block whose state was not copied along is no hit, and serving it as one changes the text (H15).
    """

    def __init__(
        self, *, block_tokens: int = 4, num_layers: int = 3, vocab_size: int = 97, max_model_len: int = 512, eos_every: int = 0
    ) -> None:
        """`num_layers` does not count the layer of the state."""
        super().__init__(
            block_tokens=block_tokens, num_layers=num_layers + 1, vocab_size=vocab_size, max_model_len=max_model_len, eos_every=eos_every
        )
        self.fingerprint = f"toy-recurrent-{num_layers}-{vocab_size}-{eos_every}"

    @property
    def _num_attended(self) -> int:
        return self.layout.num_layers - 1

    def _after_layers(self, batch: PagedBatch) -> None:
        batch.before_layer(self._num_attended)
        size = self.layout.block_tokens
        for row, (start, stop) in enumerate(itertools.pairwise(batch.query_starts)):
            table, length = batch.block_tables[row].tolist(), batch.kv_lens[row]
            for index in range((length - (stop - start)) // size, length // size):
                before = _bits(self._states(batch.kv, table[index - 1 : index])) if index else None
                block = batch.kv[table[index], : self._num_attended, :, :, 0].numpy()
                batch.kv[table[index], self._num_attended, :, :, 0] = torch.from_numpy(_state(before, _bits(block)))

    def _seen(self, pool: torch.Tensor, table: torch.Tensor, length: int) -> npt.NDArray[np.int64]:
        complete = table[: length // self.layout.block_tokens].tolist()
        return np.concatenate([super()._seen(pool, table, length).ravel(), _bits(self._states(pool, complete)).ravel()])

    def _states(self, pool: torch.Tensor, blocks: Sequence[int]) -> npt.NDArray[np.float32]:
        return pool[list(blocks), self._num_attended, :, :, 0].numpy()

    def _reference(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        size = self.layout.block_tokens
        seen = super()._reference(tokens)
        states: list[npt.NDArray[np.int64]] = []
        for start in range(0, len(tokens) - size + 1, size):
            states.append(_bits(_state(states[-1] if states else None, seen[:, :, start : start + size])))
        return np.concatenate([seen.ravel(), *(state.ravel() for state in states)])


@dataclass(frozen=True, slots=True)
class SpeculativeRun:
    """What a speculative loop brings forth: the tokens, and how many drafts each of its rounds accepted."""

    tokens: tuple[int, ...]
    accept_lengths: tuple[int, ...]


class ToyDraftHead:
    """Drafts `width` tokens from the hidden value that the last round left on the device; pure functions, so that accept lengths are known.

    As many drafts are right as `accepted` says, between 0 and `width` - if `hidden` is that of the context. With a stale one none is
    right: the text stays what it is, because the model verifies every draft, and only the accept lengths tell (H19).
    """

    def __init__(self, model: ToyModel, *, width: int = 3) -> None:
        self.model = model
        self.width = width

    def hidden(self, context: Sequence[int]) -> int:
        """What the last layer leaves behind after `context`: from 1 to 2**31, different for nearly all contexts."""
        mixed = 1
        for token in context:
            mixed = (mixed * 48271 + token + 1) % _PRIME
        return mixed + 1

    def accepted(self, context: Sequence[int]) -> int:
        """How many drafts the model accepts after `context`."""
        return self.hidden(context) // 11 % (self.width + 1)

    def drafts(self, context: Sequence[int], hidden: int) -> tuple[int, ...]:
        """The tokens that are drafted after `context` by who believes that the device state is `hidden`."""
        right = self.accepted(context) if hidden == self.hidden(context) else 0
        truth = self.model.expected(context, self.width)
        truth += [0] * (self.width - len(truth))
        wrong = [1 + token % (self.model.vocab_size - 1) for token in truth]  # the neighbour of each token
        return tuple(truth[:right] + wrong[right:])

    def accept_length(self, context: Sequence[int], drafts: Sequence[int]) -> int:
        """How many leading `drafts` are the model's own next tokens."""
        pairs = zip(drafts, self.model.expected(context, len(drafts)), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def verify(self, context: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """One round: the accepted drafts and the token that the model draws after them. At least one token."""
        return self.model.expected(context, self.accept_length(context, drafts) + 1)

    def expected(self, prompt: Sequence[int], rounds: int) -> SpeculativeRun:
        """The reference: every round drafts from the hidden value of its own context."""
        context, accept_lengths = list(prompt), []
        for _ in range(rounds):
            drafts = self.drafts(context, self.hidden(context))
            accept_lengths.append(self.accept_length(context, drafts))
            context += self.verify(context, drafts)
        return SpeculativeRun(tuple(context[len(prompt) :]), tuple(accept_lengths))


def _written(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], layer: int) -> npt.NDArray[np.float32]:
    """Float32 `[T, 4]`: keys and values of each token; whole numbers below 2**20, so exact."""
    base = tokens.astype(np.int64) * 7919 + positions.astype(np.int64) * 104729 + layer * 1299709
    return np.stack([(base + part * 611953) % (1 << 20) for part in range(4)], axis=-1).astype(np.float32)


def _keys_and_values(tokens: npt.NDArray[np.int64], num_layers: int) -> npt.NDArray[np.float32]:
    """Float32 `[layers, 2, T, 2]`."""
    positions = np.arange(len(tokens))
    return np.stack([_written(tokens, positions, layer).reshape(-1, 2, 2).swapaxes(0, 1) for layer in range(num_layers)])


def _state(before: npt.NDArray[np.int64] | None, block: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Float32 `[2, T, 2]`: what a block leaves behind, from the bits of its `[layers, 2, T, 2]` and of the state before it."""
    weights = (np.arange(1, block.size + 1, dtype=np.int64) * 16807 % _PRIME).reshape(block.shape)
    mixed: npt.NDArray[np.int64] = (block * weights % _PRIME).sum(axis=0)
    if before is not None:
        mixed = mixed + before.reshape(mixed.shape) * 69621 % _PRIME
    state: npt.NDArray[np.float32] = ((mixed + mixed.sum() % _PRIME) % (1 << 20)).astype(np.float32)
    return state


def _bits(kv: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Numbers that differ wherever a single bit does."""
    return np.ascontiguousarray(kv).view(np.int32).astype(np.int64)
