"""Collects the findings of all oracles about one schedule. Reads the engine and its devices; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.testing.findings import Finding as Objection
from sidestream.testing.torture.clients import Clients
from sidestream.testing.torture.contents import contents_of
from sidestream.testing.torture.judge import (
    still_findable,
    unbalanced,
    wrong_answer,
    wrong_blocks,
    wrong_entries,
    wrong_states,
)
from sidestream.testing.torture.life import Life
from sidestream.testing.torture.oracle import Reference
from sidestream.testing.torture.workload import DAMAGE, Workload

ORACLES = ("checker", "tokens", "accept lengths", "content", "balance", "answered", "deadlock", "no progress", "error")
"""The checks of a schedule. Findings are sorted in this order.

checker         no two unordered accesses, no use outside a lease, and the other rules of `sidestream.testing.checker`
tokens          tokens, text, log-probabilities and finish reason equal the reference's; an aborted request has a prefix
                of its tokens
accept lengths  each row accepts as many drafts as if they were drafted from its own tokens; needed because a stale read
                (H19) changes the drafts, but not the text
content         every findable block in every tier holds the content of its key; no block from before a reset becomes
                findable; no two blocks that differ in a part of their identity have the same key (H14)
balance         at the end every pool is as it was at the start, and no request or transfer is kept
answered        every request ends exactly once, with a finish reason that is possible for it; when its client learns of
                the end, the engine has released all its resources (H24)
deadlock        every stream and every thread waits, each for another
no progress     the schedule does not end (H26)
error           the engine raised an exception
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of one oracle."""

    oracle: str
    text: str


class Verdict:
    """The findings about one schedule, without duplicates.

    contents     the contents of all keys, by the key function under test
    objections   the checker's findings as objects; `sorted_findings` returns them as text
    """

    def __init__(self, workload: Workload, reference: Reference) -> None:
        self._workload = workload
        self._reference = reference
        self.contents = contents_of(workload, reference)
        self._findings: dict[Finding, None] = {}
        self.objections: list[Objection] = []
        for text in self.contents.collisions:
            self.find("content", text)

    def find(self, oracle: str, text: str) -> None:
        """Add a finding."""
        self._findings[Finding(oracle, text)] = None

    def sorted_findings(self) -> tuple[Finding, ...]:
        """All findings, in the order of `ORACLES`."""
        return tuple(sorted(self._findings, key=lambda finding: ORACLES.index(finding.oracle)))

    def judge_idle(self, life: Life, clients: Clients) -> None:
        """Checks for an engine that still serves, after all requests and transfers have ended."""
        self.judge_balance(life, clients, "idle")
        for text in (
            *wrong_blocks(life.engine, life.device, self.contents),
            *wrong_states(life.engine, life.device, self.contents),
        ):
            self.find("content", text)
        self.judge_disk(life, "at the end")
        life.checker.check_idle()

    def judge_balance(self, life: Life, clients: Clients, when: str) -> None:
        """Check that nothing is in use or kept."""
        for text in unbalanced(life.engine, life.disk):
            self.find("balance", f"{when}: {text}")
        for name, count in (clients.border.left() if clients.border is not None else {}).items():
            self.find("balance", f"{when}: {count} {name} are kept")

    def judge_forgotten(self, life: Life) -> None:
        """Check that no block is findable: the cache was reset."""
        for text in still_findable(life.engine, life.disk):
            self.find("content", text)

    def judge_disk(self, life: Life, when: str) -> None:
        """Check that files hold the content of their keys, unless a fault damages files."""
        if life.disk is None:
            return
        damaged = any(fault.kind in DAMAGE for fault in self._workload.faults)
        for text in wrong_entries(life.disk, self.contents, damaged=damaged):
            self.find("content", f"{when}: {text}")

    def judge_answers(self, clients: Clients, *, over: bool) -> None:
        """Check that the clients received the reference's output.

        over   the engine is closed or dead: a prefix of the output is right, too
        """
        for (number, index), received in clients.received.items():
            versions = (0, 1) if (number, index) in clients.straddles else (clients.started[number],)
            ends = over or number in clients.gone
            faults = [
                list(wrong_answer(self._workload, number, received, samples[number, index], over=ends))
                for samples in (self._reference.samples[version] for version in versions)
            ]
            for oracle, text in min(faults, key=len):
                self.find(oracle, text)

    def judge_trace(self, life: Life) -> None:
        """Check that the checker has no finding for this engine, and that every published block held its key's
        content and was not older than a reset.
        """
        for text in (*life.recorder.stale, *life.recorder.wrong):
            self.find("content", text)
        for finding in life.checker.findings:
            self.find("checker", str(finding))
            self.objections.append(finding)
