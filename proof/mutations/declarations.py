"""Rules of declarations: work declares exactly the accesses that it makes."""

from __future__ import annotations

from proof.mutations.operators import Become, DropOperand, Rewrite, Value
from proof.mutations.tables import Equivalent, Exempt, Fault


def _undeclared(lack: str) -> Fault:
    return Fault("H23", f"{lack}, so the checker does not see a missing wait")


_WRITES = "(index + 1) * size > row.min_start"

MUTATIONS = (
    _undeclared("a layer with a sliding window does not declare the first block that it reads").without(
        "windowed-layer-declares-what-it-reads",
        Value("blocks_before_window(row.min_start + size, window, size)"),
        needs={"window"},
    ),
    _undeclared("a step declares only the blocks that it writes").without(
        "step-declares-what-it-reads",
        Become(f"if {_WRITES}:\n    accesses.append(Access(memory, start, stop, write=True))"),
    ),
    _undeclared("the last row of a step does not declare the blocks that it reads").without(
        "each-row-declares-what-it-reads",
        Become(
            f"if row is not rows[-1] or {_WRITES}:\n    accesses.append(Access(memory, start, stop, write={_WRITES}))"
        ),
    ),
    _undeclared("a step declares the first half of what it writes").without(
        "step-declares-all-that-it-writes",
        Become(f"accesses.append(Access(memory, start, stop - ({_WRITES}) * (stop - start) // 2, write={_WRITES}))"),
    ),
    _undeclared("a step reads a state without a declaration").without(
        "step-declares-the-state-that-it-reads", needs={"states"}
    ),
    _undeclared("a step writes states without a declaration").without(
        "step-declares-the-states-that-it-writes", needs={"states"}
    ),
    _undeclared("a step uses the zero state and the scratch state without a declaration").without(
        "step-declares-the-reserved-states", Value("[]"), needs={"states"}
    ),
    _undeclared("a step writes hidden states of no block without a declaration").without(
        "step-declares-its-scratch-block", needs={"hidden_states"}
    ),
    _undeclared("a step writes its results without a declaration").without("step-declares-its-mailbox-entry"),
    _undeclared("a step drafts without a declaration of the KV that it reads and writes").without(
        "drafts-are-declared", needs={"speculative", "hidden_states"}
    ),
    _undeclared("a step that waits for loads reads and writes layers without a declaration").without(
        "gated-layer-is-declared", needs={"offload"}
    ),
    _undeclared("a step that waits for loads reads and writes states without a declaration").without(
        "gated-states-are-declared", needs={"offload", "states"}
    ),
    _undeclared("a captured pass that waits for loads reads and writes layers without a declaration").without(
        "captured-layer-is-declared", needs={"captured", "offload"}
    ),
    _undeclared("a captured pass that waits for loads reads and writes states without a declaration").without(
        "captured-states-are-declared", needs={"captured", "offload", "states"}
    ),
    _undeclared("a copy declares only what it writes").without(
        "copy-declares-what-it-reads", Value("[]"), needs={"offload"}
    ),
    _undeclared("a copy declares only what it reads").without(
        "copy-declares-what-it-writes", Value("reads"), needs={"offload"}
    ),
    _undeclared("a disk write does not declare the entry of its grant").without(
        "disk-write-declares-its-entry", Value("[]"), needs={"disk"}
    ),
    _undeclared("a disk write does not declare the slot that it reads").without(
        "disk-write-declares-its-slot", DropOperand("accesses"), needs={"disk"}
    ),
    _undeclared("a disk write does not declare the entry that it deletes").without(
        "disk-write-declares-its-victim", Value("[grant.entry]"), needs={"disk"}
    ),
    _undeclared("a disk read does not declare the entry that it reads").without(
        "disk-read-declares-its-entry", Value("list[Access]()"), needs={"disk"}
    ),
    _undeclared("a disk read does not declare the slot that it writes").without(
        "disk-read-declares-its-slot", DropOperand("accesses"), needs={"disk"}
    ),
    _undeclared("a disk read of a rank other than 0 does not declare the slot that it writes").without(
        "disk-read-of-a-rank-declares-its-slot",
        Rewrite("self._slot_accesses(message.slot, write=True)", "[]"),
        needs={"disk", "ranks"},
    ),
    _undeclared("a disk write of a rank other than 0 does not declare the slot that it reads").without(
        "disk-write-of-a-rank-declares-its-slot",
        Rewrite("self._slot_accesses(message.slot, write=False)", "[]"),
        needs={"disk", "ranks"},
    ),
)

EQUIVALENT: tuple[Equivalent, ...] = ()

EXEMPT: tuple[Exempt, ...] = ()
