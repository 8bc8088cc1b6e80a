"""What every way of drafting offers, and what it is given. Called on the compute stream, inside a step's work.

A proposer may keep KV of its own in layers of the block pool behind the model's, and read the model's hidden states for
it. Then it is shown every token that the model computes, in the same step: so what it keeps is as far as the model's KV
is, and travels with the blocks (H15).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sidestream.attention.paged import AttentionBatch


@dataclass(frozen=True, slots=True)
class Context:
    """Where the rows stand that are to be drafted for, all of it on the device.

    history   int32 `[rows of the device, width]`: all tokens of each, its last one included; behind that, whatever was
              there
    rows      int64 `[R]`: which of them these are
    lengths   int64 `[R]`: how many tokens each has, at least 1 · of a row that never began, whatever it says
    tokens    int64 `[R]`: the last one of each
    hidden    `[R, hidden_size]`: what the model's last layer left at the token before the last one; for who reads it
    attend    the batch in which each row has one token, at the given positions, int64 `[R]`
    """

    history: Tensor
    rows: Tensor
    lengths: Tensor
    tokens: Tensor
    hidden: Tensor
    attend: Callable[[Tensor], AttentionBatch]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a step computes, packed, for a proposer that keeps up with it.

    tokens, positions   int64 `[T]`
    before              `[T, hidden_size]`: what the model's last layer left at the position before each token; zeros
                        before the first. None for who reads no hidden states
    """

    tokens: Tensor
    positions: Tensor
    before: Tensor | None
    batch: AttentionBatch


class Proposer(Protocol):
    """Drafts. A draft may be any token of the vocabulary: a wrong one costs time, never an answer."""

    @property
    def name(self) -> str:
        """As in the configuration and the metrics."""
        ...

    @property
    def hidden_size(self) -> int:
        """Of the hidden states that it reads; 0: it reads none."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of the pool behind the model's that it keeps KV in; 0: none, and it is shown nothing."""
        ...

    def propose(self, context: Context, count: int) -> Tensor:
        """The `count` tokens that each row is likely to go on with: int64 `[R, count]`.

        A function of the row's own tokens alone, so that neither the rows beside it nor what became of earlier drafts
        change it. May write KV of its own at the row's last position and behind it: all of that is computed again when
        it is shown. Enqueues on the current stream and reads nothing back.
        """
        ...

    def follow(self, shown: Shown) -> None:
        """Keep up with a step: drafts that are verified in it are shown, too, and shown again where they were wrong.

        Where it reads hidden states, it attends to nothing, and so shares no memory with the model: it runs beside the
        model's pass.
        """
        ...
