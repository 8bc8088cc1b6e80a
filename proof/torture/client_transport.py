"""Connects the clients of a schedule to the engine through real front ends and a real server. All run in one thread,
joined by in-memory connections. A seed decides when bytes move, and how many. Connections lose no bytes, but front ends
may die.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proof.wire import Wire, WireLoop, WireSelector, wire_pair
from sidestream.client.base import OutputQueue
from sidestream.client.engine_server import EngineServer, engine_info
from sidestream.client.messages import Reply, decoder_of_requests
from sidestream.client.remote import RemoteClient
from sidestream.config import SamplingParams
from sidestream.engine import Engine, Handle
from sidestream.errors import SidestreamError
from sidestream.processes.frames import FrameEncoder
from sidestream.schedule.limits import CheckedRequest
from sidestream.types import Delta

_MOST_TURNS = 20_000
_UNBOUNDED = 1 << 30

Tell = Callable[[int, Delta], None]
"""Receives new output of a request: its number, and the output."""
Fail = Callable[[int, SidestreamError, bool], None]
"""Receives the error that ended a request: its number, the error, and whether the engine rejected the request."""


@dataclass(slots=True, eq=False)
class _Reader:
    """A client that reads the output of one request until all samples have ended.

    left      numbers of the samples that have not ended
    unread    numbers of the samples that the client has ended, once for each output that had arrived by then
    reading   the running read call
    until     the future that `reading` waits for
    """

    number: int
    answer: OutputQueue
    left: set[int]
    unread: list[int] = field(default_factory=list)
    reading: Coroutine[Any, Any, Delta] | None = None
    until: asyncio.Future[None] | None = None

    def read(self) -> Delta | None:
        """The next output, if it has arrived. Raises the error that ended the request."""
        if self.until is not None and not self.until.done():
            return None
        if self.reading is None:
            self.reading = self.answer.read()
        try:
            self.until = self.reading.send(None)
        except StopIteration as got:
            self.reading = self.until = None
            output: Delta = got.value
            return output
        except BaseException:
            self.reading = self.until = None
            raise
        return None

    def stop(self) -> None:
        """Stop reading."""
        if self.reading is not None:
            self.reading.close()


class _Seat:
    """One front end: its client, its event loop, and its readers."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.loop = WireLoop()
        self.client = RemoteClient.connect(wire.as_socket)
        self.readers: dict[int, _Reader] = {}

    def read(self, tell: Tell, fail: Fail) -> None:
        """Let every reader read the output that has arrived."""
        with self.loop.running():
            for reader in list(self.readers.values()):
                try:
                    while reader.left and (output := reader.read()) is not None:
                        if output.index in reader.unread:
                            reader.unread.remove(output.index)
                            continue
                        tell(reader.number, output)
                        if output.finish_reason is not None:
                            reader.left.discard(output.index)
                except SidestreamError as error:
                    reader.left.clear()
                    fail(reader.number, error, not self.client._closed)
                if not reader.left:
                    reader.stop()
                    del self.readers[reader.number]

    def stop(self) -> None:
        for reader in self.readers.values():
            reader.stop()
        self.readers.clear()


class Border:
    """The front ends of one engine, on the thread that runs it.

    step_error  the first error of an engine step that ran inside the call of a front end; None: there was none
    """

    def __init__(self, engine: Engine, *, front_ends: int, seed: int, tell: Tell, fail: Fail) -> None:
        self._rng = rng = random.Random(f"sidestream border {seed}")
        self._engine = engine
        self._tell = tell
        self._fail = fail
        self._share = rng.choice((0.5, 0.8, 1.0))
        self._capacity = rng.choice((256, 1024, _UNBOUNDED))
        self._selector = WireSelector(rng)
        owner, self._owner = wire_pair(rng, capacity=_UNBOUNDED)
        # A fixed process id: with a real id, the length of messages would depend on its digits, and a seed would not
        # repeat.
        info = msgspec.structs.replace(engine_info(engine, model="toy", model_name="toy"), pid=0)
        self._server = EngineServer(
            engine,
            info,
            owner.as_socket,
            encoder=FrameEncoder(),
            decoder=decoder_of_requests(),
            selector=self._selector,
        )
        self._runs_ahead = False
        self._turning = False
        self.step_error: Exception | None = None
        engine.enqueue = self._enqueue  # type: ignore[method-assign]
        self._seats = [self._sit() for _ in range(front_ends)]
        self._seat_of: dict[int, _Seat] = {}

    # ------------------------------------------------------------------ clients

    def submit(self, number: int, prompt: Sequence[int], params: SamplingParams, *, priority: int, salt: str) -> None:
        """Send a client's request through one of the front ends."""
        seat = self._seat_of[number] = self._rng.choice(self._seats)
        with seat.loop.running():
            answer = seat.client.submit(prompt, params, priority=priority, cache_salt=salt)
        seat.readers[number] = _Reader(number, answer, set(range(params.n)))

    def end(self, number: int) -> set[int]:
        """End a request as if its client had disconnected, or as if a stop string was found in one of its samples.
        Returns the numbers of the samples that end.
        """
        seat = self._seat_of[number]
        reader = seat.readers.get(number)
        if reader is None:
            return set()
        index = self._rng.choice((None, *range(reader.answer.num_samples))) if reader.answer.num_samples > 1 else None
        with seat.loop.running():
            seat.client.abort(reader.answer, self._rng.choice(("abort", "stop")), index=index)
        ended = set(reader.left) if index is None else reader.left & {index}
        reader.left -= ended
        reader.unread += [output.index for output in reader.answer._deltas if output.index in ended]
        return ended

    def hang_up(self) -> list[int]:
        """Close or kill a random front end, and replace it. Returns the numbers of its running requests."""
        place = self._rng.randrange(len(self._seats))
        seat = self._seats[place]
        numbers = list(seat.readers)
        seat.stop()
        if self._rng.random() < 0.5:
            seat.client.close()
        else:
            seat.wire.close()
        self._seats[place] = self._sit()
        return numbers

    def _sit(self) -> _Seat:
        theirs, ours = wire_pair(self._rng, capacity=self._capacity)
        self._server.attach(theirs.as_socket)
        ours.wait = lambda: self._server.run_once(0.0)
        return _Seat(ours)

    # ------------------------------------------------------------------ time

    def turn(self, *, between_steps: bool = False) -> None:
        """Let front ends, clients and the server each poll once, in random order; the seed decides which of them are
        left out.

        between_steps   True: the engine is not inside a step, so it may run further steps during this call
        """
        if self._turning:
            return  # called by an engine step inside a turn
        self._turning, self._runs_ahead, self._selector.share = True, between_steps, self._share
        try:
            self._look(self._share)
        finally:
            self._turning = self._runs_ahead = False

    def settle(self) -> bool:
        """Poll until all sent bytes have arrived. Returns False if they do not arrive after many polls."""
        self._selector.share = 1.0
        for _ in range(_MOST_TURNS):
            if self.is_quiet:
                return True
            self._look(1.0)
        return False

    def close(self) -> None:
        """Close the front ends and the server. The clients receive no more output."""
        for seat in self._seats:
            seat.stop()
        self._server.finish(Reply(0))

    def _look(self, share: float) -> None:
        actors = [lambda: self._server.run_once(0.0), *(seat.loop.turn for seat in self._seats)]
        actors += [lambda seat=seat: seat.read(self._tell, self._fail) for seat in self._seats]  # type: ignore[misc]
        self._rng.shuffle(actors)
        for actor in actors:
            if self._rng.random() < share:
                actor()

    def _enqueue(self, request: CheckedRequest, sink: Callable[[Delta], None], **more: Any) -> Handle:
        """Replaces `Engine.enqueue`: sometimes runs many steps before the server learns the request's id, as the engine
        thread could. An error of a step is kept in `step_error`: the server would take it for a rejection, or for the
        end of a front end.
        """
        handle = Engine.enqueue(self._engine, request, sink, **more)
        if self._runs_ahead and self.step_error is None and self._rng.random() < 0.1:
            try:
                for _ in range(self._rng.randint(1, 20)):
                    self._engine.step()
            except Exception as error:
                self.step_error = error
        return handle

    # ------------------------------------------------------------------ checks

    @property
    def is_quiet(self) -> bool:
        """Whether all messages have arrived, and clients have read all output."""
        wires = [end for seat in self._seats for end in (seat.wire, seat.wire.peer)]
        return (
            not any(wire.incoming and not wire.closed for wire in wires)
            and not any(seat.client._unsent for seat in self._seats)
            and not any(
                reader.answer._deltas or reader.answer._error
                for seat in self._seats
                for reader in seat.readers.values()
            )
            and not any(front_end.has_rest or front_end._columns.streams for front_end in self._server._front_ends)
            and len(self._server._front_ends) == sum(not seat.wire.closed for seat in self._seats)
        )

    def left(self) -> dict[str, int]:
        """Number of objects that front ends and server keep for requests, by name; empty if there are none."""
        kept: dict[str, Sized] = {}
        for place, seat in enumerate(self._seats):
            kept[f"streams of front end {place}"] = seat.client._streams
        for place, front_end in enumerate(self._server._front_ends):
            kept[f"tokens of connection {place}"] = front_end._columns.tokens
            for name in ("ids", "details", "unsent"):
                kept[f"{name} of connection {place}"] = getattr(front_end, f"_{name}")
        return {name: len(things) for name, things in kept.items() if things}
