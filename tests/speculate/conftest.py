"""A fixture for tests of proposers: records the drafts of engines."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from drafting_rig import Seen

from sidestream.runner.forward import Forward, Proposed
from sidestream.runner.step_inputs import StepInputs
from sidestream.speculate import Context


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Drafts of eager steps by the tokens before them; each row has its own number of drafts."""
    seen: Seen = defaultdict(list)
    propose = Forward._propose

    def keep(self: Forward, inputs: StepInputs) -> Proposed | None:
        contexts: list[Context] = []
        proposer: Any = self._proposer

        def propose_for_all(context: Context, count: int) -> Any:
            contexts.append(context)
            return proposer.propose(context, count)

        self._proposer = SimpleNamespace(propose=propose_for_all)  # type: ignore[assignment]
        try:
            proposed = propose(self, inputs)
        finally:
            self._proposer = proposer
        if proposed is None:
            return None
        first, stop = inputs.sizes.first_drafting, inputs.sizes.decodes
        counts = (inputs.cu_seqlens_q[1:] - inputs.cu_seqlens_q[:-1] - 1)[first:stop].tolist()
        (context,) = contexts
        for history, length, drafts, count in zip(
            context.history[context.rows].tolist(),
            context.lengths.tolist(),
            proposed.tokens[first:].tolist(),
            counts,
            strict=True,
        ):
            assert count > 0
            seen[tuple(history[:length])].append(drafts[:count])
        return proposed

    monkeypatch.setattr(Forward, "_propose", keep)
    return seen
