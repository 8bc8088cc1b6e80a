"""Rules of what one request lets tiers do, of sessions, of quotas, and of reads for the queue. The torture test's
requests have no options, so unit tests detect the removal of these rules.
"""

from __future__ import annotations

from proof.mutations.operators import Always, Delete, Never, Operator, Rewrite
from proof.mutations.reasons import MESSAGE, PINS
from proof.mutations.tables import Equivalent, Exempt, Mutation

MUTATIONS = ()

_DELETE = Delete()


def _noticed(
    name: str, consequence: str, by: str, change: Operator = _DELETE, file: str = "engine/test_cache_options.py"
) -> Equivalent:
    mutation = Mutation(name=name, hazard="H26", change=change, consequence=consequence)
    test = f"{file}::test_{by}"
    return Equivalent(mutation, "no schedule has such a request", noticed_by=test, unreached=True)


EQUIVALENT = (
    _noticed(
        "request-bounds-its-loads",
        "a request waits for more KV than it allows",
        "a_request_loads_no_more_tokens_than_it_allows",
        Rewrite("request.may_load", "max"),
    ),
    _noticed(
        "request-names-the-tiers-that-it-reads",
        "a request waits for a tier that it does not name",
        "only_named_tiers_and_host_memory_are_read",
        Always(),
    ),
    _noticed(
        "request-bounds-its-stores",
        "KV that a request wants to keep out of tiers is stored",
        "a_request_stores_no_more_of_its_first_tokens_than_it_allows",
        Always(),
    ),
    _noticed(
        "session-holds-its-kv",
        "the KV of a conversation is evicted while its tools run",
        "a_session_keeps_its_kv_while_others_are_evicted",
        Rewrite("self._pins.move", "bool"),
    ),
    _noticed(
        "session-learns-its-pauses",
        "a session with long pauses holds its KV too short",
        "the_time_is_learned_from_the_pauses_of_the_session",
        Rewrite("_MARGIN * ", "0 * "),
    ),
    _noticed(
        "reads-for-the-queue-are-bounded",
        "requests in the queue read so much that they evict each other's blocks from host memory",
        "requests_in_the_queue_read_one_after_another_and_a_bounded_number_of_blocks",
        Never(),
        file="schedule/test_tiers.py",
    ),
    _noticed(
        "kv-beyond-a-quota-goes-first",
        "the requests of one key evict the KV of all others",
        "an_owner_beyond_its_quota_evicts_its_own_oldest_kv",
        file="engine/test_quotas.py",
    ),
    _noticed(
        "quota-spares-other-owners",
        "KV that another key uses is evicted because one key has used much",
        "kv_that_another_owner_used_is_spared",
        Rewrite("not self._num_holders", "len"),
        file="engine/test_quotas.py",
    ),
    _noticed(
        "closed-session-goes-first",
        "the KV of a conversation that has ended takes the place of others",
        "the_kv_of_a_closed_session_is_evicted_first",
    ),
)

_WEIGHTS = "keys of other weights are never found, so such a pin holds nothing"

_BOUNDED = "see reads-for-the-queue-are-bounded"

EXEMPT = (
    Exempt("Admission._read_ahead", ("state",), "a request that began, waits or has ended reads nothing ahead"),
    Exempt("TierLoads.may_read_ahead", ("state",), _BOUNDED),
    Exempt("Pins.move", ("add",), PINS),
    Exempt("TierPins.add", ("add", "add"), PINS),
    Exempt("TierPins.forget", ("forget", "forget"), PINS),
    Exempt("Engine._ended", ("ended", "ended", "ended"), MESSAGE),
    Exempt("Prefixes.ended", ("ended", "ended"), MESSAGE),
    Exempt("Sessions.ended", ("keys_version", "keys_version"), _WEIGHTS),
)
