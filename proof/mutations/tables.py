"""Rows of the mutation tables: mutations, and rules without one.

A row begins with what happens without the rule, then names the rule and the change that removes it:

    Fault("H9", "a load that failed counts as good").without("failed-load-is-a-miss", Never(), needs={"failing_load"})

`at` names the mark of the statement, if it is not the rule's name, because several rules share a statement; `also` has
the changes of other statements, if several prevent the same fault, so that only the removal of all is detected. A row
of a rule whose removal no schedule detects goes on with `.unseen(reason, test)`, or `.unreached(reason, test)`.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from proof.mutations.operators import Delete, Operator

_DELETE = Delete()

Feature = Literal[
    "abort",
    "bad_logits",
    "border",
    "cache_salts",
    "captured",
    "close",
    "corrupt_tier",
    "device_loss",
    "disk",
    "failing_copy",
    "failing_load",
    "failing_step",
    "failing_tier",
    "flipped_block",
    "full_queue",
    "grammar",
    "growing_tier",
    "hang_up",
    "hidden_states",
    "layer_groups",
    "logprobs",
    "meanwhile",
    "min_tokens",
    "offload",
    "penalties",
    "preempt",
    "priority",
    "rank_loss",
    "ranks",
    "reset",
    "restart",
    "sampling",
    "self_check",
    "shared_disk",
    "shared_memory",
    "slow_load",
    "slow_tier",
    "speculative",
    "states",
    "store",
    "swapped_files",
    "twins",
    "weights",
    "window",
]
"""The parts of a workload.

abort           clients end their requests, at any point
bad_logits      a step has logits that are not finite, computed from wrong KV
border          front ends stand between clients and engine
cache_salts     requests have different cache salts
captured        forward passes are captured and replayed
close           the engine closes while requests or transfers are unfinished
corrupt_tier    files of the disk tier are cut short, have a bit flipped, or exchange their names
device_loss     the device (of rank 0) accepts no work any more, or no copies, and the engine fails
disk            there is a disk tier
failing_copy    stores and loads raise; a load may raise after a part of it was copied
failing_load    the failing copies include loads, not only stores
failing_step    forward passes raise
failing_tier    disk reads and writes raise
flipped_block   a bit of a block flips in a file of the disk tier
full_queue      requests are refused because too many wait
grammar         a grammar allows a part of the tokens of an answer
growing_tier    host memory is pinned while the engine serves
hang_up         front ends disconnect and others take their place
hidden_states   drafts are made from hidden states
layer_groups    loads are split by groups of layers
logprobs        some requests ask for log-probabilities
meanwhile       requests arrive, and clients leave, while the engine waits for a step
min_tokens      some requests have a minimum length
offload         there is a host tier
penalties       some requests have penalties
preempt         the device pool is too small for the requests that run
priority        requests have several priorities
rank_loss       a rank is killed, and the engine fails
reset           the cache is reset while transfers are unfinished
restart         the engine ends and another one opens the same disk
sampling        penalties, biases and `min_tokens` change which tokens are drawn
self_check      steps run twice, and blocks in host memory have checksums
shared_disk     another engine uses the directory of the disk tier
shared_memory   the host tier is memory of a cache process, and another engine uses it
slow_load       loads take longer than steps
slow_tier       disk operations take longer than the deadline
speculative     tokens are drafted and verified
states          the model keeps recurrent state besides its KV
store           there is a tier in a store, where another engine has stored blocks, and values are damaged
swapped_files   files of the disk tier exchange their names
twins           two prompts have an equal block at the same place behind different blocks
weights         the weights are replaced, so blocks computed before are wrong
window          some layers have a sliding window
"""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one marked statement.

    mark   name in the comment of the statement: `# rule: step-leaves-its-fence`
    """

    mark: str
    operator: Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One wait, lease, check or publish-order rule, and the change that removes it.

    name         name of the rule
    hazard       key of `HAZARDS`: the fault that the rule prevents
    change       change of the marked statement; the default deletes the statement
    at           mark of the statement, if it is not `name`
    consequence  one sentence that says what happens without the rule
    needs        features that a workload needs to show the consequence; empty: requests share and reuse blocks
    also         changes of other statements
    """

    name: str
    hazard: str
    change: Operator = _DELETE
    at: str = ""
    consequence: str
    needs: frozenset[Feature] = frozenset()
    also: tuple[Change, ...] = ()

    @property
    def changes(self) -> tuple[Change, ...]:
        """All changes of the mutation, in order."""
        return (Change(self.at or self.name, self.change), *self.also)

    def unseen(self, reason: str, noticed_by: str = "") -> Equivalent:
        """The row of a rule whose removal no schedule detects: see `Equivalent`."""
        return Equivalent(self, reason, noticed_by)

    def unreached(self, reason: str, noticed_by: str) -> Equivalent:
        """The row of a rule whose fault no schedule reaches: see `Equivalent`."""
        return Equivalent(self, reason, noticed_by, unreached=True)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens without a rule, in one sentence, and its key in `HAZARDS`."""

    hazard: str
    consequence: str

    def without(
        self,
        name: str,
        change: Operator = _DELETE,
        *also: Change,
        at: str = "",
        needs: Set[Feature] = frozenset(),
    ) -> Mutation:
        """The mutation that removes the rule of this name: see `Mutation`."""
        return Mutation(
            name=name,
            hazard=self.hazard,
            change=change,
            at=at,
            consequence=self.consequence,
            needs=frozenset(needs),
            also=also,
        )


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A rule whose removal no schedule detects, because another rule prevents the same fault, because it only saves
    time, or because no schedule reaches the fault. `python -m proof torture --excuses` checks the rows.

    noticed_by   unit test that fails without the rule: file below `tests/`, two colons, function; empty: the mutation
                 has no observable effect
    unreached    no schedule reaches the fault, which `reason` describes: only `noticed_by` detects it
    """

    mutation: Mutation
    reason: str
    noticed_by: str = ""
    unreached: bool = False


@dataclass(frozen=True, slots=True)
class Exempt:
    """Code of one function that looks like a rule, but is no rule or is part of another rule.

    function   name of the function with its class: `Lease.extend`
    sites      the calls, attributes and keywords that look like a rule and are not in a marked statement; one entry for
               each occurrence
    """

    function: str
    sites: tuple[str, ...]
    reason: str
