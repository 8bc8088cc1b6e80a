"""The situations in which requests are asked again, and the search for wrong answers in them.

The first answer to a question, when no part of its prompt is cached, is its reference. Each round asks questions again
after something that may change what the server reuses. An answer that is too far from its reference is asked for again,
uncached, alone and beside others: if it is as near to one of these answers as they are to each other, it is no finding.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations

from sidestream.errors import ConfigError, SidestreamError
from sidestream.verify.endpoint import Answer, Ask, Endpoint, salted
from sidestream.verify.judge import UNMEASURED_TOLERANCE, Verdict, compare, tolerance_of

LONGEST = 512
"""Tokens of the longest prompt by default."""
_AT_ONCE = 8
_AGAIN = 2  # times that a wrong question is asked again
_UNCACHED = 4  # uncached answers, at once, with which a suspicious answer is compared
_SHORTER_TRIES = 3  # each with `_AT_ONCE` requests, for each length


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked.

    questions        different requests
    output_tokens    tokens of each answer
    block_tokens     tokens of the server's KV blocks: some prompts end exactly at one and at eight blocks
    longest          longest prompt, in tokens
    repeats          times that all questions are asked again at once: a rare fault needs many reused blocks to be seen
    pressure_tokens  tokens of unrelated prompts that shall evict the questions' KV
    pressure_s       no more of them are sent after this time
    restart          command that restarts the server and returns; empty: none
    seed             of all prompts; another seed asks other questions
    """

    questions: int = 20
    output_tokens: int = 8
    block_tokens: int = 16
    longest: int = LONGEST
    repeats: int = 6
    pressure_tokens: int = 65_536
    pressure_s: float = 20.0
    restart: str = ""
    restart_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        least = self.shortest(self.block_tokens, self.output_tokens)
        if self.longest < least:
            raise ConfigError(f"the longest prompt is {self.longest} tokens: eight blocks and an answer need {least}")
        for name in ("questions", "output_tokens", "block_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")

    @staticmethod
    def shortest(block_tokens: int, output_tokens: int) -> int:
        """The least value of `longest`: eight blocks and an answer."""
        return 8 * block_tokens + output_tokens + 1


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that rounding does not explain.

    expected    the reference
    distance    in nats, see `Comparison`
    repeats     of `asked_again` repetitions with the cache, how many were wrong as well
    """

    round: str
    ask: Ask
    expected: Answer
    got: Answer
    distance: float
    differs_at: int | None
    repeats: int
    asked_again: int


@dataclass(slots=True)
class Round:
    """What one situation showed. `reused`: prompt tokens that the server says it took from its cache; None if it says
    nothing. `note`: why the round was left out, or what else it showed.
    """

    name: str
    compared: int = 0
    rounding: int = 0
    farthest: float = 0.0
    reused: int | None = None
    note: str = ""
    wrong: list[Wrong] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """All rounds.

    tolerance   in nats
    salts       whether uncached answers could be asked for at any time, by a new `cache_salt`
    seed        of the prompts
    requests    number of requests sent
    """

    tolerance: float
    salts: bool
    seed: int
    requests: int = 0
    rounds: list[Round] = field(default_factory=list)

    @property
    def wrong(self) -> list[Wrong]:
        """All findings."""
        return [one for part in self.rounds for one in part.wrong]

    @property
    def smallest(self) -> Wrong | None:
        """The finding with the shortest prompt."""
        return min(self.wrong, key=lambda wrong: len(wrong.ask.prompt), default=None)


def verify(
    endpoint: Endpoint,
    plan: Plan,
    *,
    beside: Endpoint | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Ask the server in all situations.

    beside   a server of the same model that must answer alike, such as one without a cache or without drafts

    Raises SidestreamError if the server stops answering.
    """
    return _Run(endpoint, plan, beside, on_progress).run()


class _Run:
    def __init__(
        self, endpoint: Endpoint, plan: Plan, beside: Endpoint | None, on_progress: Callable[[str], None]
    ) -> None:
        self._endpoint = endpoint
        self._plan = plan
        self._beside = beside
        self._on_progress = on_progress
        self._random = random.Random(plan.seed)
        self._salts = 0
        self._references: dict[Ask, Answer] = {}
        self._report = Report(UNMEASURED_TOLERANCE, endpoint.salts, plan.seed)

    def run(self) -> Report:
        """All rounds, in an order in which each has what it needs."""
        questions = self._questions()
        if self._report.salts:
            self._measure_noise(questions)
        first = self._begin("first answers")
        for ask in questions:
            self._references[ask] = self._answer(ask, first)
        first.compared = len(questions)
        if first.reused and self._report.salts:
            first.note = "these prompts were cached already, so wrong references are possible: use another --seed"
        self._compared("repeated", questions)
        again = [one for _ in range(self._plan.repeats) for one in self._random.sample(questions, len(questions))]
        self._compared("repeated, at once", again, at_once=True)
        self._families("one block", 1)
        self._families("eight blocks", 8)
        self._growing()
        self._cancelled(questions)
        self._other_salts(questions)
        self._after("unrelated prompts", questions, self._press)
        self._after("a reset of the prefix cache", questions, self._reset)
        self._after("a restart", questions, self._restart)
        if self._beside is not None:
            self._compared("beside", questions, endpoint=self._beside)
        if self._report.wrong:
            self._shorter()
        return self._report

    # ------------------------------------------------------------------ questions

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(5, self._endpoint.vocabulary) for _ in range(count))

    def _questions(self) -> list[Ask]:
        """Prompts that end at, before and behind the borders of blocks, and long ones; every other one is sampled."""
        block = self._plan.block_tokens
        borders = [block, 8 * block, block + 1, 8 * block + 1, 2 * block - 1, 8 * block - 1]
        lengths = borders + [self._random.randint(block, self._plan.longest) for _ in range(self._plan.questions)]
        return [
            self._ask(self._tokens(length), number) for number, length in enumerate(lengths[: self._plan.questions])
        ]

    def _ask(self, prompt: tuple[int, ...], number: int) -> Ask:
        return Ask(prompt, self._plan.output_tokens, seed=number if number % 2 else None)

    def _fresh_salt(self) -> str:
        self._salts += 1
        return f"verify-{self._plan.seed}-{self._salts}-{self._random.getrandbits(48):x}"

    # ------------------------------------------------------------------ rounds

    def _measure_noise(self, questions: Sequence[Ask]) -> None:
        """Ask a few questions uncached, alone and at once: their distances are rounding."""
        self._on_progress("measuring the rounding of uncached answers")
        few = self._random.sample(questions, min(_AT_ONCE, len(questions)))
        alone = [self._uncached(ask) for ask in few]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            together = list(threads.map(self._uncached, few))
        self._report.requests += 2 * len(few)
        if any(answer.cached for answer in (*alone, *together)):  # they were not uncached, so they may be wrong
            self._report.salts = False
            return
        noise = [compare(first, second).distance for first, second in zip(alone, together, strict=True)]
        self._report.tolerance = tolerance_of(noise)

    def _uncached(self, ask: Ask) -> Answer:
        return self._endpoint.answer(salted(ask, self._fresh_salt()))

    def _families(self, name: str, blocks: int) -> None:
        """Questions that share a prefix of so many blocks, all at once."""
        part = self._begin(f"shared prefix of {name}, at once")
        shared, most = self._tokens(blocks * self._plan.block_tokens), min(32, self._plan.output_tokens)
        asks = [
            self._ask((*shared, *self._tokens(self._random.randint(1, most))), number) for number in range(_AT_ONCE)
        ]
        together = self._answers(asks, part)
        for ask, answer in zip(asks, together, strict=True):
            self._references[ask] = self._reference(ask)
            self._judge(part, ask, answer)

    def _reference(self, ask: Ask) -> Answer:
        self._report.requests += 1
        return self._uncached(ask) if self._report.salts else self._endpoint.answer(ask)

    def _growing(self) -> None:
        """A conversation: each prompt begins with the one before; then the same from the longest to the shortest."""
        part = self._begin("growing prompts")
        whole = self._tokens(self._plan.longest)
        step = max(1, self._plan.longest // 6)
        asks = [self._ask(whole[:stop], number) for number, stop in enumerate(range(step, len(whole) + 1, step))]
        for ask in asks:
            answer = self._answer(ask, part)
            self._references[ask] = self._reference(ask)
            self._judge(part, ask, answer)
        for ask in reversed(asks):
            self._judge(part, ask, self._answer(ask, part))

    def _cancelled(self, questions: Sequence[Ask]) -> None:
        """Clients leave at many moments, beside others that stay; then the same is asked again."""
        part = self._begin("after cancelled requests")
        few = questions[:_AT_ONCE]
        fresh = [self._ask(self._tokens(self._plan.longest // 2), number) for number in range(_AT_ONCE)]
        with ThreadPoolExecutor(2 * _AT_ONCE) as threads:
            leaving = [threads.submit(self._endpoint.abandon, ask, 0.02 * number) for number, ask in enumerate(fresh)]
            staying = [threads.submit(self._endpoint.answer, ask) for ask in few]
            for one in leaving:
                one.result()
            answers = [one.result() for one in staying]
        self._report.requests += len(few) + len(fresh)
        for ask, answer in zip(few, answers, strict=True):
            self._count(part, answer)
            self._judge(part, ask, answer)
        for ask in fresh:
            answer = self._answer(ask, part)
            self._references[ask] = self._reference(ask)
            self._judge(part, ask, answer)

    def _other_salts(self, questions: Sequence[Ask]) -> None:
        part = self._begin("another salt")
        if not self._endpoint.salts:
            part.note = "left out: the server does not know `cache_salt`"
            return
        salt = self._fresh_salt()
        for ask in questions[: _AT_ONCE // 2]:
            answer = self._answer(salted(ask, salt), part)
            if answer.cached:
                part.note = "tokens were reused although the salt is new: the server ignores or mixes salts"
            self._judge(part, ask, answer)

    def _press(self) -> tuple[bool, str]:
        """Send unrelated prompts, for a limited time."""
        deadline, sent = time.monotonic() + self._plan.pressure_s, 0
        while sent < self._plan.pressure_tokens and time.monotonic() < deadline:
            asks = [Ask(self._tokens(self._plan.longest), 1) for _ in range(_AT_ONCE)]
            self._answers(asks, Round(""))
            sent += len(asks) * self._plan.longest
        return True, f"they had {sent} tokens"

    def _reset(self) -> tuple[bool, str]:
        return (
            (True, "") if self._endpoint.reset() else (False, "left out: the server refuses POST /reset_prefix_cache")
        )

    def _restart(self) -> tuple[bool, str]:
        if not self._plan.restart:
            return False, "left out: give a command that restarts the server"
        try:
            # what it prints goes to standard error, because standard output may be JSON
            subprocess.run(self._plan.restart, shell=True, check=True, timeout=self._plan.restart_s, stdout=2)
        except subprocess.SubprocessError as error:
            raise SidestreamError(f"the restart failed: {error}") from error
        self._endpoint.wait(self._plan.restart_s)
        return True, ""

    def _after(self, name: str, questions: Sequence[Ask], act: Callable[[], tuple[bool, str]]) -> None:
        """Ask the questions after `act`, which returns whether it could be done, and a note."""
        self._on_progress(name)
        done, note = act()
        self._compared(f"after {name}", questions if done else ())
        self._report.rounds[-1].note = note

    # ------------------------------------------------------------------ answers and verdicts

    def _begin(self, name: str) -> Round:
        self._on_progress(name)
        self._report.rounds.append(Round(name))
        return self._report.rounds[-1]

    def _compared(
        self, name: str, questions: Sequence[Ask], *, at_once: bool = False, endpoint: Endpoint | None = None
    ) -> None:
        part = self._begin(name)
        if at_once:
            answers: Iterable[Answer] = self._answers(questions, part)
        else:
            answers = (self._answer(ask, part, endpoint) for ask in questions)
        for ask, answer in zip(questions, answers, strict=True):
            self._judge(part, ask, answer)

    def _answers(self, asks: Sequence[Ask], part: Round) -> list[Answer]:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            answers = list(threads.map(self._endpoint.answer, asks))
        self._report.requests += len(asks)
        for answer in answers:
            self._count(part, answer)
        return answers

    def _answer(self, ask: Ask, part: Round, endpoint: Endpoint | None = None) -> Answer:
        answer = (endpoint or self._endpoint).answer(ask)
        self._report.requests += 1
        self._count(part, answer)
        return answer

    def _count(self, part: Round, answer: Answer) -> None:
        if answer.cached is not None:
            part.reused = (part.reused or 0) + answer.cached

    def _judge(self, part: Round, ask: Ask, answer: Answer) -> None:
        expected = self._references[ask]
        found = compare(expected, answer)
        verdict = found.verdict(self._report.tolerance)
        part.compared += 1
        if verdict is Verdict.WRONG and self._is_noise(ask, answer):
            verdict = Verdict.ROUNDING
        if verdict is not Verdict.WRONG:
            part.rounding += verdict is Verdict.ROUNDING
            part.farthest = max(part.farthest, found.distance)
            return
        again = [self._answer(ask, Round("")) for _ in range(_AGAIN)]
        repeats = sum(compare(expected, one).distance > self._report.tolerance for one in again)
        part.wrong.append(Wrong(part.name, ask, expected, answer, found.distance, found.differs_at, repeats, _AGAIN))

    def _is_noise(self, ask: Ask, answer: Answer) -> bool:
        """Whether the answer is as near to one of several uncached ones as these are to each other."""
        if not self._report.salts:
            return False
        self._report.requests += _UNCACHED
        with ThreadPoolExecutor(_UNCACHED) as threads:  # in another batch than the reference
            uncached = [self._references[ask], *threads.map(self._uncached, [ask] * _UNCACHED)]
        noise = [compare(one, other).distance for one, other in combinations(uncached, 2)]
        return min(compare(one, answer).distance for one in uncached) <= tolerance_of(noise)

    def _shorter(self) -> None:
        """After a finding, look for one with a shorter prompt, of new tokens."""
        part, block = self._begin("shorter prompts, after a finding"), self._plan.block_tokens
        for length in (block + 1, 2 * block + 1, 4 * block + 1, 8 * block + 1):
            found = self._report.smallest
            if found is None or len(found.ask.prompt) <= length:
                return
            ask = self._ask(self._tokens(length), 0)
            self._references[ask] = self._reference(ask)
            for _ in range(_SHORTER_TRIES):
                for answer in self._answers([ask] * _AT_ONCE, part):
                    self._judge(part, ask, answer)
