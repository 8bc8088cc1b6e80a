"""Log-probabilities of prompts: which positions of a step's prefill rows need logits for them, and what is made of the
logits. The sampler does not see these logits, which follow those that it samples at.

`PromptSlots` is used on the engine thread, `prompt_logprobs` on the compute stream.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sidestream.runner.sampler import TOP_LOGPROBS, likeliest
from sidestream.types import BatchPlan, RowStart
from sidestream_kv.types import RequestId


class PromptPart(NamedTuple):
    """Logits of one row: of the positions from `start` on, which give the log-probabilities of the tokens behind them.

    targets   ids of these tokens
    top       requested number of alternatives for each
    """

    request_id: RequestId
    start: int
    targets: tuple[int, ...]
    top: int


class PromptLogits(NamedTuple):
    """The positions of a step whose logits are computed only for log-probabilities of prompts.

    indices   packed positions, of all parts in order
    """

    parts: tuple[PromptPart, ...]
    indices: npt.NDArray[np.int64]

    @property
    def targets(self) -> list[int]:
        """Ids of the tokens behind these positions."""
        return [token for part in self.parts for token in part.targets]


class PromptSlots:
    """The prompts of request slots whose log-probabilities are wanted. A request that resumes with outputs has them
    already.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[tuple[int, ...], int]] = {}

    def begin(self, slot: int, start: RowStart) -> None:
        """Another request has the slot from the next launched step on."""
        if start.sampling.prompt_logprobs >= 0 and not start.outputs:
            self._prompts[slot] = start.prompt, start.sampling.prompt_logprobs
        else:
            self._prompts.pop(slot, None)  # rule: slot-forgets-the-last-owners-prompt

    def wanted(self, batch: BatchPlan) -> PromptLogits | None:
        """The positions of this step; nearly always None."""
        if not self._prompts or batch.num_decodes == batch.num_rows:
            return None
        parts: list[PromptPart] = []
        indices: list[int] = []
        packed = batch.num_decodes + sum(batch.columns.drafts)
        for row in batch.rows[batch.num_decodes :]:
            if (found := self._prompts.get(row.slot)) is not None:
                prompt, top = found
                targets = prompt[row.min_start + 1 : row.stop + 1]
                parts.append(PromptPart(row.request_id, row.min_start, targets, top))
                indices += range(packed, packed + len(targets))
            packed += row.num_tokens
        return PromptLogits(tuple(parts), np.array(indices, np.int64)) if indices else None


def prompt_logprobs(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Log-probabilities of `targets`, int64 `[P]`, at logits `[P, V]`, by the names of the mailbox's fields: those of
    the targets, their ranks (1: the likeliest), and ids and log-probabilities of the likeliest tokens. No host sync.
    """
    raw = logits.float().log_softmax(-1)
    drawn = raw.gather(-1, targets.unsqueeze(-1))
    ids, top = likeliest(raw, min(TOP_LOGPROBS, raw.shape[-1]))
    ranks = 1 + (raw > drawn).sum(-1)
    return {"prompt_ranks": ranks, "prompt_ids": ids, "prompt_drawn": drawn.squeeze(-1), "prompt_top": top}
