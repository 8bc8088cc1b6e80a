"""Collects the findings of all oracles (checks) about one schedule. Reads the engine and its devices; changes nothing.
Codes such as H24 name the hazards of docs/ordering.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from proof.torture.clients import Clients
from proof.torture.contents import contents_of
from proof.torture.engine_run import Life
from proof.torture.judge import (
    disagreements,
    still_findable,
    stray_records,
    unbalanced,
    unended,
    wrong_answer,
    wrong_blocks,
    wrong_entries,
    wrong_states,
)
from proof.torture.oracle import Reference
from proof.torture.workload import Workload
from sidestream_order.findings import Finding as Objection

ORACLES = (
    "checker",
    "tokens",
    "accept lengths",
    "content",
    "events",
    "evictions",
    "hits",
    "self-check",
    "balance",
    "answered",
    "deadlock",
    "no progress",
    "error",
)
"""The names of all oracles. Findings are sorted in this order.

checker         no two unordered accesses, no use outside a lease, and the other rules of `sidestream_order.checker`
tokens          tokens, text, log-probabilities and finish reason equal the reference's; an aborted request has a prefix
                of its tokens
accept lengths  each row accepts as many drafts as a proposer with correct inputs would get accepted. A stale input
                (H19) makes worse drafts, which does not change the text
content         every findable block in every tier holds the content of its key; after a cache reset, no block from
                before it becomes findable; blocks with different content never have the same key (H14)
events          a router that follows the KV events knows exactly the findable keys of each tier, after each batch and
                whenever the engine rests
evictions       in each tier, the least recently used block is evicted first
hits            an admitted request reuses every block that is findable and worth its load
self-check      the two runs of a step agree, and every block in host memory matches its checksum, unless a fault makes
                logits NaN
balance         at the end, all blocks and slots are free, no object of a request or transfer is kept, and the files on
                disk are those of the findable entries
answered        every request ends exactly once, with a possible finish reason; before its client learns of the end, the
                engine has released the request's resources (H24)
deadlock        no stream and no thread can continue, because each waits for another
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

    contents     the expected content of each key; keys are computed by the code under test
    objections   the checker's findings as objects; `sorted_findings` returns them as text
    """

    def __init__(self, workload: Workload, reference: Reference) -> None:
        self._workload = workload
        self._reference = reference
        self._damaged = "corrupt_tier" in workload.features
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
        """Apply the checks for an engine that is still open, after all requests and transfers have ended."""
        life.look_again()
        self.judge_balance(life, clients, "idle")
        for text in (
            *wrong_blocks(life.engine, life.device, self.contents),
            *wrong_states(life.engine, life.device, self.contents),
        ):
            self.find("content", text)
        self.judge_disk(life, "at the end")
        life.checker.check_idle()

    def judge_balance(self, life: Life, clients: Clients, when: str) -> None:
        """Check that no block, slot or request object is still in use. `when` is named in the findings."""
        for text in (*unbalanced(life.engine, life.disk), *life.surroundings.leased()):
            self.find("balance", f"{when}: {text}")
        self.judge_ended(life, clients, when)

    def judge_files(self, life: Life) -> None:
        """Check that the disk holds exactly the findable entries: the engine is closed."""
        if life.disk is None or self._workload.shared_disk:
            return
        for text in stray_records(life.disk, damaged=self._damaged):
            self.find("balance", f"closed: {text}")

    def judge_ended(self, life: Life, clients: Clients, when: str) -> None:
        """Check that no request is left in the engine's counts and streams, nor at the front ends. This also holds for
        an engine whose device is lost. `when` is named in the findings.
        """
        for text in unended(life.engine):
            self.find("balance", f"{when}: {text}")
        for name, count in (clients.border.left() if clients.border is not None else {}).items():
            self.find("balance", f"{when}: {count} {name} are kept")

    def judge_forgotten(self, life: Life) -> None:
        """Check that no block is findable: the cache was reset."""
        for text in still_findable(life.engine, None if self._workload.shared_disk else life.disk):
            self.find("content", text)

    def judge_disk(self, life: Life, when: str) -> None:
        """Check that the files of the disk tier hold the content of their keys. If a fault damages files, a file that
        cannot be read is no finding.
        """
        if life.disk is None:
            return
        for text in wrong_entries(life.disk, self.contents, damaged=self._damaged):
            self.find("content", f"{when}: {text}")

    def judge_answers(self, clients: Clients, *, over: bool) -> None:
        """Check that the clients received the reference's output.

        over   the engine is closed or dead, so a prefix of the output is also correct
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
        """Add the findings that were made during the run: by the order checker, and about blocks with wrong or
        outdated content at their publication.
        """
        for text in (*life.recorder.stale, *life.recorder.wrong):
            self.find("content", text)
        for oracle, texts in (("events", life.events.wrong), ("evictions", life.order.wrong), ("hits", life.lost)):
            for text in texts:
                self.find(oracle, text)
        for text in () if "bad_logits" in self._workload.features else disagreements(life.engine):
            self.find("self-check", text)
        for finding in life.checker.findings:
            self.find("checker", str(finding))
            self.objections.append(finding)
