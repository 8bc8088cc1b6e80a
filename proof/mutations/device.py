"""Rules of the CPU device, of threads and of the collectives of ranks, and the sites of models and attention.

No schedule runs this code: the simulated device stands in its place. So unit tests detect the removal of its rules.
"""

from __future__ import annotations

from proof.mutations.operators import Never, Value
from proof.mutations.tables import Exempt, Fault, Mutation

MUTATIONS: tuple[Mutation, ...] = ()

_STANDS_IN = "the simulated device stands in the place of this code"

EQUIVALENT = (
    Fault("H5", "work runs before the work of another stream that it waits for")
    .without("cpu-stream-waits-for-other-streams", Never())
    .unreached(_STANDS_IN, "device/test_cpu.py::test_only_work_after_a_wait_runs_after_its_fence"),
    Fault("H26", "a host wait with a bell returns at once, so its thread spins")
    .without("host-sleeps-until-the-fence-or-a-ring")
    .unreached(_STANDS_IN, "device/test_cpu.py::test_a_host_wait_ends_when_its_bell_rings_or_its_fence_is_done"),
    Fault("H7", "a host wait returns before the work is done")
    .without("host-wait-ends-after-the-work", Value("True"))
    .unreached(_STANDS_IN, "device/test_cpu.py::test_host_waits_for_unfinished_work_are_counted_by_reason"),
    Fault("H10", "the memory of a stream's last work is freed while the work runs")
    .without("cpu-stream-closes-after-its-work")
    .unreached(_STANDS_IN, "device/test_cpu.py::test_close_runs_submitted_work_of_every_stream"),
    Fault("H10", "a thread still takes its turn when the engine frees what the turn uses")
    .without("thread-closes-after-its-turn")
    .unreached(_STANDS_IN, "device/test_host_threads.py::test_close_waits_for_the_running_turn"),
    Fault("H26", "a thread that failed looks like one that was closed")
    .without("failure-of-a-turn-is-kept")
    .unreached(_STANDS_IN, "device/test_host_threads.py::test_a_turn_that_raises_is_the_last_one"),
    Fault("H26", "a thread sleeps on although the fence that it waits for is done")
    .without("done-fence-wakes-the-thread", Value("False"))
    .unreached(_STANDS_IN, "device/test_host_threads.py::test_a_fence_with_a_polling_interval_is_polled_until_done"),
    Fault("H12", "a wait for work that is done counts as a host wait")
    .without("done-fence-needs-no-wait", Never())
    .unreached(_STANDS_IN, "device/test_cpu.py::test_host_waits_for_unfinished_work_are_counted_by_reason"),
    Fault("H7", "a wait that a ring or the time ended counts as a wait for finished work")
    .without("wait-that-ends-early-says-so", Value("True"))
    .unreached(_STANDS_IN, "device/test_cpu.py::test_a_host_wait_ends_when_its_bell_rings_or_its_fence_is_done"),
    Fault("H10", "a thread touches pages of memory that was freed")
    .without("memory-is-touched-before-the-device-is-closed")
    .unreached(
        _STANDS_IN, "device/test_cpu_memory.py::test_close_skips_the_remaining_pages_and_joins_the_touching_thread"
    ),
    Fault("H26", "a thread sleeps on although it was woken")
    .without("ring-wakes-the-sleeper")
    .unreached(_STANDS_IN, "device/test_host_threads.py::test_a_wake_during_a_turn_causes_another_turn"),
    Fault("H34", "Python ends while a thread is inside NCCL, and crashes")
    .without("group-closes-after-its-abort")
    .unreached(_STANDS_IN, "device/test_group.py::test_an_abort_returns_at_once_and_ends_before_the_group_is_closed"),
    Fault("H13", "values of a collective are read before they have come")
    .without("collective-returns-after-its-work")
    .unreached(
        _STANDS_IN, "device/test_group.py::test_a_rank_that_does_not_take_part_fails_the_collectives_of_the_others"
    ),
    Fault("H13", "the values of one rank count as the sum of all")
    .without("peers-add-what-they-take")
    .unreached(_STANDS_IN, "device/test_group.py::test_peer_sums_handle_small_tensors_and_are_closed_first"),
    Fault("H13", "values are added before they have come")
    .without("values-of-all-ranks-have-come")
    .unreached(_STANDS_IN, "device/test_group.py::test_sums_have_equal_bits_on_all_ranks"),
    Fault("H26", "a rank that does not come is not named, and the others wait in the backend")
    .without("ranks-meet-before-they-connect")
    .unreached(_STANDS_IN, "device/test_group.py::test_an_error_names_a_rank_that_does_not_join"),
    Fault("H13", "two groups meet in one directory")
    .without("each-rank-comes-once", Never())
    .unreached(_STANDS_IN, "device/test_group.py::test_the_directory_of_a_killed_group_is_refused"),
    Fault("H15", "a copy cuts each block where it cuts the first, so blocks are half in other layers")
    .without("segments-are-cut-alike", Never())
    .unreached(_STANDS_IN, "device/test_striped_memory.py::test_segments_that_would_be_cut_differently_are_refused"),
    Fault("H5", "a graph does not wait for a fence for which its capture waited")
    .without("no-wait-is-lost-in-a-capture", Never())
    .unreached(_STANDS_IN, "device/test_cpu.py::test_a_capture_that_waits_for_another_stream_raises"),
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
