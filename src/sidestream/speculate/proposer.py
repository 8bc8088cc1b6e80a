"""The protocol of proposers, their inputs, and the proposers. Called on the compute stream, inside a step's work.

A proposer may have its own KV, in additional layers of the block pool, and may read the model's hidden states. A
proposer with KV receives all tokens that the model computes, by calls of `follow`. So its KV covers the same positions
as the model's KV, and is stored and loaded with the same blocks (hazard H15).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sidestream.attention.interface import AttentionBatch
from sidestream.models.draft import shape_of
from sidestream.ops import Ops

if TYPE_CHECKING:
    from sidestream.models.adapter import PagedModel
    from sidestream.models.mtp import MtpHead


@dataclass(frozen=True, slots=True)
class Context:
    """State of the rows to draft for. All tensors are on the device.

    history   int32 `[request slots, width]`: all tokens of each request slot, including the last one; columns after the
              last token are undefined
    rows      int64 `[R]`: request slot of each row
    lengths   int64 `[R]`: number of tokens of each row, at least 1; undefined for an unused request slot
    tokens    int64 `[R]`: last token of each row
    hidden    `[R, hidden_size]`: output of the model's last layer at the token before the last one; only for proposers
              with a `hidden_size`
    attend    function that makes an attention batch in which each row has one token, at the given positions int64 `[R]`
    ops       the device operations of the engine
    """

    history: Tensor
    rows: Tensor
    lengths: Tensor
    tokens: Tensor
    hidden: Tensor
    attend: Callable[[Tensor], AttentionBatch]
    ops: Ops


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The packed tokens that the model computes in a step.

    tokens, positions   int64 `[T]`
    before              `[T, hidden_size]`: output of the model's last layer at the position before each token; zeros at
                        position 0. None for a proposer without a `hidden_size`
    """

    tokens: Tensor
    positions: Tensor
    before: Tensor | None
    batch: AttentionBatch


class Proposer(Protocol):
    """Proposes drafts. Any token of the vocabulary is a valid draft: a wrong draft costs time and changes no output."""

    @property
    def name(self) -> str:
        """Name in the configuration and the metrics."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that the proposer reads; 0: none."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of the block pool for the proposer's own KV; 0: none, and `follow` is not called."""
        ...

    def propose(self, context: Context, count: int) -> Tensor:
        """Propose the next `count` tokens of each row: int64 `[R, count]`, contiguous; the caller may overwrite them.

        The result depends only on the row's own tokens, not on other rows or earlier drafts. The proposer may write its
        own KV at the row's last position and after it; `follow` computes these positions again. Enqueues on the current
        stream without a host sync.
        """
        ...

    def follow(self, step: StepTokens) -> None:
        """Compute the proposer's own KV for a step's tokens, including the drafts that the step verifies. The positions
        of rejected drafts are computed again later.

        If the proposer reads hidden states, `follow` may run at the same time as the model's forward pass. So it must
        not compute attention, and must not write memory that the model reads.
        """
        ...


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Prompt lookup: looks for an earlier occurrence of the row's last tokens, with at most `longest` and at least
    `shortest` tokens. Takes the longest match, and the latest among equally long matches (Saxena 2023). Needs no model.
    Helps where the output repeats the input: code, edits, quotes.

    Drafts the tokens after that occurrence, and repeats these tokens if they are too few. Without an occurrence,
    repeats the last token.
    """

    longest: int = 4
    shortest: int = 1
    name: str = "ngram"
    hidden_size: int = 0
    num_layers: int = 0

    def propose(self, context: Context, count: int) -> Tensor:
        return context.ops.match_ngram(
            context.history, context.rows, context.lengths, count, longest=self.longest, shortest=self.shortest
        )

    def follow(self, step: StepTokens) -> None:
        """Does nothing, because the proposer has no state."""


@dataclass(frozen=True, slots=True)
class GrammarProposer:
    """Has no drafts of its own: only rows whose grammar leaves no choice get drafts, see `Ops.take_forced`."""

    name: str = "grammar"
    hidden_size: int = 0
    num_layers: int = 0

    def propose(self, context: Context, count: int) -> Tensor:
        return context.tokens[:, None].repeat(1, count)

    def follow(self, step: StepTokens) -> None:
        """Does nothing, because the proposer has no state."""


class MtpProposer:
    """Drafts the tokens with the largest logits of a multi-token-prediction head, which is attached to the model. Each
    drafted token is an input of the next one.
    """

    name = "mtp"
    num_layers = 1

    def __init__(self, head: MtpHead) -> None:
        self.head = head
        self.hidden_size = head.hidden_size

    def propose(self, context: Context, count: int) -> Tensor:
        positions = context.lengths - 1
        tokens, before = context.tokens, context.hidden
        drafts = []
        for _ in range(count):
            hidden, before = self.head.step(tokens, before, positions, context.attend(positions))
            (tokens, _), positions = context.ops.argmax(self.head.logits(hidden)), positions + 1
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def follow(self, step: StepTokens) -> None:
        assert step.before is not None, "a head needs the model's hidden states"
        self.head.write_kv(step.tokens, step.before, step.positions, step.batch)


class DraftModelProposer:
    """Drafts the tokens with the largest logits of a smaller `model`, one after another. It computes its own KV for
    every token that the served model computes.

    num_layers   number of layers of the block pool for the draft model's KV, from `attach_draft`
    vocab_size   vocabulary size of the served model; all drafts are below it
    shape        shape of the draft model's KV
    """

    name = "draft"
    hidden_size = 0

    def __init__(self, model: PagedModel, *, num_layers: int, vocab_size: int) -> None:
        self.model = model
        self.num_layers = num_layers
        self.shape = shape_of(model)
        self._common_vocab = min(vocab_size, model.vocab_size)

    def propose(self, context: Context, count: int) -> Tensor:
        positions = context.lengths - 1
        tokens = context.tokens
        every_row = torch.arange(len(tokens), device=tokens.device)
        drafts = []
        for _ in range(count):
            batch = context.attend(positions).with_kv_shape(self.shape)
            # All rows get `count` drafts, so a row near the maximum length would exceed the positions of the model.
            clamped = positions.clamp(max=self.model.max_model_len - 1)
            logits = self.model.forward(self._in_vocab(tokens), clamped, batch, every_row)
            (tokens, _), positions = context.ops.argmax(logits[:, : self._common_vocab]), positions + 1
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def follow(self, step: StepTokens) -> None:
        no_logits = torch.empty(0, dtype=torch.int64, device=step.tokens.device)
        self.model.forward(self._in_vocab(step.tokens), step.positions, step.batch.with_kv_shape(self.shape), no_logits)

    def _in_vocab(self, tokens: Tensor) -> Tensor:
        """Clamp token ids to the draft model's vocabulary, because the served model's vocabulary may be larger."""
        return tokens.clamp(max=self.model.vocab_size - 1)
