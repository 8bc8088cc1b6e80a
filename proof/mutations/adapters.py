"""Rules of LoRA adapters. The torture test's models have none, so unit tests detect the removal of these rules."""

from __future__ import annotations

from proof.mutations.operators import Always, Delete, Never, Operator
from proof.mutations.tables import Equivalent, Exempt, Mutation

MUTATIONS = ()

_SLOTS = "engine/test_loaded_adapters.py"
_DELETE = Delete()


def _noticed(name: str, consequence: str, by: str, change: Operator = _DELETE, file: str = _SLOTS) -> Equivalent:
    mutation = Mutation(name=name, hazard="H16", change=change, consequence=consequence)
    return Equivalent(mutation, "no schedule has adapters", noticed_by=f"{file}::test_{by}", unreached=True)


EQUIVALENT = (
    _noticed(
        "row-computes-with-its-own-adapter",
        "a request is answered with the adapter of the slot's last request",
        "rows_of_one_batch_give_the_tokens_of_merged_weights",
        file="models/test_adapters.py",
    ),
    _noticed(
        "adapter-stays-while-requests-use-it",
        "a request goes on with another adapter than it began with",
        "a_slot_is_free_when_all_samples_that_use_it_have_ended",
    ),
    _noticed(
        "keys-depend-on-the-adapter",
        "a request reuses KV that another adapter has computed",
        "keys_depend_on_the_adapter_and_on_the_requests_salt",
    ),
    _noticed(
        "adapter-is-served-once-it-is-there",
        "a request reads matrices that are not there yet",
        "an_adapter_is_served_once_its_matrices_are_on_the_device",
    ),
    _noticed(
        "adapter-has-a-deadline",
        "an operator waits for ever for a device that hangs, and no other adapter can be loaded",
        "an_adapter_that_comes_too_late_is_not_served",
        Never(),
    ),
    _noticed(
        "adapter-is-read-on-every-rank",
        "a rank puts the adapter before into a slot, because it has not read this one yet",
        "an_adapter_is_put_once_every_rank_has_read_it",
    ),
    _noticed(
        "adapter-of-a-failed-rank-is-refused",
        "ranks compute with different adapters",
        "an_adapter_that_a_rank_cannot_read_is_served_by_none",
        Never(),
    ),
    _noticed(
        "adapter-is-put-on-every-rank",
        "rank 0 computes with the adapter, the other ranks without",
        "an_adapter_is_put_once_every_rank_has_read_it",
        Always(),
    ),
    _noticed(
        "ranks-read-the-same-adapter",
        "ranks compute with different adapters, because its file changed between their reads",
        "an_adapter_that_differs_from_that_of_rank_0_is_a_failure",
        Never(),
        file="ranks/test_follower.py",
    ),
)

EXEMPT = (
    Exempt("join_adapted", ("join",), "names the memory of a Linear; nothing waits"),
    Exempt("LoadedAdapters.admit", ("replace",), "a copy of a request"),
    Exempt("_sample", ("replace",), "a copy of parameters"),
    Exempt("LoadedAdapters._put", ("failure",), "see adapter-is-served-once-it-is-there"),
    Exempt("Engine.enqueue", ("ended",), "a slot of a request that was refused; its adapter would stay in it"),
)
