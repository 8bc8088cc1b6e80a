"""Prompt lookup (n-gram drafts): proposes the tokens that followed an earlier occurrence of the last few tokens.

Needs no model. Helps where the output repeats the input: code, edits, quotes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sidestream.speculate.proposer import Context, StepTokens


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Looks for an earlier occurrence of the row's last tokens, with at most `longest` and at least `shortest` tokens.
    Takes the longest match, and the latest among equally long matches (Saxena 2023).

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
