"""Rules of declarations: work declares exactly the accesses that it makes."""

from __future__ import annotations

from proof.mutations.operators import Become, Delete, DropOperand, Operator, Rewrite, Value
from proof.mutations.tables import Equivalent, Exempt, Feature, Mutation


def _rule(name: str, change: Operator | None, lacks: str, *needs: Feature) -> Mutation:
    """A rule whose removal lets some work lack a declaration. change: None: delete the statement."""
    return Mutation(
        name=name,
        hazard="H23",
        change=Delete() if change is None else change,
        consequence=f"{lacks}, so the checker does not see a missing wait",
        needs=frozenset(needs),
    )


_WRITES = "(index + 1) * size > row.min_start"

MUTATIONS = (
    _rule(
        "windowed-layer-declares-what-it-reads",
        Value("blocks_before_window(row.min_start + size, window, size)"),
        "a layer with a sliding window does not declare the first block that it reads",
        "window",
    ),
    _rule(
        "step-declares-what-it-reads",
        Become(f"if {_WRITES}:\n    accesses.append(Access(memory, start, stop, write=True))"),
        "a step declares only the blocks that it writes",
    ),
    _rule(
        "each-row-declares-what-it-reads",
        Become(
            f"if row is not rows[-1] or {_WRITES}:\n    accesses.append(Access(memory, start, stop, write={_WRITES}))"
        ),
        "the last row of a step does not declare the blocks that it reads",
    ),
    _rule(
        "step-declares-all-that-it-writes",
        Become(f"accesses.append(Access(memory, start, stop - ({_WRITES}) * (stop - start) // 2, write={_WRITES}))"),
        "a step declares the first half of what it writes",
    ),
    _rule("step-declares-the-state-that-it-reads", None, "a step reads a state without a declaration", "states"),
    _rule("step-declares-the-states-that-it-writes", None, "a step writes states without a declaration", "states"),
    _rule(
        "step-declares-the-reserved-states",
        Value("[]"),
        "a step uses the zero state and the scratch state without a declaration",
        "states",
    ),
    _rule(
        "step-declares-its-scratch-block",
        None,
        "a step writes hidden states of no block without a declaration",
        "hidden_states",
    ),
    _rule(
        "step-declares-its-mailbox-entry",
        None,
        "a step writes its results without a declaration",
    ),
    _rule(
        "drafts-are-declared",
        None,
        "a step drafts without a declaration of the KV that it reads and writes",
        "speculative",
        "hidden_states",
    ),
    _rule(
        "gated-layer-is-declared",
        None,
        "a step that waits for loads reads and writes layers without a declaration",
        "offload",
    ),
    _rule(
        "gated-states-are-declared",
        None,
        "a step that waits for loads reads and writes states without a declaration",
        "offload",
        "states",
    ),
    _rule(
        "captured-layer-is-declared",
        None,
        "a captured pass that waits for loads reads and writes layers without a declaration",
        "captured",
        "offload",
    ),
    _rule(
        "captured-states-are-declared",
        None,
        "a captured pass that waits for loads reads and writes states without a declaration",
        "captured",
        "offload",
        "states",
    ),
    _rule("copy-declares-what-it-reads", Value("[]"), "a copy declares only what it writes", "offload"),
    _rule("copy-declares-what-it-writes", Value("reads"), "a copy declares only what it reads", "offload"),
    _rule(
        "disk-write-declares-its-entry",
        Value("[]"),
        "a disk write does not declare the entry of its grant",
        "disk",
    ),
    _rule(
        "disk-write-declares-its-slot",
        DropOperand("accesses"),
        "a disk write does not declare the slot that it reads",
        "disk",
    ),
    _rule(
        "disk-write-declares-its-victim",
        Value("[grant.entry]"),
        "a disk write does not declare the entry that it deletes",
        "disk",
    ),
    _rule(
        "disk-read-declares-its-entry",
        Value("list[Access]()"),
        "a disk read does not declare the entry that it reads",
        "disk",
    ),
    _rule(
        "disk-read-declares-its-slot",
        DropOperand("accesses"),
        "a disk read does not declare the slot that it writes",
        "disk",
    ),
    _rule(
        "disk-read-of-a-rank-declares-its-slot",
        Rewrite("self._slot_accesses(message.slot, write=True)", "[]"),
        "a disk read of a rank other than 0 does not declare the slot that it writes",
        "disk",
        "ranks",
    ),
    _rule(
        "disk-write-of-a-rank-declares-its-slot",
        Rewrite("self._slot_accesses(message.slot, write=False)", "[]"),
        "a disk write of a rank other than 0 does not declare the slot that it reads",
        "disk",
        "ranks",
    ),
)

EQUIVALENT: tuple[Equivalent, ...] = ()

EXEMPT: tuple[Exempt, ...] = ()
