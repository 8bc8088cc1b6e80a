"""The clients of a schedule (one run of the torture test) send requests to the engine, abort requests, and check each
output as it arrives. They call the engine directly, or through front ends (`Border`) if the workload has any. H24 is a
hazard of docs/ordering.md. Called by the thread that runs the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proof.tokenizer import ToyTokenizer
from proof.torture.client_transport import Border
from proof.torture.engine_run import Life
from proof.torture.oracle import Sample, params_of
from proof.torture.workload import Workload
from sidestream.client.front_end import OutputProcessor
from sidestream.engine import Handle
from sidestream.errors import SidestreamError
from sidestream.types import Delta


class Clients:
    """The clients of one engine, until the engine is closed or crashes. After a restart, a new object serves the new
    engine.

    received   the output of each sample so far, by request number and sample number
    started    version of the weights that each request started with, by request number
    gone       numbers of the requests that were rejected, or whose front end died
    straddles  samples that had no output when new weights were announced: request number, sample number
    border     the front ends between clients and engine; None: there are none
    """

    def __init__(self, workload: Workload, life: Life, find: Callable[[str, str], None], *, weights: int) -> None:
        """`find` receives the oracle (name of a check) and the text of each finding. `weights` is the version of the
        model's weights.
        """
        self._workload = workload
        self._life = life
        self._find = find
        self._weights = weights
        self._handles: dict[int, Handle] = {}
        self._outputs: dict[int, OutputProcessor] = {}
        self._cut_off: set[int] = set()
        self.received: dict[tuple[int, int], Sample] = {}
        self.started: dict[int, int] = {}
        self.gone: set[int] = set()
        self.straddles: set[tuple[int, int]] = set()
        self.border: Border | None = None

    def connect(self) -> None:
        """Start the front ends, if the workload has any."""
        if self._workload.front_ends:
            self.border = Border(
                self._life.engine,
                front_ends=self._workload.front_ends,
                seed=self._workload.seed,
                tell=self._tell,
                fail=self._fail,
            )

    def disconnect(self) -> None:
        """End the front ends. Idempotent."""
        if self.border is not None:
            self.border.close()
            self.border = None

    # ------------------------------------------------------------------ actions

    def act(self, step: int, again: Sequence[int]) -> None:
        """Submit and abort the requests of this step. Requests in `again` are also submitted."""
        for number, asked in enumerate(self._workload.requests):
            if asked.at == step or number in again:
                self._submit(number)
            if asked.abort_at == step and (number, 0) in self.received:
                self._say(f"aborts request {number}")
                self._abort(number)
        if self.border is not None:
            self.border.turn()

    def hang_up(self) -> None:
        """Replace a front end, if there are any. The requests of the old front end count as aborted."""
        for number in self.border.hang_up() if self.border is not None else ():
            self.gone.add(number)
            for index in range(self._workload.requests[number].n):
                if self.received[number, index].reason is None:
                    self.received[number, index].reason = "abort"

    def announce_weights(self, weights: int) -> None:
        """Later requests start with these weights."""
        self._weights = weights
        self.straddles.update(
            who for who, received in self.received.items() if received.reason is None and not received.tokens
        )

    def _submit(self, number: int) -> None:
        asked = self._workload.requests[number]
        self._say(f"submits request {number}: prompt of {len(asked.prompt)}, at most {asked.max_tokens} out")
        for index in range(asked.n):
            self.received[number, index] = Sample([])
        self.started[number] = self._weights
        params = params_of(number, asked, vocab=self._workload.vocab)
        self._outputs[number] = OutputProcessor(ToyTokenizer(), params)
        if self.border is not None:
            self.border.submit(number, asked.prompt, params, priority=asked.priority, salt=asked.salt)
            return
        self._handles[number] = self._life.engine.submit(
            asked.prompt,
            params,
            lambda delta: self._tell(number, delta),
            priority=asked.priority,
            cache_salt=asked.salt,
        )

    def _abort(self, number: int) -> None:
        if self.border is None:
            self._life.engine.abort(self._handles[number])
            return
        for index in self.border.end(number):  # a client that has left receives no output
            self.received[number, index].reason = "abort"

    # ------------------------------------------------------------------ output

    def _tell(self, number: int, delta: Delta) -> None:
        """Receive output of one request, and check it. Without front ends, this is called inside the engine's step."""
        life, sample, who = self._life, self.received[number, delta.index], f"request {number}, sample {delta.index}"
        if delta.prompt_tokens != (length := len(self._workload.requests[number].prompt)):
            self._find("answered", f"{who} has {length} prompt tokens, its output counts {delta.prompt_tokens}")
        read = self._outputs[number].read(delta)
        if read is None:
            self._find("answered", f"{who} received output after its end ({sample.reason}): {delta.finish_reason}")
            return
        sample.take(read)
        if delta.finish_reason is None:
            return
        self._say(f"request {number} ends: {delta.finish_reason}")
        if self.border is not None or life.is_lost:
            return  # the counts below may differ: the engine has run further steps, or has failed
        if life.engine.unfinished != (left := self.num_waiting()):
            self._find(
                "answered",
                f"{who} received its end, and the engine counts {life.engine.unfinished} unfinished, not {left} (H24)",
            )
        if life.engine.parts.scheduler.get(self._handles[number].request_ids[delta.index]) is not None:
            self._find("answered", f"{who} received its end, and the scheduler still holds it (H24)")

    def _fail(self, number: int, error: SidestreamError, refused: bool) -> None:
        """Record that a request has ended: rejected by the engine (`refused`), or ended with its connection."""
        if refused:
            self.gone.add(number)
        for index in range(self._workload.requests[number].n):
            sample = self.received[number, index]
            if sample.reason is None:
                sample.reason, sample.error = ("abort" if refused else "error"), str(error)

    # ------------------------------------------------------------------ unfinished requests

    def num_waiting(self) -> int:
        """Number of samples that have not ended."""
        return sum(sample.reason is None for sample in self.received.values())

    def waiting(self) -> list[int]:
        """The request number of each sample that has not ended."""
        return [number for (number, _), sample in self.received.items() if sample.reason is None]

    def cut_off(self) -> None:
        """Record the unfinished requests before the engine is closed. Their clients repeat them, although the engine
        aborts them.
        """
        self._cut_off = set(self.waiting())

    def wanted(self) -> list[int]:
        """Numbers of the requests that clients repeat after a restart: all except those that were aborted or failed
        earlier.
        """
        left = {
            number
            for (number, _), sample in self.received.items()
            if sample.reason in ("abort", "error") and number not in self._cut_off
        }
        return sorted({number for number, _ in self.received} - left)

    def is_quiet(self) -> bool:
        """Whether all messages between front ends and engine have arrived."""
        return self.border is None or self.border.is_quiet

    def _say(self, text: str) -> None:
        self._life.recorder.say(text)
