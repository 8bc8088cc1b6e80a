"""How many tokens to draft for a row: as many as bring more than they cost. Pure: no clock; engine thread only.

What a flight with drafts takes is mostly a matter of how many the row that has most of them gets, its depth: a captured pass computes as many for every
row, and drafting is one pass after another. So the depth is chosen for a flight: the one with the most tokens a second, none if need be, by what flights
of each depth took and by how likely each row's drafts are to be right. Within it a row gets drafts as long as they are likely enough to be right.
Both sides are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    idle     flights with drafts since it had any
    """

    chance: float = _HOPE
    idle: int = 0


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


@dataclass(slots=True)
class _Rows:
    """Of a flight: how many rows decode, and how likely a draft of each is to be right."""

    count: int
    chances: list[float]

    def right(self, most: int) -> list[float]:
        """Which share of the rows would have its first, second, … draft right, in the mean."""
        right, powers = [sum(self.chances) / self.count], self.chances
        while len(right) < most:
            powers = list(map(mul, powers, self.chances))
            right.append(sum(powers) / self.count)
        return right


class DraftPolicy:
    """Chooses how many drafts a row gets, between 0 and `most`. `adaptive` False: always as many as there may be.

    measuring   the flight that was prepared goes without drafts, to measure what that takes
    """

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        self.most = most
        self.adaptive = adaptive
        self.measuring = False
        self._usual = _HOPE
        self._num_begun = 0
        self._flights: dict[int, _Flights] = {}
        self._rows = _Rows(0, [])
        self._num_rows = 0
        self._depth = most
        self._least = [_LEAST_CHANCE] * most  # chance above which a row gets its first, second, … draft

    def newcomer(self) -> DraftRecord:
        """Of a new request, of which nothing is known but how others fared."""
        self._num_begun += 1
        return DraftRecord(max(self._usual, _HOPE) if self._num_begun % _HOPEFUL_EVERY == 1 else self._usual)

    def saw(self, record: DraftRecord, drafted: int, accepted: int) -> None:
        """What became of one request's drafts in a flight: `accepted` of `drafted` leading tokens were right."""
        record.chance = _after(record.chance, drafted, accepted, _FRESH)
        self._usual = _after(self._usual, drafted, accepted, _FRESH_USUAL)

    def prepare(self, num_rows: int) -> None:
        """A flight is planned in which `num_rows` rows decode; `choose` is asked for those that may have drafts."""
        flights, rows = self._of(num_rows), self._rows
        self._num_rows = num_rows
        self.measuring = flights.seconds[0] is None or flights.drafted >= _MEASURE_FLIGHTS
        if self.measuring:
            self._depth = flights.drafted = 0
            return
        ratios = self._ratios(num_rows)
        # By the rows of the flight before: they are mostly the same.
        chances = rows.right(self.most) if rows.count else [self._usual ** (at + 1) for at in range(self.most)]
        self._depth = max(range(self.most + 1), key=lambda depth: (1 + sum(chances[:depth])) / ratios[depth])
        least = [min(max(_SHARE * (more - less), _LEAST_CHANCE), _MOST_CHANCE) for less, more in pairwise(ratios)]
        patience = _FIRST_TRY_FLIGHTS if flights.seconds[-1] is None else _RETRY_FLIGHTS
        if flights.shallow >= patience * ratios[-1]:
            self._depth, least = self.most, [_LEAST_CHANCE] * self.most
        self._least = [chance ** (1 / count) for count, chance in enumerate(least, 1)]
        flights.shallow = 0 if self._depth == self.most else flights.shallow + 1

    def choose(self, records: Sequence[DraftRecord], most: Sequence[int]) -> list[int]:
        """For the rows of the flight that was prepared; `most`: what their own bounds leave."""
        if not self.adaptive:
            return [max(0, min(each, self.most)) for each in most]
        chances = [record.chance for record in records]
        self._rows = _Rows(self._num_rows, chances)  # also where an end is near: it will be another's turn
        depth, least, counts = self._depth, self._least, [0] * len(chances)
        if not depth:
            return counts
        for at, (record, chance, each) in enumerate(zip(records, chances, most, strict=True)):
            count = depth if each > depth else each
            while count > 0 and chance <= least[count - 1]:
                count -= 1
            if count > 0:
                counts[at], record.idle = count, 0
            elif each > 0:
                record.idle += 1
                if record.idle > _PROBE_FLIGHTS:
                    counts[at], record.idle = 1, 0
        return counts

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
