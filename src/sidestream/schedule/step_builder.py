"""Collects a step while it is planned: the parts of the scheduler add rows, transfers and fences, and `build` makes the
plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sidestream.schedule.request import Request
from sidestream.types import BatchPlan, RowPlan, StepPlan
from sidestream_kv.types import Fence, TransferPlan


@dataclass(slots=True)
class StepBuilder:
    """Exists during one call of `Scheduler.plan`, or of `Scheduler.plan_loads` (`loads_only`: there is no step).

    prefill_budget  number of prompt tokens that may still be added
    lead_s, step_s  see `Scheduler.plan`
    speculates      some row has drafts, or begins at a position that depends on drafts of a step in flight
    plain           decode rows without drafts
    drafting        decode rows with drafts
    prefills        rows that compute a chunk of a prompt
    after           fences that the step waits for: last uses of the blocks that were allocated for it
    undrafted       number of rows without drafts by reason, see `StepPlan`
    arriving        requests, by rank, that get no row because their loads end later than the step could begin
    """

    prefill_budget: int
    lead_s: float
    step_s: float
    loads_only: bool = False
    speculates: bool = False
    plain: list[RowPlan] = field(default_factory=list)
    drafting: list[RowPlan] = field(default_factory=list)
    prefills: list[RowPlan] = field(default_factory=list)
    transfers: list[TransferPlan] = field(default_factory=list)
    after: list[Fence] = field(default_factory=list)
    undrafted: Counter[str] = field(default_factory=Counter)
    arriving: list[Request] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the step has no row."""
        return not (self.plain or self.drafting or self.prefills)

    def build(self) -> StepPlan:
        """The finished plan. Its rows: decode rows without drafts, decode rows with drafts, prefill rows."""
        batch = BatchPlan((*self.plain, *self.drafting, *self.prefills), self.speculates)
        return StepPlan(tuple(self.transfers), batch, tuple(self.after), self.undrafted)
