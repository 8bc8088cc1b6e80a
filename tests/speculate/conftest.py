"""A fixture for tests of proposers: records the drafts of engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from drafting_rig import Seen
from torch import Tensor

from sidestream.attention.interface import AttentionBatch
from sidestream.runner.drafts import Drafts
from sidestream.runner.state import DecodeState
from sidestream.speculate import Context, Proposer


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Drafts of engines by the tokens before them; each row has its own number of drafts."""
    seen: Seen = defaultdict(list)
    propose = Drafts.propose

    def keep(
        self: Drafts, proposer: Proposer, state: DecodeState, attend: Callable[[Tensor, Tensor, Tensor], AttentionBatch]
    ) -> Tensor:
        contexts: list[Context] = []

        def propose_for_all(context: Context, count: int) -> Tensor:
            contexts.append(context)
            return proposer.propose(context, count)

        watched: Any = SimpleNamespace(propose=propose_for_all)
        drafts = propose(self, watched, state, attend)
        drafting = [(row, count) for row, count in zip(drafts.tolist(), self.num_drafts, strict=True) if count]
        (context,) = contexts
        for history, length, (row, count) in zip(
            context.history[context.rows].tolist(), context.lengths.tolist(), drafting, strict=True
        ):
            seen[tuple(history[:length])].append(row[:count])
        return drafts

    monkeypatch.setattr(Drafts, "propose", keep)
    return seen
