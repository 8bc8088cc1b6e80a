"""How many tokens to draft for a row: as many as bring more than they cost. Pure: no clock; engine thread only.

What a step with drafts takes is mostly a matter of how many the row that has most of them gets, its depth: a captured
pass computes as many for every row, and drafting is one pass after another. So the depth is chosen for a step: the one
with the most tokens a second, none if need be, by what steps of each depth took and by how likely each row's drafts are
to be right. Within it a row gets drafts as long as they are likely enough to be right. Both sides are measured. A row
whose own drafts fail waits for the others'; once that has cost it more than it may, no depth is chosen at which it
loses more.
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

# Weight of the newest observation; of what a step takes also if it is the first one for long.
_FRESH = 0.1
_FRESH_RATIO, _FRESH_AGAIN, _FRESH_PLAIN = 0.2, 0.5, 0.5
_FRESH_USUAL = 0.02
# Of a draft before anything was seen: optimistic, so that a short answer gets drafts too. One new request in so many
# begins with it whatever became of others, or nobody would see that they changed.
_HOPE = 0.8
_HOPEFUL_EVERY = 16
# What a draft of each row is taken to add to a step until it was seen, as a share of one without. In a step, a row gets
# a draft that is likelier to be right than half of what that adds for each row, within bounds: not all of it is that
# row's.
_FIRST_COST = 0.05
_SHARE = 0.5
_LEAST_CHANCE, _MOST_CHANCE = 0.05, 0.5
# So many tokens a row may always be behind: what came of the last steps is known a step or two later.
_PATIENCE = 1.0
# Steps with drafts after which a row without any tries one.
_PROBE_STEPS = 32
# Steps with drafts after which so many go without, to be measured, and more if of those too few could be; of so many
# that follow each other the middle one counts: if the host is held up, one step seems long, and the next one short.
_MEASURE_STEPS = 320
_MEASURING, _MEASURING_AT_MOST = 5, 16
_SAMPLES = 3
# What a step with drafts seems to take counts as no less than that of what it took before, and no more than that many
# times as much.
_LEAST_CHANGE, _MOST_CHANGE = 0.5, 2.0
# Steps for which it is chosen at once that nobody drafts: choosing takes the host a tenth of what it has to do for a
# step of many rows, and where nobody drafts it has least time.
_REST = 4
# Steps less deep than may be after which one is as deep, times what that takes, so that trying costs less than a
# hundredth; fewer if it was never seen with so many rows.
_RETRY_STEPS = 128
_FIRST_TRY_STEPS = 32
# Steps after which what one takes is news; and by how many tokens of a row, and how much of it, steps may differ that
# are compared.
_LONG_STEPS = 64
_NEAR_TOKENS, _NEAR = 16, 0.05
# How many requests there is room for at first.
_NUM_RECORDS = 64


class Chosen(NamedTuple):
    """How many drafts each row of a step gets.

    counts     in the order of the rows
    undrafted  how many rows get none though their requests want some, by why: the answer is at its `"end"`, it is
               `"measuring"` what steps without drafts take, `"others"` would lose more by them than they may, or there
               is no `"chance"` that they pay
    """

    counts: list[int]
    undrafted: Mapping[str, int]


class DraftRecords:
    """What became of the drafts of each request, by the number that it has here.

    wanted   tokens to draft in a step at most
    chance   that a draft behind accepted ones is accepted
    idle     steps since it had any in which there were drafts, or would have been but for others
    behind   tokens that it would have more if nobody had been drafted for, less what is forgiven in each step; below 0
             it may lose some
    """

    def __init__(self) -> None:
        self.wanted: Ints = np.zeros(_NUM_RECORDS, np.int64)
        self.chance: Floats = np.zeros(_NUM_RECORDS)
        self.idle: Ints = np.zeros(_NUM_RECORDS, np.int64)
        self.behind: Floats = np.zeros(_NUM_RECORDS)
        self._free = deque(range(_NUM_RECORDS))

    def enter(self, wanted: int, chance: float) -> int:
        """A number for a new request."""
        if not self._free:
            size = len(self.wanted)
            self._free += range(size, 2 * size)
            self.wanted, self.chance = np.resize(self.wanted, 2 * size), np.resize(self.chance, 2 * size)
            self.idle, self.behind = np.resize(self.idle, 2 * size), np.resize(self.behind, 2 * size)
        number = self._free.popleft()
        self.wanted[number], self.chance[number], self.idle[number], self.behind[number] = wanted, chance, 0, 0.0
        return number

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self.wanted) - len(self._free)

    def leave(self, number: int) -> None:
        """The request has ended: its number may be another's."""
        self._free.append(number)


@dataclass(slots=True)
class _Steps:
    """Of about so many rows.

    A step takes longer and longer as answers grow: it is compared with what one without drafts takes over about as much
    KV, not with one of the last answers' end.

    measured  what steps of each depth took, of those without drafts; None: nobody knows
    ratios    the same; between depths that are known, in proportion
    last      which step was the last of each depth, of `count` that were seen
    samples   what the last ones without drafts took, one after another
    plain_s   what one without drafts takes over `context` tokens a row, or took, if it `was_plain`: else it is what one
              with drafts says; None: nobody knows
    drafted   with drafts, since some were to go without
    measuring of which number the next one is among those that go without, to be measured; 0: none do
    shallow   planned, since one was as deep as may be
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

    def saw(self, depth: int, seconds: float, context: float) -> None:
        """One of this depth took so long."""
        self.count += 1
        self.drafted += depth > 0
        is_news = self.count - self.last[depth] > _LONG_STEPS
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
        if depth and plain_s and near and (self.was_plain or is_news or ratio is None):  # 0: a clock that did not move
            seen, weight = seconds / plain_s, _FRESH_AGAIN if is_news else _FRESH_RATIO
            if ratio is not None:
                seen = ratio + weight * (min(max(seen, _LEAST_CHANGE * ratio), _MOST_CHANGE * ratio) - ratio)
            self.measured[depth] = max(1.0, seen)
            self._fill_in()
        elif ratio is not None:
            implied_s = seconds / ratio
            follows = depth and near and not self.was_plain and plain_s is not None
            self.plain_s = (
                plain_s + _FRESH_PLAIN * (implied_s - plain_s) if follows and plain_s is not None else implied_s
            )
            self.context, self.was_plain = context, depth == 0

    def _fill_in(self) -> None:
        seen = [(at, ratio) for at, ratio in enumerate(self.measured) if ratio is not None]
        self.ratios = [None] * len(self.measured)
        self.ratios[0] = 1.0
        for (low, left), (high, right) in pairwise(seen):
            for depth in range(low + 1, high + 1):
                self.ratios[depth] = left + (right - left) * (depth - low) / (high - low)


def _above(chances: Sequence[float]) -> list[float]:
    """What a row's chance must be above for its first, second, … draft, if the draft itself must be likelier to be
    right than `chances`.
    """
    return [chance ** (1 / count) for count, chance in enumerate(chances, 1)]


def _worth(chance: float, most: int, least: Sequence[float]) -> int:
    """How many drafts a row of this chance gets, of `most`. `least`: see `_above`."""
    while most and chance <= least[most - 1]:
        most -= 1
    return most


def _worth_each(chances: Floats, most: Ints, least: Sequence[float]) -> Ints:
    """The same of each row."""
    counts = most.copy()
    for count in range(int(most.max(initial=0)), 0, -1):
        counts[(counts == count) & (chances <= least[count - 1])] = count - 1
    return counts


class DraftPolicy:
    """Chooses how many drafts a row gets, between 0 and `most`. `adaptive` False: always as many as there may be.

    max_slowdown   with `adaptive`: share by which drafts may slow any row down, over its life
    records        what became of each request's drafts
    """

    def __init__(self, most: int, *, adaptive: bool = True, max_slowdown: float = 0.005) -> None:
        self.most = most
        self.adaptive = adaptive
        self.max_slowdown = max_slowdown
        self.records = DraftRecords()
        self._usual = _HOPE
        self._num_begun = 0
        self._steps: dict[int, _Steps] = {}
        self._none: Chosen | None = None
        self._rested = 0
        self._loss = 0.0  # by the drafts that were last chosen, in tokens, of a row that gets none

    def newcomer(self, wanted: int) -> int:
        """A new request, of which nothing is known but how others fared: the number that it has here, until it is
        `gone`.
        """
        if not wanted:
            return self.records.enter(0, 0.0)
        self._num_begun += 1
        self._none = None
        return self.records.enter(
            wanted, max(self._usual, _HOPE) if self._num_begun % _HOPEFUL_EVERY == 1 else self._usual
        )

    def gone(self, number: int) -> None:
        """The request has ended."""
        self._none = None
        self.records.leave(number)

    def held_up(self, numbers: Sequence[int]) -> None:
        """These requests' prompts are computed beside the drafts that were just chosen: their first token comes later
        by those.
        """
        self.records.behind[np.array(numbers, np.int64)] += self._loss

    def saw(self, numbers: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What became of a step's drafts: of each of these requests, `accepted` of `drafted` leading tokens
        were right.
        """
        records, rows, right = self.records, np.array(numbers, np.int64), np.array(accepted, np.int64)
        failed = right < np.array(drafted, np.int64)
        chances = 1 - (1 - records.chance[rows]) * (1 - _FRESH) ** right
        chances[failed] *= 1 - _FRESH
        records.chance[rows] = chances
        records.behind[rows] -= right
        num_right = int(right.sum())
        tries = num_right + int(failed.sum())
        if tries:
            self._usual += (1 - (1 - _FRESH_USUAL) ** tries) * (num_right / tries - self._usual)

    def again(self, num_rows: int) -> Chosen | None:
        """For a step of so many rows: none, and why, as was chosen for as many a few steps ago, if nobody came or went
        since. None: ask `choose`.
        """
        none = self._none
        if none is None or self._rested == _REST - 1 or len(none.counts) != num_rows:
            return None
        self._rested += 1
        return none

    def choose(self, numbers: Sequence[int], room: Sequence[int]) -> Chosen:
        """For all rows that decode in a step; `room`: how many drafts there may be behind each row's next token, none
        or less at its answer's end. To be asked when `again` said None.
        """
        rows, left = np.array(numbers, np.int64), np.array(room, np.int64)
        wanted = self.records.wanted[rows]
        most = np.maximum(np.minimum(np.minimum(wanted, left), self.most), 0)
        if not self.adaptive:
            return self._chosen(most, most, wanted, "chance")
        steps, ratios = self._of(len(rows)), self._ratios(len(rows))
        if self._none is not None and "others" in self._none.undrafted:
            self.records.idle[rows] += self._rested * (most > 0)
        passed, self._rested, self._none = 1 + self._rested, 0, None
        if not steps.measuring and (steps.plain_s is None or steps.drafted >= _MEASURE_STEPS):
            steps.drafted, steps.measuring, steps.samples = 0, 1, ()
        reason: str | None
        if steps.measuring:
            enough = steps.measuring >= _MEASURING and len(steps.samples) == _SAMPLES
            steps.measuring = 0 if enough or steps.measuring == _MEASURING_AT_MOST else steps.measuring + 1
            counts, reason = np.zeros(len(most), np.int64), "measuring"
        else:
            counts, reason = self._counts(rows, most, steps, ratios, passed)
        self._loss = ratios[int(counts.max(initial=0))] - 1
        self.records.behind[rows] += self._loss - passed * self.max_slowdown
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
        self, rows: Ints, most: Ints, steps: _Steps, ratios: Sequence[float], passed: int
    ) -> tuple[Ints, str | None]:
        """As many as the best depth and their own chances give them; and why nobody is drafted for, if no depth is
        worth it. `passed`: steps since the last that it was chosen for, and this one.
        """
        records = self.records
        chances = records.chance[rows]  # also where an end is near: it will be another's turn
        least = _above(
            [min(max(_SHARE * (more - less), _LEAST_CHANCE), _MOST_CHANCE) for less, more in pairwise(ratios)]
        )
        depth, reason = self._depth(chances, ratios, most, records.behind[rows] > _PATIENCE, least)
        patience = _FIRST_TRY_STEPS if steps.measured[-1] is None else _RETRY_STEPS
        if steps.shallow >= patience * ratios[-1]:
            depth, least = self.most, _above([_LEAST_CHANCE] * self.most)
        steps.shallow = 0 if depth == self.most else steps.shallow + passed
        if not depth:
            if reason == "others":
                records.idle[rows] += most > 0
            return np.zeros(len(most), np.int64), reason
        counts = _worth_each(chances, np.minimum(most, depth), least)
        idle = np.where(counts > 0, 0, records.idle[rows] + (most > 0))
        probing = (idle > _PROBE_STEPS) & (most > 0)
        counts[probing], idle[probing] = 1, 0
        records.idle[rows] = idle
        return counts, None

    def _depth(
        self, chances: Floats, ratios: Sequence[float], most: Ints, tired: npt.NDArray[np.bool_], least: Sequence[float]
    ) -> tuple[int, str]:
        """With the most tokens a second, of those at which no `tired` row loses, by the drafts that it would get; and
        why, if it is none.
        """
        right, powers = [float(chances.sum())], chances  # of the rows, how many have their first, second, … draft right
        while len(right) < self.most:
            powers = powers * chances
            right.append(float(powers.sum()))
        bounds = set(most[tired].tolist()) if tired.any() else ()
        lowest = {bound: float(chances[tired & (most == bound)].min()) for bound in bounds}  # by how many it may have

        def speed(depth: int) -> float:
            return (len(chances) + sum(right[:depth])) / ratios[depth]

        def is_fair(depth: int) -> bool:
            counts = ((chance, _worth(chance, min(depth, bound), least)) for bound, chance in lowest.items())
            gains = (sum(chance**place for place in range(1, count + 1)) for chance, count in counts)
            return not depth or all(1 + gain >= ratios[depth] for gain in gains)

        depths = range(self.most + 1)
        best = max(filter(is_fair, depths), key=speed)
        return best, "others" if lowest and not best and max(depths, key=speed) else "chance"

    def saw_step(self, num_rows: int, depth: int, seconds: float, context: float) -> None:
        """A step of rows that decode took so long.

        depth     drafts of the row that has most
        context   tokens of a row, in the mean
        """
        self._of(num_rows).saw(depth, seconds, context)

    def _ratios(self, num_rows: int) -> list[float]:
        """What steps of each depth take, of one without drafts: as it was with about so many rows, or else with the
        next best number; or else a little more than one less deep.
        """
        own = num_rows.bit_length()
        ratios: list[float | None] = [None] * (self.most + 1)
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

    def _of(self, num_rows: int) -> _Steps:
        size, count = num_rows.bit_length(), self.most + 1
        if size not in self._steps:
            self._steps[size] = _Steps([1.0, *[None] * self.most], [1.0, *[None] * self.most], [0] * count)
        return self._steps[size]
