"""How many tokens to draft for a row: as many as are likely enough to be right for what they cost. Pure: no clock; engine thread only.

A row's draft is worth its place in a flight if the chance that it is accepted exceeds what one more token of one row costs, as a share of what
a row costs without drafts: by then the flight yields more tokens a second with it than without. Both sides are measured.
"""

from __future__ import annotations

from dataclasses import dataclass

# Weight of the newest observation.
_FRESH = 0.1
_FRESH_S = 0.2
_FRESH_USUAL = 0.02
# Of a draft before anything was seen: optimistic, so that a short answer gets drafts too. One new request in so many begins with it whatever
# became of others, or nobody would see that they changed.
_HOPE = 0.8
_HOPEFUL_EVERY = 16
# What a draft is taken to cost until it was seen, and the least that is believed.
_FIRST_COST = 0.05
_LEAST_COST = 0.01
# Steps after which a row that drafts nothing tries one again; flights after which one goes without drafts to be measured, and after which, if
# drafts were too dear for everybody, all rows try together: what they cost shows only where most rows have some.
_PROBE_STEPS = 32
_MEASURE_FLIGHTS = 64
_RETRY_FLIGHTS = 256


@dataclass(slots=True)
class DraftRecord:
    """What became of one request's drafts.

    chance   that a draft behind accepted ones is accepted
    idle     steps since it drafted
    """

    chance: float = _HOPE
    idle: int = 0

    def saw(self, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` leading tokens were right: so many tries went well, and one more did not unless all did."""
        for right in _tries(drafted, accepted):
            self.chance += _FRESH * (right - self.chance)


def _tries(drafted: int, accepted: int) -> list[bool]:
    """What so many right drafts say, one by one."""
    return [True] * accepted + [False] * (accepted < drafted)


@dataclass(slots=True)
class _Seconds:
    """Of flights with about so many rows.

    plain    seconds without drafts; None: such a flight comes first
    cost     what a draft of each row adds, as a share of that; None: nobody knows
    drafted  flights with drafts since one was to go without
    dry      flights since most rows had drafts
    """

    plain: float | None = None
    cost: float | None = None
    drafted: int = 0
    dry: int = 0


class DraftPolicy:
    """Chooses how many drafts a row gets, between 0 and `most`. `adaptive` False: always as many as there may be.

    measuring   the flight that was prepared goes without drafts, to measure what that takes
    """

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        self.most = most
        self.adaptive = adaptive
        self._usual = _HOPE
        self._num_begun = 0
        self._seconds: dict[int, _Seconds] = {}
        self._now = _Seconds()
        self.measuring = self._retrying = False

    def newcomer(self) -> DraftRecord:
        """Of a new request, of which nothing is known but how others fared."""
        self._num_begun += 1
        return DraftRecord(max(self._usual, _HOPE) if self._num_begun % _HOPEFUL_EVERY == 1 else self._usual)

    def saw(self, record: DraftRecord, drafted: int, accepted: int) -> None:
        """What became of one request's drafts in a flight, see `DraftRecord.saw`."""
        record.saw(drafted, accepted)
        for right in _tries(drafted, accepted):
            self._usual += _FRESH_USUAL * (right - self._usual)

    def prepare(self, num_rows: int) -> None:
        """A flight is planned in which `num_rows` rows decode; `choose` is asked for each of them."""
        now = self._now = self._of(num_rows)
        self.measuring = now.plain is None or now.drafted >= _MEASURE_FLIGHTS
        self._retrying = not self.measuring and now.dry >= _RETRY_FLIGHTS
        if self.measuring:
            now.drafted = 0
        if self._retrying:
            now.dry = 0

    def choose(self, record: DraftRecord, *, most: int) -> int:
        """For one row of the flight that was prepared; `most`: what its own bounds leave."""
        most = min(most, self.most)
        if not self.adaptive or most <= 0:
            return max(most, 0)
        if self.measuring:
            return 0
        count, chance, cost = 0, record.chance, self._now.cost
        if cost is None or self._retrying:
            cost = _FIRST_COST
        while count < most and chance > cost:
            count, chance = count + 1, chance * record.chance
        record.idle = 0 if count else record.idle + 1
        if record.idle > _PROBE_STEPS:
            count, record.idle = 1, 0
        return count

    def saw_flight(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A flight of rows that decode took so long, with so many drafts in all.

        What drafts cost is seen where most rows have some: the cost of few is mostly that of drafting at all.
        """
        known = self._of(num_rows)
        known.dry = 0 if num_drafts >= num_rows else known.dry + 1
        if not num_drafts:
            known.plain = seconds if known.plain is None else known.plain + _FRESH_S * (seconds - known.plain)
            return
        known.drafted += 1
        if known.plain and num_drafts >= num_rows:
            added = max(_LEAST_COST, (seconds / known.plain - 1) / (num_drafts / num_rows))
            known.cost = added if known.cost is None else known.cost + _FRESH_S * (added - known.cost)

    def _of(self, num_rows: int) -> _Seconds:
        return self._seconds.setdefault(num_rows.bit_length(), _Seconds())
