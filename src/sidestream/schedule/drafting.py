"""How many tokens to draft for a row: as many as bring more than they cost. Pure: no clock; engine thread only.

What a flight with drafts takes is mostly a matter of how many the row that has most of them gets, its depth: a captured pass computes as many for every
row, and drafting is one pass after another. So the depth is chosen for a flight: the one with the most tokens a second, none if need be, by what flights
of each depth took and by how likely each row's drafts are to be right. Within it a row gets drafts as long as they are likely enough to be right.
Both sides are measured. A row whose own drafts fail waits for the others'; once that has cost it more than it may, no depth is chosen at which it loses more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul

# Weight of the newest observation; of what a flight takes also if it is the first one for long.
_FRESH = 0.1
_FRESH_S, _FRESH_AGAIN_S = 0.2, 0.5
_FRESH_USUAL = 0.02
# Of a draft before anything was seen: optimistic, so that a short answer gets drafts too. One new request in so many begins with it whatever
# became of others, or nobody would see that they changed.
_HOPE = 0.8
_HOPEFUL_EVERY = 16
# What a draft of each row is taken to add to a flight until it was seen, as a share of one without. In a flight, a row gets a draft that is likelier to
# be right than half of what that adds for each row, within bounds: not all of it is that row's.
_FIRST_COST = 0.05
_SHARE = 0.5
_LEAST_CHANCE, _MOST_CHANCE = 0.05, 0.5
# So many tokens a row may always be behind: what came of the last flights is known a step or two later.
_PATIENCE = 1.0
# Flights with drafts after which a row without any tries one; after which a flight goes without, to be measured; and flights less deep than may be
# after which one is as deep, times what that takes, so that trying costs less than a hundredth; fewer if it was never seen with so many rows.
_PROBE_FLIGHTS = 32
_MEASURE_FLIGHTS = 64
_RETRY_FLIGHTS = 128
_FIRST_TRY_FLIGHTS = 32


@dataclass(slots=True)
class DraftRecord:
    """What became of one request's drafts.

    chance   that a draft behind accepted ones is accepted
    idle     flights since it had any in which there were drafts, or would have been but for others
    behind   tokens that it would have more if nobody had been drafted for, less what is forgiven in each flight; below 0 it may lose some
    """

    chance: float = _HOPE
    idle: int = 0
    behind: float = 0.0


def _after(chance: float, drafted: int, accepted: int, fresh: float) -> float:
    """A mean with a weight of `fresh` for the newest try, after some that went well, and one more that did not unless all did."""
    chance = 1 - (1 - chance) * (1 - fresh) ** accepted
    return chance if accepted == drafted else chance * (1 - fresh)


@dataclass(slots=True)
class _Flights:
    """Of about so many rows.

    seconds   that flights of each depth take; None: nobody knows
    last      which flight was the last of each depth, of `count` that were seen
    drafted   with drafts, since one was to go without
    shallow   planned, since one was as deep as may be
    """

    seconds: list[float | None]
    last: list[int]
    count: int = 0
    drafted: int = 0
    shallow: int = 0

    def ratio(self, depth: int) -> float | None:
        """What a flight of this depth takes, of one without drafts; between depths that are known, in proportion. None: nobody knows."""
        plain = self.seconds[0]
        known = [at for at, seconds in enumerate(self.seconds) if seconds is not None]
        above = [at for at in known if at >= depth]
        if not plain or not above:  # 0: a clock that did not move
            return None
        low, high = max(at for at in known if at <= depth), above[0]
        left, right = self.seconds[low] or plain, self.seconds[high] or plain
        return (left + (right - left) * (depth - low) / max(1, high - low)) / plain


def _above(chances: Sequence[float]) -> list[float]:
    """What a row's chance must be above for its first, second, … draft, if the draft itself must be likelier to be right than `chances`."""
    return [chance ** (1 / count) for count, chance in enumerate(chances, 1)]


def _worth(chance: float, most: int, least: Sequence[float]) -> int:
    """How many drafts a row of this chance gets, of `most`; none or less if that is. `least`: see `_above`."""
    while most > 0 and chance <= least[most - 1]:
        most -= 1
    return most


def _right(chances: list[float], most: int) -> list[float]:
    """Which share of the rows would have its first, second, … draft right, in the mean."""
    right, powers = [sum(chances) / len(chances)], chances
    while len(right) < most:
        powers = list(map(mul, powers, chances))
        right.append(sum(powers) / len(chances))
    return right


class DraftPolicy:
    """Chooses how many drafts a row gets, between 0 and `most`. `adaptive` False: always as many as there may be.

    max_slowdown   with `adaptive`: share by which drafts may slow any row down, over its life
    reason         why rows of the flight that was chosen for go without drafts: `"measuring"` what that takes, `"others"` would lose more by
                   them than they may, or no `"chance"` that they pay
    """

    def __init__(self, most: int, *, adaptive: bool = True, max_slowdown: float = 0.015) -> None:
        self.most = most
        self.adaptive = adaptive
        self.max_slowdown = max_slowdown
        self.reason = ""
        self._usual = _HOPE
        self._num_begun = 0
        self._flights: dict[int, _Flights] = {}

    def newcomer(self) -> DraftRecord:
        """Of a new request, of which nothing is known but how others fared."""
        self._num_begun += 1
        return DraftRecord(max(self._usual, _HOPE) if self._num_begun % _HOPEFUL_EVERY == 1 else self._usual)

    def saw(self, record: DraftRecord, drafted: int, accepted: int) -> None:
        """What became of one request's drafts in a flight: `accepted` of `drafted` leading tokens were right."""
        record.chance = _after(record.chance, drafted, accepted, _FRESH)
        record.behind -= accepted
        self._usual = _after(self._usual, drafted, accepted, _FRESH_USUAL)

    def choose(self, records: Sequence[DraftRecord], most: Sequence[int]) -> list[int]:
        """For all rows that decode in a flight; `most`: what their own bounds leave, none or less for a row that is not to be drafted for."""
        if not self.adaptive:
            return [max(0, min(each, self.most)) for each in most]
        flights, ratios = self._of(len(records)), self._ratios(len(records))
        if flights.seconds[0] is None or flights.drafted >= _MEASURE_FLIGHTS:
            self.reason = "measuring"
            flights.drafted, counts = 0, [0] * len(records)
        else:
            counts = self._counts(records, most, flights, ratios)
        cost = ratios[max(counts)] - 1 - self.max_slowdown
        for record in records:
            record.behind += cost
        return counts

    def _counts(self, records: Sequence[DraftRecord], most: Sequence[int], flights: _Flights, ratios: Sequence[float]) -> list[int]:
        """As many as the best depth and their own chances give them."""
        chances = [record.chance for record in records]  # also where an end is near: it will be another's turn
        least = _above([min(max(_SHARE * (more - less), _LEAST_CHANCE), _MOST_CHANCE) for less, more in pairwise(ratios)])
        depth = self._depth(_right(chances, self.most), ratios, self._lowest(records, most), least)
        patience = _FIRST_TRY_FLIGHTS if flights.seconds[-1] is None else _RETRY_FLIGHTS
        if flights.shallow >= patience * ratios[-1]:
            depth, least = self.most, _above([_LEAST_CHANCE] * self.most)
        flights.shallow = 0 if depth == self.most else flights.shallow + 1
        counts = [0] * len(records)
        if not depth:
            if self.reason == "others":
                for record, each in zip(records, most, strict=True):
                    record.idle += each > 0
            return counts
        for at, (record, chance, each) in enumerate(zip(records, chances, most, strict=True)):
            count = _worth(chance, depth if each > depth else each, least)
            if count > 0:
                counts[at], record.idle = count, 0
            elif each > 0:
                record.idle += 1
                if record.idle > _PROBE_FLIGHTS:
                    counts[at], record.idle = 1, 0
        return counts

    def _lowest(self, records: Sequence[DraftRecord], most: Sequence[int]) -> dict[int, float]:
        """Of rows that may not lose more: the lowest chance, by how many drafts they may have."""
        lowest: dict[int, float] = {}
        for record, each in zip(records, most, strict=True):
            if record.behind > _PATIENCE:
                bound = max(0, min(each, self.most))
                lowest[bound] = min(record.chance, lowest.get(bound, 1.0))
        return lowest

    def _depth(self, right: Sequence[float], ratios: Sequence[float], lowest: Mapping[int, float], least: Sequence[float]) -> int:
        """With the most tokens a second, of those at which no row of `lowest` loses, by the drafts that it would get; says why if it is none."""

        def speed(depth: int) -> float:
            return (1 + sum(right[:depth])) / ratios[depth]

        def is_fair(depth: int) -> bool:
            counts = ((chance, _worth(chance, min(depth, bound), least)) for bound, chance in lowest.items())
            gains = (sum(chance**place for place in range(1, count + 1)) for chance, count in counts)
            return not depth or all(1 + gain >= ratios[depth] for gain in gains)

        depths = range(self.most + 1)
        best = max(filter(is_fair, depths), key=speed)
        self.reason = "others" if lowest and not best and max(depths, key=speed) else "chance"
        return best

    def saw_flight(self, num_rows: int, depth: int, seconds: float) -> None:
        """A flight of rows that decode took so long; `depth`: drafts of the row that has most."""
        flights = self._of(num_rows)
        known, weight = flights.seconds[depth], _FRESH_S
        flights.count += 1
        if flights.count - flights.last[depth] > _MEASURE_FLIGHTS:
            weight = _FRESH_AGAIN_S
        flights.last[depth] = flights.count
        flights.seconds[depth] = seconds if known is None else known + weight * (seconds - known)
        flights.drafted += depth > 0

    def _ratios(self, num_rows: int) -> list[float]:
        """What flights of each depth take, of one without drafts: as it was with about so many rows, or else with the next best number."""
        own = num_rows.bit_length()
        nearest = [self._flights[size] for size in sorted(self._flights, key=lambda size: abs(size - own))]
        seen = ((depth, (flights.ratio(depth) for flights in nearest)) for depth in range(self.most + 1))
        return [next((ratio for ratio in ratios if ratio is not None), 1 + _FIRST_COST * depth) for depth, ratios in seen]

    def _of(self, num_rows: int) -> _Flights:
        return self._flights.setdefault(num_rows.bit_length(), _Flights([None] * (self.most + 1), [0] * (self.most + 1)))
