"""Rules of LoRA adapters. The torture test's models have none, so unit tests detect the removal of these rules."""

from __future__ import annotations

from proof.mutations.operators import Always, Never
from proof.mutations.tables import Exempt, Fault

MUTATIONS = ()

_SLOTS = "engine/test_loaded_adapters.py::test_"
_UNSEEN = "no schedule has adapters"

EQUIVALENT = (
    Fault("H16", "a request is answered with the adapter of the slot's last request")
    .without("row-computes-with-its-own-adapter")
    .unreached(_UNSEEN, "models/test_adapters.py::test_rows_of_one_batch_give_the_tokens_of_merged_weights"),
    Fault("H16", "a request goes on with another adapter than it began with")
    .without("adapter-stays-while-requests-use-it")
    .unreached(_UNSEEN, _SLOTS + "a_slot_is_free_when_all_samples_that_use_it_have_ended"),
    Fault("H16", "a request reuses KV that another adapter has computed")
    .without("keys-depend-on-the-adapter")
    .unreached(_UNSEEN, _SLOTS + "keys_depend_on_the_adapter_and_on_the_requests_salt"),
    Fault("H16", "a request reads matrices that are not there yet")
    .without("adapter-is-served-once-it-is-there")
    .unreached(_UNSEEN, _SLOTS + "an_adapter_is_served_once_its_matrices_are_on_the_device"),
    Fault("H16", "an operator waits for ever for a device that hangs, and no other adapter can be loaded")
    .without("adapter-has-a-deadline", Never())
    .unreached(_UNSEEN, _SLOTS + "an_adapter_that_comes_too_late_is_not_served"),
    Fault("H16", "a rank puts the adapter before into a slot, because it has not read this one yet")
    .without("adapter-is-read-on-every-rank")
    .unreached(_UNSEEN, _SLOTS + "an_adapter_is_put_once_every_rank_has_read_it"),
    Fault("H16", "ranks compute with different adapters")
    .without("adapter-of-a-failed-rank-is-refused", Never())
    .unreached(_UNSEEN, _SLOTS + "an_adapter_that_a_rank_cannot_read_is_served_by_none"),
    Fault("H16", "rank 0 computes with the adapter, the other ranks without")
    .without("adapter-is-put-on-every-rank", Always())
    .unreached(_UNSEEN, _SLOTS + "an_adapter_is_put_once_every_rank_has_read_it"),
    Fault("H16", "ranks compute with different adapters, because its file changed between their reads")
    .without("ranks-read-the-same-adapter", Never())
    .unreached(_UNSEEN, "ranks/test_follower.py::test_an_adapter_that_differs_from_that_of_rank_0_is_a_failure"),
)

EXEMPT = (
    Exempt("join_adapted", ("join",), "names the memory of a Linear; nothing waits"),
    Exempt("LoadedAdapters.admit", ("replace",), "a copy of a request"),
    Exempt("_sample", ("replace",), "a copy of parameters"),
    Exempt("LoadedAdapters._put", ("failure",), "see adapter-is-served-once-it-is-there"),
    Exempt("Engine.enqueue", ("ended",), "a slot of a request that was refused; its adapter would stay in it"),
)
