"""The baseline for the server: the same requests to an engine without a server.

The engine runs in a separate process, so that the device's memory is free again when the process has ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Self

import typer

from bench.serving.answers import Answer, Measured, StepsSoFar
from bench.serving.workload import NEARLY, Loads, Workload
from sidestream.cli.declare import Command
from sidestream.cli.options import engine_config, options_of
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import Engine, Sink
from sidestream.errors import SidestreamError
from sidestream.types import Delta

if TYPE_CHECKING:
    from sidestream.llm import LLM

_PATIENCE_S = 300.0
_CLOSE_S = 60.0


def config_of(arguments: Sequence[str]) -> EngineConfig:
    """The engine's config, parsed from arguments of `sidestream serve`. Raises click's usage errors and ConfigError."""
    made: list[EngineConfig] = []
    app = typer.Typer()

    @app.command(cls=Command)
    @options_of(config=engine_config)
    def read(*, config: EngineConfig) -> None:
        made.append(config)

    app(list(arguments), standalone_mode=False)
    return made[0]


class EngineAlone:
    """An engine without a server, in a separate process. A context manager.

    The engine serves the same requests as the server, so the difference is the cost of the server.
    """

    def __init__(self, model: str, arguments: Sequence[str], *, text_of: int) -> None:
        """Load `model` with the engine options in `arguments`. Answers get text only in measurements with `text_of`
        clients.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_measure_in_child, args=(theirs, model, arguments, text_of))
        self._process.start()
        theirs.close()

    def measure(self, load: Loads) -> Measured:
        """Run `load`. Raises SidestreamError with the message of an error in the process, or if the process died."""
        try:
            self._pipe.send(load)
            done, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            raise SidestreamError(f"the baseline's process ended with code {code}: its error is above") from None
        if not done:
            raise SidestreamError(value)
        measured: Measured = value
        return measured

    def close(self) -> None:
        """End the process, which frees the device's memory. Idempotent."""
        self._pipe.close()
        self._process.join(_CLOSE_S)
        self._process.terminate()  # the process is alive here only after an interrupt
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _measure_in_child(pipe: Connection, model: str, arguments: Sequence[str], text_of: int) -> None:
    from sidestream.llm import LLM

    try:
        with LLM(model, config=config_of(arguments)) as llm, contextlib.suppress(EOFError):
            while True:
                pipe.send((True, _measured(llm, pipe.recv(), text_of)))
    except SidestreamError as error:
        pipe.send((False, str(error)))


def _measured(llm: LLM, load: Loads, text_of: int) -> Measured:
    _Loop(llm.engine, load.warm).run()
    loop = _Loop(llm.engine, load.loop).run()
    calm = _Calm(llm.engine, load.calm)
    at_once = calm.run()
    text = llm.tokenizer.detokenizer if load.loop.clients == text_of else None
    return Measured(
        tuple(asked.answer(text) for asked in loop),
        tuple(asked.answer(None) for asked in at_once),
        calm.begun,
        calm.nearly,
    )


@dataclass(slots=True, eq=False)
class _Asked:
    """One request: its tokens and their arrival times."""

    client: int
    round: int
    sent_ns: int
    on_end: Callable[[_Asked], None]
    times: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    ended_ns: int = 0

    def take(self, delta: Delta) -> None:
        """Called by the engine for each delta."""
        if delta.token_ids:
            self.times.append(time.perf_counter_ns())
            self.tokens += delta.token_ids
        if delta.finish_reason is not None:
            self.ended_ns = time.perf_counter_ns()
            self.error = delta.error
            self.on_end(self)

    def answer(self, detokenizer: Callable[[], object] | None) -> Answer:
        """The answer as a client of a server would have received it."""
        text = ""
        if detokenizer is not None:
            maker = detokenizer()
            text = "".join([*(maker.push(token) for token in self.tokens), maker.finish()])  # type: ignore[attr-defined]
        return Answer(self.client, self.round, self.sent_ns, tuple(self.times), self.ended_ns, len(self.tokens), text)


class _Loop:
    """A closed loop: when the engine thread has reported the end of a client's request, this thread sends the client's
    next request.
    """

    def __init__(self, engine: Engine, load: Workload) -> None:
        self._engine = engine
        self._load = load
        self._prompts = [
            [load.prompt(client, number) for number in range(load.rounds)] for client in range(load.clients)
        ]
        self._ended: SimpleQueue[_Asked] = SimpleQueue()
        self._silent = set(range(load.clients))  # clients that have received no token yet

    def run(self) -> list[_Asked]:
        """Run all requests until they have ended. Raises SidestreamError if a request fails."""
        asked = [self._ask(client, 0) for client in range(self._load.clients)]
        for _ in range(self._load.clients * self._load.rounds):
            try:
                ended = self._ended.get(timeout=_PATIENCE_S)
            except Empty:
                raise SidestreamError(f"no request of the benchmark ended within {_PATIENCE_S:g} s") from None
            if ended.error is not None:
                raise SidestreamError(f"a request of the benchmark failed: {ended.error}")
            if ended.round + 1 < self._load.rounds:
                asked.append(self._ask(ended.client, ended.round + 1))
        return asked

    def _ask(self, client: int, number: int) -> _Asked:
        asked = _Asked(client, number, time.perf_counter_ns(), self._ended.put)
        params = SamplingParams(max_tokens=self._load.output_tokens, temperature=0, ignore_eos=True)
        self._engine.submit(self._prompts[client][number], params, self._sink(asked))
        return asked

    def _sink(self, asked: _Asked) -> Sink:
        return asked.take


class _Calm(_Loop):
    """One request of each client, all sent at once. Records the engine's step histogram when all requests decode, and
    again when the first request has nearly ended.
    """

    begun: StepsSoFar | None = None
    nearly: StepsSoFar | None = None

    def _sink(self, asked: _Asked) -> Sink:
        silent, nearly_at = self._silent, int(self._load.output_tokens * NEARLY)

        def take(delta: Delta) -> None:
            silent.discard(asked.client)
            if not silent and self.begun is None:
                self.begun = self._steps()
            asked.take(delta)
            if self.nearly is None and len(asked.tokens) >= nearly_at:
                self.nearly = self._steps()

        return take

    def _steps(self) -> StepsSoFar:
        """The engine's step histogram now. Called on the engine thread."""
        histogram = self._engine.parts.metrics.snapshot().histograms["step_seconds"][()]
        return StepsSoFar(time.perf_counter_ns(), histogram.count, histogram.total)
