"""Cooperative scheduling: exactly one thread runs at any moment, and a policy chooses the next thread.

The module handles actors (threads that take turns), not streams or work. An actor ends its turn at *points*. Then it
can run again at once, or when a condition holds, or at a virtual time. The same policy with the same seed gives the
same run on any machine: neither the system's scheduler nor a real clock has any influence.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sidestream_kv.errors import SidestreamError
from sidestream_order.sim.policies import HOST, Choice, Policy

# Virtual time that a point takes; sleeps are much longer.
_POINT_S = 1e-6
# After this number of turns in a row, host threads count as spinning. Without spinning, a full queue or a wait for work
# would have stopped them much earlier.
_SPIN_LIMIT = 100_000


class Deadlock(SidestreamError):
    """No actor can run, because each actor waits for another."""


class _Ended(BaseException):
    """Raised in an actor when its device is closed in the middle of its work, to end its thread."""


def _held() -> threading.Lock:
    """A locked lock. Used like a `threading.Semaphore`, which is slow Python code; one schedule uses 200 of them."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class Actor:
    """A thread that takes turns.

    ready     function that returns whether the actor can run; called at every point
    awaits    function that returns the name of the actor that this actor waits for, for messages and policies
    is_host   whether the actor is a host thread, whose polls of fences are reported to a tracer
    wake_s    virtual time from which the actor can run in any case
    leave     called when the actor's turn ends and the turn of another actor begins
    enter     called when the actor's next turn begins
    baton     lock that is free only while the turn is being passed to the actor
    """

    name: str
    ready: Callable[[], bool]
    awaits: Callable[[], str | None]
    is_host: bool = False
    wake_s: float | None = None
    thread: threading.Thread | None = None
    leave: Callable[[], None] | None = None
    enter: Callable[[], None] | None = None
    baton: threading.Lock = field(default_factory=_held)

    def can_go(self, now_s: float) -> bool:
        """Whether the actor can take a turn."""
        return self.ready() or (self.wake_s is not None and self.wake_s <= now_s)


class Watch(Protocol):
    """Is told about turns, and about actions that a tracer does not see."""

    def turn(self, actor: Actor) -> None:
        """The running actor has ended its turn, and `actor` begins one; it may be the same."""
        ...

    def polled(self, stream: str, tick: int, *, done: bool) -> None:
        """The running actor has read whether this fence is done."""
        ...

    def poisoned(self, memory: str, start: int, stop: int) -> None:
        """The running actor has overwritten bytes with poison."""
        ...


def _always() -> bool:
    return True


def _never() -> bool:
    return False


def _no_actor() -> None:
    return None


class Turns:
    """Decides which actor runs. The first actor is the host, which is the thread that made this object.

    now_s   virtual time
    points  number of decisions so far
    log     the chosen actor at each point where several actors could run
    watch   observer that is told about every turn; None: there is no observer
    """

    def __init__(self, policy: Policy) -> None:
        self.now_s = 0.0
        self.points = 0
        self.log: list[str] = []
        self.watch: Watch | None = None
        self._policy = policy
        self._host = Actor(HOST, _always, _no_actor, is_host=True)
        self._actors = [self._host]
        self._running = self._host
        self._failure: BaseException | None = None
        self._spins = 0
        self._ended = False

    def add(
        self,
        name: str,
        ready: Callable[[], bool],
        awaits: Callable[[], str | None],
        run: Callable[[], None],
        *,
        is_host: bool = False,
    ) -> Actor:
        """Start an actor on a new thread. `run` is called in the first turn; it calls `block` to end each turn."""
        actor = Actor(name, ready, awaits, is_host)
        self._actors.append(actor)

        def body() -> None:
            try:
                self._take(actor)
                run()
            except _Ended:
                pass
            except BaseException as error:  # raised by a tracer or a policy; a fence keeps errors of its work
                self._fail(actor, error)

        actor.thread = threading.Thread(target=body, name=f"sidestream-sim-{name}", daemon=True)
        actor.thread.start()
        return actor

    @property
    def current(self) -> Actor:
        """The actor whose turn it is, which is the caller."""
        return self._running

    @property
    def at_host(self) -> bool:
        """Whether the caller is a host thread."""
        return self._running.is_host

    def point(self) -> None:
        """Let the policy choose the next actor. The caller is one of the actors that can run."""
        self.block(_always, _no_actor)

    def sleep(self, seconds: float) -> None:
        """End the turn, and take the next turn after this virtual time."""
        self.block(_never, _no_actor, wake_s=self.now_s + seconds)

    def block(
        self, ready: Callable[[], bool], awaits: Callable[[], str | None], *, wake_s: float | None = None
    ) -> None:
        """End the turn, and take the next turn when `ready` returns True, or at `wake_s`.

        If the caller is the host, raises Deadlock if no actor can run, and any error that an actor has raised outside
        its work.
        """
        caller = self._running
        if self._ended and caller is not self._host:
            raise _Ended
        caller.ready, caller.awaits, caller.wake_s = ready, awaits, wake_s
        chosen = self._choose()
        if chosen is not caller:
            if caller.leave is not None:
                caller.leave()
            self._running = chosen
            chosen.baton.release()
            self._take(caller)
            if caller.enter is not None:
                caller.enter()
        caller.wake_s = None
        if caller is self._host and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def end(self) -> None:
        """End all actors except the host, and join their threads. Idempotent."""
        self._ended = True
        actors, self._actors = self._actors[1:], [self._host]
        for actor in actors:
            self._running = actor  # the actor unwinds during its turn
            # If the host was interrupted, the turn may have been passed to this actor already, and the lock is free.
            with contextlib.suppress(RuntimeError):
                actor.baton.release()
            if actor.thread is not None:
                actor.thread.join()
        self._running = self._host

    def needed(self) -> str | None:
        """The actor at the end of the chain of waits that begins at the host; None if there is no such chain."""
        names = {actor.name: actor for actor in self._actors}
        actor, seen = self._host, set[str]()
        while not actor.can_go(self.now_s):
            awaited = actor.awaits()
            if awaited is None or awaited in seen:
                return None
            seen.add(awaited)
            actor = names[awaited]
        return actor.name if actor is not self._host else None

    def _take(self, actor: Actor) -> None:
        actor.baton.acquire()
        if self._ended and actor is not self._host:
            raise _Ended

    def _fail(self, actor: Actor, error: BaseException) -> None:
        """End `actor`; the host raises `error` at once."""
        if not self._ended:
            self._failure = error
            self._actors.remove(actor)
            self._running = self._host
            self._host.baton.release()

    def _choose(self) -> Actor:
        self.points += 1
        self.now_s += _POINT_S
        chosen = self._decide()
        self._spins = self._spins + 1 if chosen.is_host and self._running.is_host else 0
        if self._spins > _SPIN_LIMIT:
            self._spins = 0
            self._failure = Deadlock(
                f"host threads took {_SPIN_LIMIT} turns in a row, the last of them {chosen.name}: a loop over polls "
                "must sleep, or wait for a fence"
            )
            return self._host  # the host raises the failure
        if self.watch is not None:
            self.watch.turn(chosen)
        return chosen

    def _decide(self) -> Actor:
        able, asleep = list[Actor](), list[Actor]()
        for actor in self._actors:
            if actor.can_go(self.now_s):
                able.append(actor)
            elif actor.wake_s is not None:
                asleep.append(actor)
        if not able:
            if not asleep:
                return self._give_up()
            first = min(asleep, key=lambda actor: actor.wake_s or 0.0)
            self.now_s = first.wake_s or 0.0
            return first
        if len(able) == 1 and not (asleep and self._host in asleep):
            return able[0]
        choice = Choice(tuple(actor.name for actor in able), self._running.name, self._host in asleep, self.needed)
        name = self._policy.choose(choice)
        self.log.append(name)
        chosen = next((actor for actor in able if actor.name == name), None)
        if chosen is None:  # the policy chose the host, which sleeps: let time pass
            self.now_s = self._host.wake_s or self.now_s
            return self._host
        return chosen

    def _give_up(self) -> Actor:
        waits = ", ".join(f"{actor.name} waits for {actor.awaits() or 'work'}" for actor in self._actors)
        self._failure = Deadlock(f"no actor can run: {waits}")
        return self._host
