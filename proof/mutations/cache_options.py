"""Rules of what one request lets tiers do, of sessions, of quotas, and of reads for the queue. The torture test's
requests have no options, so unit tests detect the removal of these rules.
"""

from __future__ import annotations

from proof.mutations.operators import Always, Never, Rewrite
from proof.mutations.reasons import MESSAGE, PINS
from proof.mutations.tables import Exempt, Fault

MUTATIONS = ()

_ENGINE = "engine/test_cache_options.py::test_"
_UNSEEN = "no schedule has such a request"

EQUIVALENT = (
    Fault("H26", "a request waits for more KV than it allows")
    .without("request-bounds-its-loads", Rewrite("request.may_load", "max"))
    .unreached(_UNSEEN, _ENGINE + "a_request_loads_no_more_tokens_than_it_allows"),
    Fault("H26", "a request waits for a tier that it does not name")
    .without("request-names-the-tiers-that-it-reads", Always())
    .unreached(_UNSEEN, _ENGINE + "only_named_tiers_and_host_memory_are_read"),
    Fault("H26", "KV that a request wants to keep out of tiers is stored")
    .without("request-bounds-its-stores", Always())
    .unreached(_UNSEEN, _ENGINE + "a_request_stores_no_more_of_its_first_tokens_than_it_allows"),
    Fault("H26", "the KV of a conversation is evicted while its tools run")
    .without("session-holds-its-kv", Rewrite("self._pins.move", "bool"))
    .unreached(_UNSEEN, _ENGINE + "a_session_keeps_its_kv_while_others_are_evicted"),
    Fault("H26", "a session with long pauses holds its KV too short")
    .without("session-learns-its-pauses", Rewrite("_MARGIN * ", "0 * "))
    .unreached(_UNSEEN, _ENGINE + "the_time_is_learned_from_the_pauses_of_the_session"),
    Fault("H26", "requests in the queue read so much that they evict each other's blocks from host memory")
    .without("reads-for-the-queue-are-bounded", Never())
    .unreached(
        _UNSEEN,
        "schedule/test_tiers.py::test_requests_in_the_queue_read_one_after_another_and_a_bounded_number_of_blocks",
    ),
    Fault("H26", "the requests of one key evict the KV of all others")
    .without("kv-beyond-a-quota-goes-first")
    .unreached(_UNSEEN, "engine/test_quotas.py::test_an_owner_beyond_its_quota_evicts_its_own_oldest_kv"),
    Fault("H26", "KV that another key uses is evicted because one key has used much")
    .without("quota-spares-other-owners", Rewrite("not self._num_holders", "len"))
    .unreached(_UNSEEN, "engine/test_quotas.py::test_kv_that_another_owner_used_is_spared"),
    Fault("H26", "the KV of a conversation that has ended takes the place of others")
    .without("closed-session-goes-first")
    .unreached(_UNSEEN, _ENGINE + "the_kv_of_a_closed_session_is_evicted_first"),
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
