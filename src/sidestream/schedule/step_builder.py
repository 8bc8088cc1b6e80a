"""A step while it is planned: the parts of the scheduler add rows, transfers and fences, then `build` freezes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sidestream.schedule.request import Request
from sidestream.types import BatchPlan, Fence, RowPlan, StepPlan, TransferPlan


@dataclass(slots=True)
class StepBuilder:
    """Lives inside one call of `Scheduler.plan`, or of `Scheduler.plan_loads`, which launches no step (`loads_only`).

    prefill_budget  prompt tokens that may still be added
    lead_s, step_s  see `Scheduler.plan`
    speculates      some row has drafts, or its first position depends on drafts of a step in flight
    plain           decode rows without drafts
    drafting        decode rows with drafts
    prefills        rows that compute a chunk of a prompt
    after           fences that the step waits for: last uses of the blocks that were allocated for it
    undrafted       rows without drafts by reason, see `StepPlan`
    arriving        requests left out of the step because their loads take longer than the device is busy, by rank
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
        """Whether the step has no row yet."""
        return not (self.plain or self.drafting or self.prefills)

    def build(self) -> StepPlan:
        """The finished plan. Rows that decode come first, and of these the ones without drafts."""
        batch = BatchPlan((*self.plain, *self.drafting, *self.prefills), self.speculates)
        return StepPlan(tuple(self.transfers), batch, tuple(self.after), self.undrafted)
