"""Records the events of one schedule, and prints them as lines with one column per actor (the host, a stream or a
thread).

`Recorder` is a tracer (`sidestream_kv.Tracer`) that forwards all events to the order checker. It also finds keys
that are published after a cache reset, although their blocks were handed out before the reset. An objection is a
finding of the checker; an interleaving is the sequence of all events. Called by the actor whose turn it is, so the
order of calls is the order of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sidestream_kv.types import Accesses, Fence, Key
from sidestream_order import shadow
from sidestream_order.checker import Checker
from sidestream_order.findings import Finding

HOST = shadow.HOST
_MARGIN = 4
_GAP = 2
_MARKS = "AB"
shadow.hide_frames_of(__file__)


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One event of an actor.

    actor     name of the actor: `"host"`, or that of the stream or thread
    text      the event, in words
    fence     fence of the event's work, as `"stream:tick"`; "": no work
    memory    name of the memory of the event's ids (block or slot numbers), or of their pool if there is no memory; "":
              no ids
    spans     start and stop of the ids' bytes in `memory`
    objected  whether the checker made a finding at this event
    """

    actor: str
    text: str
    fence: str = ""
    memory: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    objected: bool = False

    def concerns(self, objection: Finding) -> bool:
        """Whether the line is shown with this finding: the event has no ids, overlaps the finding's bytes, or caused a
        finding.
        """
        here = self.memory == objection.memory and any(
            start < objection.stop and objection.start < stop for start, stop in self.spans
        )
        return not self.memory or here or self.objected


class Recorder:
    """Forwards all events to `checker`; records lines if `lines` is a list.

    judge     called when an id becomes findable, with its name, its memory, its bytes, its key, and whether its layers
              with a sliding window are missing; returns sentences about errors
    stale     sentences about ids that became findable although they were handed out before the last cache reset (hazard
              H8)
    wrong     sentences that `judge` returned
    failures  exceptions of work, each with the work's `stream:tick`
    """

    def __init__(
        self,
        checker: Checker,
        actor: Callable[[], str],
        lines: list[TraceLine] | None,
        judge: Callable[[str, str, slice, Key, bool], Iterable[str]] = lambda what, memory, where, key, partial: (),
    ) -> None:
        self._checker = checker
        self._actor = actor
        self._lines = lines
        self._taken: dict[tuple[str, int], int] = {}
        self._resets = 0
        self._seen: set[str] = set()
        self._memories: dict[str, tuple[str, int, int]] = {}
        self._objections = 0
        self._judge = judge
        self.stale: list[str] = []
        self.failures: list[tuple[str, BaseException]] = []
        self.wrong: list[str] = []

    def say(self, text: str, fence: str = "", memory: str = "", spans: Iterable[tuple[int, int]] = ()) -> None:
        """Add a line for the running actor. `spans` are byte ranges in `memory`, or ranges of ids if the pool has no
        memory.
        """
        if self._lines is not None:
            self._lines.append(TraceLine(self._actor(), text, fence, memory, tuple(spans)))

    def reset(self) -> None:
        """Note a cache reset: from now on, blocks that were handed out earlier must not become findable."""
        self._resets += 1

    # ------------------------------------------------------------------ Tracer

    def own_timeline(self, name: str) -> None:
        self._checker.own_timeline(name)

    def joined(self, name: str) -> None:
        self._checker.joined(name)

    def allocated(self, memory: str, num_bytes: int) -> None:
        self._checker.allocated(memory, num_bytes)

    def sent(self, channel: str, number: int) -> None:
        if self._lines is not None:
            self.say(f"sends {channel} {number}")
        self._checker.sent(channel, number)

    def received(self, channel: str, number: int) -> None:
        if self._lines is not None:
            self.say(f"receives {channel} {number}")
        self._checker.received(channel, number)

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        if self._lines is not None:
            self.say(f"submits {name_of(fence)} `{label}`", name_of(fence))
        self._checker.submitted(fence, accesses, label)
        self._mark()

    def waited(self, stream: str, fence: Fence) -> None:
        if self._lines is not None:
            self.say(f"waited for {name_of(fence)}")
        self._checker.waited(stream, fence)

    def started(self, fence: Fence) -> None:
        if self._lines is not None:
            self.say(f"begins {name_of(fence)}", name_of(fence))
        self._checker.started(fence)
        self._mark()

    def touched(self, stream: str, accesses: Accesses) -> None:
        before = len(self._checker.findings)
        self._checker.touched(stream, accesses)
        if self._lines is not None and len(self._checker.findings) > before:
            self.say("goes on: next layer")
        self._mark()

    def finished(self, fence: Fence) -> None:
        if fence.failure is not None:
            self.failures.append((name_of(fence), fence.failure))
        if self._lines is not None:
            self.say(f"ends {name_of(fence)}{'' if fence.failure is None else ': it failed'}", name_of(fence))
        self._checker.finished(fence)
        self._mark()

    def observed(self, fence: Fence) -> None:
        if self._lines is not None and name_of(fence) not in self._seen:
            self._seen.add(name_of(fence))
            self.say(f"saw {name_of(fence)} done")
        self._checker.observed(fence)

    def host_touched(self, accesses: Accesses, label: str) -> None:
        if self._lines is not None:
            touched = accesses()
            self.say(f"`{label}`", "", touched[0].memory if touched else "", [(one.start, one.stop) for one in touched])
        self._checker.host_touched(accesses, label)
        self._mark()

    def stalled(self, reason: str) -> None:
        if self._lines is not None:
            self.say(f"waits: {reason}")
        self._checker.stalled(reason)
        self._mark()

    def backed(self, pool: str, memory: str, item_bytes: int, first: int = 0) -> None:
        self._memories[pool] = memory, item_bytes, first
        self._checker.backed(pool, memory, item_bytes, first)

    def took(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        for item in ids:
            self._taken[pool, item] = self._resets
        self._say_ids("takes", pool, ids, _tail("still in use by", after))
        self._checker.took(pool, ids, after)
        self._mark()

    def shared(self, pool: str, ids: Sequence[int]) -> None:
        self._say_ids("shares", pool, ids)
        self._checker.shared(pool, ids)
        self._mark()

    def released(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        self._say_ids("releases", pool, ids, _tail("behind", after))
        self._checker.released(pool, ids, after)
        self._mark()

    def published(self, pool: str, item: int, key: Key, *, partial: bool = False) -> None:
        if self._taken.get((pool, item), self._resets) != self._resets:
            self.stale.append(
                f"{pool} {item} became findable as {key.hex()[:8]}, but holds content from before the cache was reset"
            )
        if pool in self._memories:
            memory, size, first = self._memories[pool]
            where = slice(first + item * size, first + (item + 1) * size)
            self.wrong.extend(self._judge(f"{pool} {item}", memory, where, key, partial))
        self._say_ids("publishes", pool, [item], f" as {key.hex()[:8]}" + ", partial" * partial)
        self._checker.published(pool, item, key, partial=partial)
        self._mark()

    def forgot(self, pool: str, ids: Sequence[int]) -> None:
        self._say_ids("forgets", pool, ids)
        self._checker.forgot(pool, ids)

    def _say_ids(self, verb: str, pool: str, ids: Sequence[int], tail: str = "") -> None:
        if self._lines is not None and ids:
            memory, size, first = self._memories.get(pool, (pool, 1, 0))
            spans = [(first + item * size, first + (item + 1) * size) for item in ids]
            self.say(f"{verb} {pool} {_short(ids)}{tail}", "", memory, spans)

    def _mark(self) -> None:
        """If the last event caused a finding, mark its line."""
        if self._lines and len(self._checker.findings) > self._objections:
            self._lines[-1] = dataclasses.replace(self._lines[-1], objected=True)
        self._objections = len(self._checker.findings)


def name_of(fence: Fence) -> str:
    """The fence as `stream:tick`."""
    return f"{fence.stream}:{fence.tick}"


def render(lines: Sequence[TraceLine], objection: Finding | None = None, *, width: int = 140) -> str:
    """All events as text: one line per event, one column per actor.

    With an objection, A and B mark its two pieces of work in the order of submission, `!` marks the event that caused a
    finding, and events on other ids are left out. Lines have at most `width` columns, unless a single text is wider.
    """
    shown = list(_joined(_marked(lines, objection)))
    if not shown:
        return ""
    actors = list(dict.fromkeys([HOST, *(line.actor for _, line in shown)]))
    starts = _columns(actors, [line for _, line in shown], width)
    head = [""]
    for actor in actors:
        head[0] = head[0].ljust(starts[actor]) + actor
    return "\n".join(head + [f"{mark:<{starts[line.actor]}}{line.text}".rstrip() for mark, line in shown])


def explain(objection: Finding) -> str:
    """The two pieces of work A and B of a race, and the missing order between them. Empty for findings that are no
    race.
    """
    if objection.kind != "race":
        return ""
    earlier, later = objection.works
    where = f"{objection.memory}[{objection.start}:{objection.stop}]"
    rows = zip(_MARKS, objection.works, objection.accesses, (objection.first, objection.second), strict=True)
    longest = max(map(len, objection.works))
    lines = [f"  {mark}  {work:<{longest}}  {access:<6} {where}, from {place}" for mark, work, access, place in rows]
    never = f"the host never saw {earlier} done" if later == HOST else f"{later.partition(':')[0]} never waited for it"
    return "\n".join([*lines, f"  missing: {earlier} ──▶ {later}; {never}, so B may also run first"])


def _marked(lines: Sequence[TraceLine], objection: Finding | None) -> Iterator[tuple[str, TraceLine]]:
    """The lines to show, each with its mark. The accesses of marked work are added to its first line."""
    works = [] if objection is None else [work for work in objection.works if work != HOST]
    marks = {
        work: _MARKS[objection.works.index(work)] if objection is not None and len(objection.works) > 1 else "*"
        for work in works
    }
    described = set[str]()
    for line in lines:
        if objection is not None and not line.concerns(objection):
            continue
        mark = f"{'!' if line.objected and objection is not None else ' '}{marks.get(line.fence, ' ')}"
        if line.fence in marks and line.fence not in described and objection is not None:
            described.add(line.fence)
            yield mark, dataclasses.replace(line, text=line.text + _accesses_of(objection, line.fence))
        else:
            yield mark, line


def _accesses_of(objection: Finding, work: str) -> str:
    """How `work` accesses the bytes of a finding, and, for B of a race, the fence that it did not wait for."""
    number = objection.works.index(work)
    if number >= len(objection.accesses):
        return ""
    accesses = f" {objection.accesses[number]} {objection.memory}[{objection.start}:{objection.stop}]"
    return f"{accesses}, not after {objection.works[0]}" if objection.kind == "race" and number == 1 else accesses


def _joined(lines: Iterator[tuple[str, TraceLine]]) -> Iterator[tuple[str, TraceLine]]:
    """Merge start and end of a piece of work into one line if no other event is between them."""
    held: tuple[str, TraceLine] | None = None
    for mark, line in lines:
        if held is not None:
            begun = held[1]
            if line.actor == begun.actor and line.fence == begun.fence and line.text.startswith("ends "):
                both = max(held[0], mark, key=lambda one: len(one.strip()))
                yield both, dataclasses.replace(line, text=line.text.replace("ends", "runs", 1))
                held = None
                continue
            yield held
            held = None
        if line.text.startswith("begins "):
            held = mark, line
        else:
            yield mark, line
    if held is not None:
        yield held


def _columns(actors: Sequence[str], lines: Sequence[TraceLine], width: int) -> dict[str, int]:
    """The start of each column. Columns are as wide as their longest text. If that does not fit into `width`, columns
    are moved to the left.

    A text may extend over the columns to its right, because each line holds one event.
    """
    longest = {actor: max([len(actor), *(len(line.text) for line in lines if line.actor == actor)]) for actor in actors}
    starts, at = {}, _MARGIN
    for actor in actors:
        starts[actor] = at
        at += longest[actor] + _GAP
    limit = width
    for number, actor in reversed(list(enumerate(actors))):
        floor = _MARGIN + sum(len(before) + _GAP for before in actors[:number])
        starts[actor] = max(floor, min(starts[actor], width - longest[actor], limit - len(actor) - _GAP))
        limit = starts[actor]
    return starts


def _tail(relation: str, fences: Sequence[Fence]) -> str:
    return f" {relation} {', '.join(map(name_of, fences))}" if fences else ""


def _short(ids: Sequence[int]) -> str:
    shown = ", ".join(str(item) for item in ids[:6])
    return f"{shown}, … ({len(ids)})" if len(ids) > 6 else shown
