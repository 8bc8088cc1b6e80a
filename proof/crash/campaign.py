"""Runs the processes of a crash test, kills them at random moments, and counts what they report.

The calling process forks all others, so it has no thread of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import select
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from proof.crash.damage import damage_files, damage_store
from proof.crash.place import Place
from proof.crash.programs import FINDINGS, HANG_S, Report, examine, serve, serve_memory
from proof.store_servers import ValkeyServer
from proof.torture.run import where
from sidestream.errors import ConfigError

NUM_ENGINES = 3
KILLS_OF_A_ROUND = 20
"""After so many kills, all engines are killed, and every block is compared. Every second round damages files."""

_MOST_FINDINGS = 20
_DAMAGES_AT_REST = 4  # of blocks, which no engine overwrites before they are compared
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class CrashReport:
    """The result of a crash test.

    kills       by what was killed: `engine`, `cache`, `store`
    findings    number of findings by kind
    texts       the first findings
    damaged     files and values that were damaged
    refused     processes that refused a damaged directory by name
    answers     requests that were answered right
    tokens      prompt tokens of these that came from each tier
    verified    blocks that were compared with what their keys stand for
    has_store   whether there was a store
    """

    kills: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    damaged: int = 0
    refused: int = 0
    answers: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    verified: int = 0
    has_store: bool = False
    seconds: float = 0.0
    interrupted: bool = False


def crash(
    *,
    kills: int,
    seed: int = 0,
    first: bool = False,
    on_progress: Callable[[CrashReport], None] = lambda report: None,
) -> CrashReport:
    """Kill processes `kills` times, or a few times more. Blocks. An interrupt ends the test early. The store is left
    out if no server can be started. The calling process must have no other threads.

    seed          chooses requests and whom to kill, but not the moments
    first         end the test after the first round with a finding
    on_progress   called after each round

    Raises ConfigError for a number out of range.
    """
    if kills < 1:
        raise ConfigError(f"kills is {kills}: give a whole number from 1")
    report, start_s = CrashReport(has_store=ValkeyServer.why_none() is None), time.monotonic()
    with _campaign(seed, report) as campaign:
        try:
            while report.kills.total() < kills and not (report.findings.total() if first else report.findings["hang"]):
                campaign.round(min(KILLS_OF_A_ROUND, kills - report.kills.total()))
                report.seconds = time.monotonic() - start_s
                on_progress(report)
        except KeyboardInterrupt:
            report.interrupted = True
    report.seconds = time.monotonic() - start_s
    return report


@contextlib.contextmanager
def _campaign(seed: int, report: CrashReport) -> Iterator[_Campaign]:
    threads, level = torch.get_num_threads(), logging.getLogger("sidestream").level
    torch.set_num_threads(1)  # threads do not survive a fork
    logging.getLogger("sidestream").setLevel(logging.CRITICAL + 1)  # what is damaged and killed is logged
    root, store = Path(tempfile.mkdtemp(prefix="sidestream-crash-")), None
    try:
        store = ValkeyServer() if report.has_store else None
        with contextlib.closing(_Campaign(root, store, seed, report)) as campaign:
            yield campaign
    finally:
        if store is not None:
            store.close()
        shutil.rmtree(root)
        torch.set_num_threads(threads)
        logging.getLogger("sidestream").setLevel(level)


class _Child:
    """A forked process that reports lines of text."""

    def __init__(self, program: Callable[[Report], None]) -> None:
        self._pipe, theirs = os.pipe()
        self._rest = b""
        self.heard_s = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            _run(program, theirs)
        os.close(theirs)

    def fileno(self) -> int:
        return self._pipe

    def lines(self) -> list[str] | None:
        """What it has reported since the last call, which waits for the first line; None: it has ended."""
        data = os.read(self._pipe, 1 << 16)
        self.heard_s = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines] if data else None

    def kill(self) -> list[str]:
        """End it. Returns what it has reported meanwhile. Call it once."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        told: list[str] = []
        while (lines := self.lines()) is not None:
            told += lines
        os.close(self._pipe)
        return told


def _run(program: Callable[[Report], None], pipe: int) -> None:
    """Run a program in a forked child, which ends with its parent. Never returns."""

    def report(text: str) -> None:
        os.write(pipe, f"{' '.join(text.split())}\n".encode())

    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        program(report)
    except BaseException as error:
        report(f"finding error {type(error).__name__}: {error} ({where(error)})")
    finally:
        os._exit(0)


class _Campaign:
    """The processes. `store`: a server that is running; None: there is none."""

    def __init__(self, root: Path, store: ValkeyServer | None, seed: int, report: CrashReport) -> None:
        self._place = Place.make(root, "" if store is None else store.url, seed)
        self._store = store
        self._report = report
        self._rng = random.Random(seed)
        self._damages = False
        self._started = 0
        self._engines: list[_Child] = []
        self._cache = self._start_cache()

    def close(self) -> None:
        """End all processes."""
        for child in (*self._engines, self._cache):
            child.kill()

    # ------------------------------------------------------------------ rounds

    def round(self, kills: int) -> None:
        """Start engines, kill processes so often, then kill all engines, and compare every block."""
        self._engines += [self._start_engine() for _ in range(NUM_ENGINES)]
        for number in range(kills - NUM_ENGINES):
            self._let_pass(self._rng.randrange(8))
            if self._damages and self._rng.random() < 0.5:
                self._damage()
            self._kill_one()
            if not self._damages and number % 4 == 3:
                self._examine(alone=False)
        self._let_pass(self._rng.randrange(8))
        while self._engines:
            self._kill_engine(self._engines[0])
        if self._damages:
            for _ in range(_DAMAGES_AT_REST):
                self._report.damaged += damage_files(self._place.disk, self._rng, "segment-*")
        while self._damages:
            refused = self._report.refused
            self._examine(alone=True)  # which deletes what is damaged
            self._damages = self._report.refused > refused  # a witness of a new directory sees the store
        self._examine(alone=True)
        self._damages = self._report.kills.total() // KILLS_OF_A_ROUND % 2 == 1
        if self._damages:
            self._damage()

    def _let_pass(self, answers: int) -> None:
        """Wait for so many answers, and a moment."""
        until, begin_s = self._report.answers + answers, time.monotonic()
        while self._report.answers < until and time.monotonic() < begin_s + HANG_S:
            self._listen(1.0)
        self._listen(0.0)
        time.sleep(self._rng.uniform(0.0, 0.01))

    def _listen(self, timeout_s: float) -> None:
        """Take in what engines report. An engine that ends by itself is replaced."""
        readable, _, _ = select.select(self._engines, [], [], timeout_s)
        for engine in readable:
            if (lines := engine.lines()) is None:
                engine.kill()
                self._engines[self._engines.index(engine)] = self._start_engine()
            else:
                self._note(lines)
        for engine in self._engines:
            if time.monotonic() > engine.heard_s + HANG_S:
                self._find("hang", f"engine {engine.pid} reports nothing for {HANG_S:.0f} s")
                engine.heard_s = time.monotonic()

    def _note(self, lines: list[str]) -> None:
        report = self._report
        for line in lines:
            match line.split(" ", 2):
                case ["answers", *tiers]:
                    report.answers += 1
                    for tier in " ".join(tiers).split():
                        name, _, tokens = tier.partition("=")
                        report.tokens[name] += int(tokens)
                case ["verified", number]:
                    report.verified += int(number)
                case ["refused", *_] if self._damages and str(self._place.disk) in line:
                    report.refused += 1
                    shutil.rmtree(self._place.disk, ignore_errors=True)  # as the message says
                case ["refused", *_]:
                    self._find("error", line)
                case ["finding", kind, text] if kind in FINDINGS:
                    if kind != "unverified" or not self._damages:
                        self._find(kind, text)

    def _find(self, kind: str, text: str) -> None:
        self._report.findings[kind] += 1
        if len(self._report.texts) < _MOST_FINDINGS:
            self._report.texts.append(f"after {self._report.kills.total()} kills: {kind}: {text}")

    # ------------------------------------------------------------------ processes

    def _start_engine(self) -> _Child:
        self._started += 1
        seed = self._started
        return _Child(lambda report: serve(self._place, seed, report))

    def _start_cache(self) -> _Child:
        return _Child(lambda report: serve_memory(self._place))

    def _kill_one(self) -> None:
        chance = self._rng.random()
        if chance < 0.1:
            self._note(self._cache.kill())
            self._cache = self._start_cache()
            self._report.kills["cache"] += 1
        elif chance < 0.2 and self._store is not None:
            if self._rng.random() < 0.5:  # it does not answer, and then it is gone
                self._store.stall()
                self._let_pass(1)
            self._store.kill()
            self._let_pass(self._rng.randrange(2))
            self._store.start()
            self._report.kills["store"] += 1
        else:
            self._kill_engine(self._rng.choice(self._engines))
            self._engines.append(self._start_engine())

    def _kill_engine(self, engine: _Child) -> None:
        self._engines.remove(engine)
        self._note(engine.kill())
        self._report.kills["engine"] += 1

    def _damage(self) -> None:
        if self._store is not None and self._rng.random() < 0.3:
            self._report.damaged += damage_store(self._store.client(), self._rng)
        else:
            self._report.damaged += damage_files(self._place.disk, self._rng)

    def _examine(self, *, alone: bool) -> None:
        """Let a process of its own compare every block."""
        seed, until_s = self._started, time.monotonic() + HANG_S
        witness = _Child(lambda report: examine(self._place, seed, report, alone=alone))
        while True:
            if not select.select([witness], [], [], max(0.0, until_s - time.monotonic()))[0]:
                self._find("hang", f"no block can be compared within {HANG_S:.0f} s")
                break
            if (lines := witness.lines()) is None:
                break
            self._note(lines)
        self._note(witness.kill())
