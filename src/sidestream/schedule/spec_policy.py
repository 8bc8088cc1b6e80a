"""Chooses the number of drafts of each row, so that drafts gain more time than they cost. Pure: no clock; engine thread
only.

The time of a step with drafts depends mostly on its depth: the largest number of drafts of any row. A captured forward
pass computes as many positions for every row as the row with the most drafts needs, and drafts are computed one after
another. So the policy first chooses the depth of the step: the depth (0 included) with which the step yields the most
tokens a second, given the measured step time of each depth and the measured accept rate of each row. Up to that depth,
each row gets those drafts that are likely enough to be accepted.

A row whose own drafts are rejected still waits for the drafts of other rows. The policy counts this cost as the row's
debt, in tokens. If the debt exceeds what `max_slowdown` allows, only depths that do not increase it are chosen.

Drafts that a grammar forces (its only continuation) have an accept rate of their own, which all requests share. A model
rejects them only where the row went on in another way than expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Weights of the newest value in moving averages. _ACCEPT_WEIGHT: the accept rate of a row. _USUAL_WEIGHT: the accept
# rate of all rows. _PLAIN_WEIGHT: the time of steps without drafts. _RATIO_WEIGHT: the time of steps with drafts, as a
# ratio to steps without; _STALE_RATIO_WEIGHT: the same, if the last measurement is more than _LONG_STEPS steps old.
_ACCEPT_WEIGHT = 0.1
_RATIO_WEIGHT, _STALE_RATIO_WEIGHT, _PLAIN_WEIGHT = 0.2, 0.5, 0.5
_USUAL_WEIGHT = 0.02
# Accept rate that is assumed before a measurement. It is optimistic, so that short answers get drafts, too. Even if the
# usual rate is known, one in this many new requests starts with the optimistic rate: otherwise, a low rate would never
# be measured again after it has improved.
_OPTIMISTIC_RATE = 0.8
_OPTIMISTIC_EVERY = 16
# Lowest accept rate that is assumed of forced drafts, so that they are tried now and then.
_LEAST_FORCED_RATE = 0.2
# Assumed cost of one more draft for each row, as a share of the time of a step without drafts, until this cost was
# measured. A row gets a draft if its chance to be accepted exceeds half of the measured cost (within these bounds),
# because the rows share this cost.
_FIRST_COST = 0.05
_SHARE = 0.5
_LEAST_CHANCE, _MOST_CHANCE = 0.05, 0.5
# Debt, in tokens, that every row may have, because the outcome of a step is known only one or two steps later.
_PATIENCE = 1.0
# A row that got no draft in this many steps with drafts gets a draft, so that its accept rate is measured again.
_PROBE_STEPS = 32
# After _MEASURE_STEPS steps with drafts, the next _MEASURING steps have no drafts, so that the time of such steps is
# measured again. If too few of them could be timed, further steps follow, up to _MEASURING_AT_MOST. The result is the
# median of _SAMPLES successive steps, because a delay of the host makes one step seem long and the next one short.
_MEASURE_STEPS = 320
_MEASURING, _MEASURING_AT_MOST = 5, 16
_SAMPLES = 3
# Bounds by which one measurement may change a ratio, as factors of the old value.
_LEAST_CHANGE, _MOST_CHANGE = 0.5, 2.0
# A choice of depth 0 is used for this many steps: with many rows, choosing takes a tenth of the host's time for a step,
# and steps without drafts are the shortest.
_REUSE_STEPS = 4
# One step is tried with the largest depth after this many shallower steps, times the relative step time of the largest
# depth. So the trials cost less than a hundredth of the time. The first trial with a new number of rows comes earlier.
_RETRY_STEPS = 128
_FIRST_TRY_STEPS = 32
# After _LONG_STEPS steps, the measured time of a depth is out of date. The times of two steps are compared only if
# their numbers of tokens per row differ by at most _NEAR_TOKENS plus the share _NEAR.
_LONG_STEPS = 64
_NEAR_TOKENS, _NEAR = 16, 0.05
# Number of records to allocate at the start.
_NUM_RECORDS = 64


class Chosen(NamedTuple):
    """Number of drafts for each row of a step.

    counts     in the order of the rows
    undrafted  number of rows that got no drafts although their requests allow them, by reason: `"end"` (the answer
               ends), `"measuring"` (steps without drafts are timed), `"others"` (other rows in debt would lose more),
               `"chance"` (too few drafts would be accepted)
    """

    counts: list[int]
    undrafted: Mapping[str, int]


class DraftRecords:
    """Outcomes of the drafts of each request, as arrays; the index is the request's number.

    wanted   upper bound of drafts in a step
    chance   accept rate: the share of accepted drafts among the drafts whose predecessors were all accepted
    idle     number of steps with drafts since the request last had a draft; steps without drafts because of `"others"`
             count, too
    debt     tokens that the request has lost so far by the time for the drafts of all requests, minus its own accepted
             drafts, minus the tokens that `max_slowdown` allows it to lose
    """

    def __init__(self) -> None:
        self.wanted: Ints = np.zeros(_NUM_RECORDS, np.int64)
        self.chance: Floats = np.zeros(_NUM_RECORDS)
        self.idle: Ints = np.zeros(_NUM_RECORDS, np.int64)
        self.debt: Floats = np.zeros(_NUM_RECORDS)
        self._free = deque(range(_NUM_RECORDS))

    def assign(self, wanted: int, chance: float) -> int:
        """Return the number of a new request."""
        if not self._free:
            size = len(self.wanted)
            self._free += range(size, 2 * size)
            self.wanted, self.chance = np.resize(self.wanted, 2 * size), np.resize(self.chance, 2 * size)
            self.idle, self.debt = np.resize(self.idle, 2 * size), np.resize(self.debt, 2 * size)
        number = self._free.popleft()
        self.wanted[number], self.chance[number], self.idle[number], self.debt[number] = wanted, chance, 0, 0.0
        return number

    def __len__(self) -> int:
        """Number of requests with a record."""
        return len(self.wanted) - len(self._free)

    def free(self, number: int) -> None:
        """Call it when the request has ended. Its number may then be assigned to another request."""
        self._free.append(number)


@dataclass(slots=True)
class _StepTimes:
    """Measured times of steps with about the same number of rows.

    Steps take longer as answers grow. So the time of a step with drafts is compared only with the time of a step
    without drafts that had about as many tokens per row.

    measured   by depth: time of a step divided by the time without drafts; None: never measured
    ratios     the same ratios; those of unmeasured depths are interpolated between measured depths
    last       by depth: number of its last step; `count` is the number of the last step of any depth
    samples    times of the last successive steps without drafts
    plain_s    time of a step without drafts, with `context` tokens per row: measured if `was_plain`, else derived from
               the time of a step with drafts; None: unknown
    drafted    number of steps with drafts since the last measurement of steps without drafts
    measuring  index of the next step in a measurement of steps without drafts; 0: no measurement is running
    shallow    number of steps planned since the last step of the largest depth
    """

    measured: list[float | None]
    ratios: list[float | None]
    last: list[int]
    samples: tuple[float, ...] = ()
    plain_s: float | None = None
    context: float = 0.0
    was_plain: bool = False
    count: int = 0
    drafted: int = 0
    measuring: int = 0
    shallow: int = 0

    def record(self, depth: int, seconds: float, context: float) -> None:
        """Record the duration of a step of this depth, with `context` tokens per row."""
        self.count += 1
        self.drafted += depth > 0
        is_stale = self.count - self.last[depth] > _LONG_STEPS
        self.last[depth] = self.count
        if depth:
            self.samples = ()
        else:
            self.samples = (*self.samples, seconds)[-_SAMPLES:]
            if len(self.samples) < _SAMPLES:
                return
            seconds = sorted(self.samples)[_SAMPLES // 2]
        ratio, plain_s = self.measured[depth], self.plain_s
        near = abs(context - self.context) <= _NEAR_TOKENS + _NEAR * self.context
        if depth and plain_s and near and (self.was_plain or is_stale or ratio is None):  # plain_s 0: no clock tick
            seen, weight = seconds / plain_s, _STALE_RATIO_WEIGHT if is_stale else _RATIO_WEIGHT
            if ratio is not None:
                seen = ratio + weight * (min(max(seen, _LEAST_CHANGE * ratio), _MOST_CHANGE * ratio) - ratio)
            self.measured[depth] = max(1.0, seen)
            self._fill_in()
        elif ratio is not None:
            implied_s = seconds / ratio
            follows = depth and near and not self.was_plain and plain_s is not None
            self.plain_s = (
                plain_s + _PLAIN_WEIGHT * (implied_s - plain_s) if follows and plain_s is not None else implied_s
            )
            self.context, self.was_plain = context, depth == 0

    def _fill_in(self) -> None:
        seen = [(at, ratio) for at, ratio in enumerate(self.measured) if ratio is not None]
        self.ratios = [None] * len(self.measured)
        self.ratios[0] = 1.0
        for (low, left), (high, right) in pairwise(seen):
            for depth in range(low + 1, high + 1):
                self.ratios[depth] = left + (right - left) * (depth - low) / (high - low)


def _least_rates(chances: Sequence[float]) -> list[float]:
    """Accept rates that a row must exceed to get its first, second, … draft. `chances`: for the first, second, … draft,
    the smallest probability of acceptance with which a row gets it.
    """
    return [chance ** (1 / count) for count, chance in enumerate(chances, 1)]


def _moved(rate: float, accepted: int, failed: int) -> float:
    """An accept rate of all rows, after some more drafts."""
    tries = accepted + failed
    return rate + (1 - (1 - _USUAL_WEIGHT) ** tries) * (accepted / tries - rate) if tries else rate


def _num_drafts(chance: float, most: int, least: Sequence[float]) -> int:
    """Number of drafts for a row with accept rate `chance`, at most `most`. `least`: see `_least_rates`."""
    while most and chance <= least[most - 1]:
        most -= 1
    return most


def _num_drafts_each(chances: Floats, most: Ints, least: Sequence[float]) -> Ints:
    """The same as `_num_drafts`, for all rows at once."""
    counts = most.copy()
    for count in range(int(most.max(initial=0)), 0, -1):
        counts[(counts == count) & (chances <= least[count - 1])] = count - 1
    return counts


class SpecPolicy:
    """Chooses the number of drafts of each row, between 0 and `max_drafts`.

    adaptive      False: every row always gets as many drafts as it may have
    max_slowdown  with `adaptive`: share by which drafts may slow down a request from its start to its end
    forced_only   only rows with forced drafts get drafts
    records       outcomes of the drafts of each request
    """

    def __init__(
        self, max_drafts: int, *, adaptive: bool = True, max_slowdown: float = 0.005, forced_only: bool = False
    ) -> None:
        self.max_drafts = max_drafts
        self.adaptive = adaptive
        self.max_slowdown = max_slowdown
        self.forced_only = forced_only
        self.records = DraftRecords()
        self._usual = _OPTIMISTIC_RATE
        self._forced = _OPTIMISTIC_RATE
        self._num_added = 0
        self._steps: dict[int, _StepTimes] = {}
        self._none: Chosen | None = None
        self._reused = 0
        self._loss = 0.0  # tokens that each row loses by the time for the drafts of the last choice

    def add_request(self, wanted: int) -> int:
        """Return a number for a new request, valid until `remove_request`. The request's accept rate starts at the
        average of all rows, or sometimes at `_OPTIMISTIC_RATE`.
        """
        if not wanted:
            return self.records.assign(0, 0.0)
        self._num_added += 1
        self._none = None
        return self.records.assign(
            wanted, max(self._usual, _OPTIMISTIC_RATE) if self._num_added % _OPTIMISTIC_EVERY == 1 else self._usual
        )

    def remove_request(self, number: int) -> None:
        """Call it when the request has ended."""
        self._none = None
        self.records.free(number)

    def charge(self, numbers: Sequence[int]) -> None:
        """Add the cost of the last choice to the debt of these requests: their prompts are computed in the same step,
        so the drafts delay their first tokens.
        """
        self.records.debt[np.array(numbers, np.int64)] += self._loss

    def record_accepted(self, numbers: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Record the outcome of a step: for each request, the number of its drafts and the number of accepted ones."""
        records, rows, right = self.records, np.array(numbers, np.int64), np.array(accepted, np.int64)
        failed = right < np.array(drafted, np.int64)
        chances = 1 - (1 - records.chance[rows]) * (1 - _ACCEPT_WEIGHT) ** right
        chances[failed] *= 1 - _ACCEPT_WEIGHT
        records.chance[rows] = chances
        records.debt[rows] -= right
        self._usual = _moved(self._usual, int(right.sum()), int(failed.sum()))

    def record_forced(self, numbers: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """The same as `record_accepted`, for rows with forced drafts."""
        right = np.array(accepted, np.int64)
        self.records.debt[np.array(numbers, np.int64)] -= right
        failed = int(np.count_nonzero(right < np.array(drafted, np.int64)))
        self._forced = max(_moved(self._forced, int(right.sum()), failed), _LEAST_FORCED_RATE)

    def reuse(self, num_rows: int) -> Chosen | None:
        """The last choice, if it was depth 0 for the same number of rows and is recent; None: call `choose`."""
        none = self._none
        if none is None or self._reused == _REUSE_STEPS - 1 or len(none.counts) != num_rows:
            return None
        self._reused += 1
        return none

    def choose(self, numbers: Sequence[int], room: Sequence[int], forced: Sequence[int] = ()) -> Chosen:
        """Choose the number of drafts of each decode row of a step. Call it after `reuse` returned None, or if a row
        has forced drafts.

        room    largest number of drafts of each row; 0 or less at the end of an answer
        forced  number of forced drafts of each row, which then gets no others; empty: no row has any
        """
        rows, left = np.array(numbers, np.int64), np.array(room, np.int64)
        ahead = np.array(forced or [0] * len(rows), np.int64)
        bounds = np.where(ahead > 0, ahead, 0 if self.forced_only else self.max_drafts)
        wanted = np.minimum(self.records.wanted[rows], bounds)
        most = np.maximum(np.minimum(np.minimum(wanted, left), self.max_drafts), 0)
        if not self.adaptive:
            return self._chosen(most, most, wanted, "chance")
        steps, ratios = self._times(len(rows)), self._ratios(len(rows))
        if self._none is not None and "others" in self._none.undrafted:
            self.records.idle[rows] += self._reused * (most > 0)
        passed, self._reused, self._none = 1 + self._reused, 0, None
        if not steps.measuring and (steps.plain_s is None or steps.drafted >= _MEASURE_STEPS):
            steps.drafted, steps.measuring, steps.samples = 0, 1, ()
        reason: str | None
        if steps.measuring:
            enough = steps.measuring >= _MEASURING and len(steps.samples) == _SAMPLES
            steps.measuring = 0 if enough or steps.measuring == _MEASURING_AT_MOST else steps.measuring + 1
            counts, reason = np.zeros(len(most), np.int64), "measuring"
        else:
            chances = np.where(ahead > 0, self._forced, self.records.chance[rows])
            counts, reason = self._counts(rows, chances, most, steps, ratios, passed)
        self._loss = ratios[int(counts.max(initial=0))] - 1
        self.records.debt[rows] += self._loss - passed * self.max_slowdown
        chosen = self._chosen(counts, most, wanted, reason or "chance")
        if reason and reason != "measuring":
            self._none = chosen
        return chosen

    def _chosen(self, counts: Ints, most: Ints, wanted: Ints, reason: str) -> Chosen:
        undrafted: dict[str, int] = {}
        if without := int(np.count_nonzero(wanted)) - int(np.count_nonzero(counts)):
            ends = int(np.count_nonzero(wanted[most == 0]))
            undrafted = {why: count for why, count in (("end", ends), (reason, without - ends)) if count}
        return Chosen(counts.tolist(), undrafted)

    def _counts(
        self, rows: Ints, chances: Floats, most: Ints, steps: _StepTimes, ratios: Sequence[float], passed: int
    ) -> tuple[Ints, str | None]:
        """Number of drafts for each row at the best depth, and the reason if that depth is 0.

        chances  accept rate of each row
        passed   number of steps since the last choice, including this step
        """
        records = self.records
        least = _least_rates(
            [min(max(_SHARE * (more - less), _LEAST_CHANCE), _MOST_CHANCE) for less, more in pairwise(ratios)]
        )
        depth, reason = self._depth(chances, ratios, most, records.debt[rows] > _PATIENCE, least)
        patience = _FIRST_TRY_STEPS if steps.measured[-1] is None else _RETRY_STEPS
        if steps.shallow >= patience * ratios[-1]:
            depth, least = self.max_drafts, _least_rates([_LEAST_CHANCE] * self.max_drafts)
        steps.shallow = 0 if depth == self.max_drafts else steps.shallow + passed
        if not depth:
            if reason == "others":
                records.idle[rows] += most > 0
            return np.zeros(len(most), np.int64), reason
        counts = _num_drafts_each(chances, np.minimum(most, depth), least)
        idle = np.where(counts > 0, 0, records.idle[rows] + (most > 0))
        probing = (idle > _PROBE_STEPS) & (most > 0)
        counts[probing], idle[probing] = 1, 0
        records.idle[rows] = idle
        return counts, None

    def _depth(
        self,
        chances: Floats,
        ratios: Sequence[float],
        most: Ints,
        in_debt: npt.NDArray[np.bool_],
        least: Sequence[float],
    ) -> tuple[int, str]:
        """The depth with the most tokens a second, among the depths that do not increase the debt of the rows
        `in_debt`; and the reason if that depth is 0.
        """
        # Expected numbers of accepted first, second, … drafts, over all rows.
        accepted, powers = list[float](), np.ones(len(chances))
        while len(accepted) < self.max_drafts:
            powers = powers * np.where(most > len(accepted), chances, 0)
            accepted.append(float(powers.sum()))
        bounds = set(most[in_debt].tolist()) if in_debt.any() else ()
        # For each largest number of drafts, the lowest accept rate of the rows in debt.
        lowest = {bound: float(chances[in_debt & (most == bound)].min()) for bound in bounds}

        def speed(depth: int) -> float:
            return (len(chances) + sum(accepted[:depth])) / ratios[depth]

        def is_fair(depth: int) -> bool:
            counts = ((chance, _num_drafts(chance, min(depth, bound), least)) for bound, chance in lowest.items())
            gains = (sum(chance**power for power in range(1, count + 1)) for chance, count in counts)
            return not depth or all(1 + gain >= ratios[depth] for gain in gains)

        depths = range(self.max_drafts + 1)
        best = max(filter(is_fair, depths), key=speed)
        return best, "others" if lowest and not best and max(depths, key=speed) else "chance"

    def record_step(self, num_rows: int, depth: int, seconds: float, context: float) -> None:
        """Record the duration of a step that has only decode rows.

        depth    largest number of drafts of any row
        context  mean number of tokens per row
        """
        self._times(num_rows).record(depth, seconds, context)

    def _ratios(self, num_rows: int) -> list[float]:
        """Step time of each depth, relative to depth 0. It was measured with about `num_rows` rows; or, without such a
        measurement, with the nearest number of rows; or, without any, is assumed to grow by `_FIRST_COST` for each
        draft.
        """
        own = num_rows.bit_length()
        ratios: list[float | None] = [None] * (self.max_drafts + 1)
        for size in sorted(self._steps, key=lambda size: abs(size - own)):
            ratios = [
                ours if theirs is None else theirs
                for theirs, ours in zip(ratios, self._steps[size].ratios, strict=True)
            ]
            if None not in ratios:
                break
        return [
            *accumulate(ratios[1:], lambda less, ratio: less + _FIRST_COST if ratio is None else ratio, initial=1.0)
        ]

    def _times(self, num_rows: int) -> _StepTimes:
        size, count = num_rows.bit_length(), self.max_drafts + 1
        if size not in self._steps:
            self._steps[size] = _StepTimes(
                [1.0, *[None] * self.max_drafts], [1.0, *[None] * self.max_drafts], [0] * count
            )
        return self._steps[size]
