"""Every wait, lease, check and publish-order rule by name, and the means to take it out of the running code. For tests
only.

A test that passes with a rule and with the rule taken out does not test the rule:

    with applied(find("store-waits-for-step")):
        ...  # the real engine, without that rule

MUTATIONS    rules whose absence some schedule must show
EQUIVALENT   rules that no schedule misses, each with the reason
EXEMPT       lines that look like such rules, each with the reason why they are none
ELSEWHERE    hazards without a rule in these rooms, and why
HAZARDS      what each number stands for

The tables lie beside this file, one for each room whose rules they hold. Adding a wait, a lease or a check to a room
means adding a row here.
"""

from __future__ import annotations

from sidestream.config import unknown_name
from sidestream.errors import ConfigError
from sidestream.testing.mutations import client, engine, kv, runner, schedule, tiers, transfer
from sidestream.testing.mutations.hazards import HAZARDS
from sidestream.testing.mutations.mechanism import (
    Edit,
    Equivalent,
    Exempt,
    Feature,
    Mutation,
    applied,
    changed_functions,
    source_of,
)

__all__ = [
    "ELSEWHERE",
    "EQUIVALENT",
    "EXEMPT",
    "HAZARDS",
    "MUTATIONS",
    "Edit",
    "Equivalent",
    "Exempt",
    "Feature",
    "Mutation",
    "applied",
    "changed_functions",
    "find",
    "source_of",
]

_ROOMS = (kv, schedule, transfer, tiers, runner, engine, client)

MUTATIONS: tuple[Mutation, ...] = tuple(mutation for room in _ROOMS for mutation in room.MUTATIONS)
EQUIVALENT: tuple[Equivalent, ...] = tuple(equivalent for room in _ROOMS for equivalent in room.EQUIVALENT)
EXEMPT: tuple[Exempt, ...] = tuple(exempt for room in _ROOMS for exempt in room.EXEMPT)

ELSEWHERE: dict[str, str] = {
    "H13": "there is one rank",
    "H20": "what threads share besides messages is read once where it decides: the offload worker's `generation`, and `abandoned`, which stays set",
    "H35": "clients of schedules read what is there; unit tests miss the bounds when they are taken out (`reader-that-falls-behind-is-aborted`, "
    "`front-end-that-falls-behind-is-cut-off`)",
}


def find(name: str) -> Mutation:
    """The mutation of that name, equivalent ones included. Raises ConfigError that names the nearest known one."""
    known = {mutation.name: mutation for mutation in (*MUTATIONS, *(equivalent.mutation for equivalent in EQUIVALENT))}
    if name not in known:
        raise ConfigError(unknown_name("mutation", name, known))
    return known[name]
