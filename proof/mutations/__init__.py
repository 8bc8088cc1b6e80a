"""All rules about waits, leases, checks and the order of publication, by name, and a way to remove a rule from the
running code. For tests only.

A test that passes both with and without a rule does not test it:

    with applied(find("store-waits-for-step")):
        ...  # the real engine, without that rule

A comment `# rule: name` marks the statement of a rule in the product's code; its mutation names a change of the syntax
tree there. A new wait, lease or check needs a mark, and a row in the table of its part of the code, beside this file.

A schedule is one workload of the torture test, run in an order that a seed chooses.

MUTATIONS    rules whose removal some schedule must detect
EQUIVALENT   rules whose removal no schedule detects, each with the reason
EXEMPT       code that looks like such a rule but is not, each with the reason
ELSEWHERE    hazards without a rule in these tables, each with the reason
HAZARDS      the faults that the rules prevent, by number
"""

from __future__ import annotations

from proof.mutations import (
    adapters,
    cache_options,
    client,
    connectors,
    copies,
    cuda,
    declarations,
    device,
    engine,
    kv,
    loads,
    ranks,
    runner,
    schedule,
    shared_memory,
    shared_tiers,
    states,
    tier_io,
    tiers,
    windows,
)
from proof.mutations.hazards import HAZARDS
from proof.mutations.marks import product_marks
from proof.mutations.mechanism import applied, changed_functions, changed_trees, check_marks
from proof.mutations.tables import Change, Equivalent, Exempt, Feature, Mutation
from sidestream.errors import ConfigError
from sidestream_kv.config import unknown_name

__all__ = [
    "ELSEWHERE",
    "EQUIVALENT",
    "EXEMPT",
    "HAZARDS",
    "MUTATIONS",
    "Change",
    "Equivalent",
    "Exempt",
    "Feature",
    "Mutation",
    "applied",
    "changed_functions",
    "changed_trees",
    "check_marks",
    "find",
    "product_marks",
]

_TABLES = (
    kv,
    schedule,
    states,
    copies,
    loads,
    tier_io,
    tiers,
    shared_memory,
    shared_tiers,
    adapters,
    cache_options,
    runner,
    ranks,
    engine,
    client,
    connectors,
    device,
    cuda,
    declarations,
    windows,
)

MUTATIONS: tuple[Mutation, ...] = tuple(mutation for table in _TABLES for mutation in table.MUTATIONS)
EQUIVALENT: tuple[Equivalent, ...] = tuple(equivalent for table in _TABLES for equivalent in table.EQUIVALENT)
EXEMPT: tuple[Exempt, ...] = tuple(exempt for table in _TABLES for exempt in table.EXEMPT)

ELSEWHERE: dict[str, str] = {
    "H20": "each decision reads a shared flag once: `generation` of the offload worker, or its `abandoned`, which is "
    "never reset",
    "H35": "clients in schedules read immediately; unit tests check the bounds (`reader-that-falls-behind-is-aborted`, "
    "`front-end-that-falls-behind-is-cut-off`)",
}


def find(name: str) -> Mutation:
    """The mutation with this name, which may be an equivalent one. Raises ConfigError, which names the nearest known
    name.
    """
    known = {mutation.name: mutation for mutation in (*MUTATIONS, *(equivalent.mutation for equivalent in EQUIVALENT))}
    if name not in known:
        raise ConfigError(unknown_name("mutation", name, known))
    return known[name]
