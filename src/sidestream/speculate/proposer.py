"""The protocol of proposers, and their inputs. Called on the compute stream, inside a step's work.

A proposer may have its own KV, in additional layers of the block pool, and may read the model's hidden states. A
proposer with KV receives all tokens that the model computes, by calls of `follow`. So its KV covers the same positions
as the model's KV, and is stored and loaded with the same blocks (hazard H15).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sidestream.attention.interface import AttentionBatch
from sidestream.ops import Ops


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
        """Propose the next `count` tokens of each row: int64 `[R, count]`.

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
