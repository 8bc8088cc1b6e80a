"""Rules of the CPU device, of threads and of the collectives of ranks, and the sites of models and attention.

No schedule runs this code: the simulated device stands in its place. So unit tests detect the removal of its rules.
"""

from __future__ import annotations

from proof.mutations.operators import Delete, Never, Operator, Value
from proof.mutations.tables import Equivalent, Exempt, Mutation

MUTATIONS: tuple[Mutation, ...] = ()

_STANDS_IN = "the simulated device stands in the place of this code"
_DELETE = Delete()


def _of_device(name: str, hazard: str, consequence: str, noticed_by: str, change: Operator = _DELETE) -> Equivalent:
    mutation = Mutation(name=name, hazard=hazard, change=change, consequence=consequence)
    return Equivalent(mutation, _STANDS_IN, noticed_by=f"device/{noticed_by}", unreached=True)


EQUIVALENT = (
    _of_device(
        "cpu-stream-waits-for-other-streams",
        "H5",
        "work runs before the work of another stream that it waits for",
        "test_cpu.py::test_only_work_after_a_wait_runs_after_its_fence",
        Never(),
    ),
    _of_device(
        "host-sleeps-until-the-fence-or-a-ring",
        "H26",
        "a host wait with a bell returns at once, so its thread spins",
        "test_cpu.py::test_a_host_wait_ends_when_its_bell_rings_or_its_fence_is_done",
    ),
    _of_device(
        "host-wait-ends-after-the-work",
        "H7",
        "a host wait returns before the work is done",
        "test_cpu.py::test_host_waits_for_unfinished_work_are_counted_by_reason",
        Value("True"),
    ),
    _of_device(
        "cpu-stream-closes-after-its-work",
        "H10",
        "the memory of a stream's last work is freed while the work runs",
        "test_cpu.py::test_close_runs_submitted_work_of_every_stream",
    ),
    _of_device(
        "thread-closes-after-its-turn",
        "H10",
        "a thread still takes its turn when the engine frees what the turn uses",
        "test_host_threads.py::test_close_waits_for_the_running_turn",
    ),
    _of_device(
        "failure-of-a-turn-is-kept",
        "H26",
        "a thread that failed looks like one that was closed",
        "test_host_threads.py::test_a_turn_that_raises_is_the_last_one",
    ),
    _of_device(
        "done-fence-wakes-the-thread",
        "H26",
        "a thread sleeps on although the fence that it waits for is done",
        "test_host_threads.py::test_a_fence_with_a_polling_interval_is_polled_until_done",
        Value("False"),
    ),
    _of_device(
        "done-fence-needs-no-wait",
        "H12",
        "a wait for work that is done counts as a host wait",
        "test_cpu.py::test_host_waits_for_unfinished_work_are_counted_by_reason",
        Never(),
    ),
    _of_device(
        "wait-that-ends-early-says-so",
        "H7",
        "a wait that a ring or the time ended counts as a wait for finished work",
        "test_cpu.py::test_a_host_wait_ends_when_its_bell_rings_or_its_fence_is_done",
        Value("True"),
    ),
    _of_device(
        "memory-is-touched-before-the-device-is-closed",
        "H10",
        "a thread touches pages of memory that was freed",
        "test_cpu_memory.py::test_close_skips_the_remaining_pages_and_joins_the_touching_thread",
    ),
    _of_device(
        "ring-wakes-the-sleeper",
        "H26",
        "a thread sleeps on although it was woken",
        "test_host_threads.py::test_a_wake_during_a_turn_causes_another_turn",
    ),
    _of_device(
        "group-closes-after-its-abort",
        "H34",
        "Python ends while a thread is inside NCCL, and crashes",
        "test_group.py::test_an_abort_returns_at_once_and_ends_before_the_group_is_closed",
    ),
    _of_device(
        "collective-returns-after-its-work",
        "H13",
        "values of a collective are read before they have come",
        "test_group.py::test_a_rank_that_does_not_take_part_fails_the_collectives_of_the_others",
    ),
    _of_device(
        "peers-add-what-they-take",
        "H13",
        "the values of one rank count as the sum of all",
        "test_group.py::test_peer_sums_handle_small_tensors_and_are_closed_first",
    ),
    _of_device(
        "values-of-all-ranks-have-come",
        "H13",
        "values are added before they have come",
        "test_group.py::test_sums_have_equal_bits_on_all_ranks",
    ),
    _of_device(
        "ranks-meet-before-they-connect",
        "H26",
        "a rank that does not come is not named, and the others wait in the backend",
        "test_group.py::test_an_error_names_a_rank_that_does_not_join",
    ),
    _of_device(
        "each-rank-comes-once",
        "H13",
        "two groups meet in one directory",
        "test_group.py::test_the_directory_of_a_killed_group_is_refused",
        Never(),
    ),
    _of_device(
        "segments-are-cut-alike",
        "H15",
        "a copy cuts each block where it cuts the first, so blocks are half in other layers",
        "test_striped_memory.py::test_segments_that_would_be_cut_differently_are_refused",
        Never(),
    ),
    _of_device(
        "no-wait-is-lost-in-a-capture",
        "H5",
        "a graph does not wait for a fence for which its capture waited",
        "test_cpu.py::test_a_capture_that_waits_for_another_stream_raises",
        Never(),
    ),
)

_COPY = "a copy of a value object"
_SETTINGS = "it orders settings of torch's threads, not work"

EXEMPT = (
    Exempt("HostStream._start", ("wait",), _SETTINGS),
    Exempt("TurnTaker._sleep", ("wait",), "without it, the thread looks again at once: slower, but no turn is lost"),
    Exempt("_Meeting._wait", ("wait",), "without it, the loop looks again at once"),
    Exempt("PagedBatch.part", ("replace",), _COPY),
    Exempt("PagedBatch.with_kv_shape", ("replace",), _COPY),
    Exempt("BatchLocation.with_kv_shape", ("replace",), _COPY),
    Exempt("warm_up", ("replace", "replace"), _COPY),
    Exempt("attach_draft", ("replace",), _COPY),
    Exempt("attach_head", ("replace",), _COPY),
    Exempt("_parts_of_rank", ("replace", "replace"), _COPY),
    Exempt("_check", ("replace",), _COPY),
    Exempt("_in_cache_dtype", ("replace",), _COPY),
    Exempt("cache_parts", ("replace",), _COPY),
    Exempt("load_model", ("fingerprint=",), "the constructor requires it, and keys of all models contain it"),
    Exempt("MtpHead.joined", ("join",), "a matrix product, not a thread"),
    Exempt("write_head", ("replace",), "a whole file takes the place of an old one, and no other process reads it yet"),
    Exempt("_divides_heads", ("add",), "a set of local values"),
    Exempt("fingerprint_of", ("add",), "a set of local values"),
)
