"""Tables about automatic mutants: the tests of each module, and the mutants without an effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proof.mutations import EQUIVALENT, MUTATIONS, Feature, Mutation, product_marks
from proof.mutations.automatic import Mutant

_TRANSFERS = (
    "offload/test_loads.py",
    "offload/test_worker.py",
    "offload/test_pieces.py",
    "offload/test_store_and_load.py",
    "offload/test_load_gates.py",
    "offload/test_growing_tier.py",
    "offload/test_disk_transfers.py",
    "offload/test_disk_failures.py",
    "offload/test_pacing.py",
)
_TIERS = (
    "offload/test_disk_index.py",
    "offload/test_disk.py",
    "offload/test_eviction_order.py",
    "offload/test_disk_failures.py",
    "offload/test_disk_refusals.py",
    "offload/test_disk_transfers.py",
    "offload/test_disk_machine.py",
    "offload/test_disk_processes.py",
    "offload/test_disk_sharing.py",
)
_SCHEDULE = (
    "schedule/test_allocation.py",
    "schedule/test_admission.py",
    "schedule/test_commit.py",
    "schedule/test_decoding.py",
    "schedule/test_prefill.py",
    "schedule/test_preemption.py",
    "schedule/test_queues.py",
    "schedule/test_prefix_cache.py",
    "schedule/test_states.py",
    "schedule/test_tiers.py",
    "schedule/test_scheduler_reset.py",
    "schedule/test_scheduler_meanwhile.py",
    "schedule/test_scheduler_priorities.py",
    "schedule/test_chunking.py",
)

TESTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kv", ("kv/test_pool.py", "kv/test_keys.py", "kv/test_pool_machine.py")),
    ("schedule", _SCHEDULE),
    ("schedule.prefix_cache", ("schedule/test_prefix_cache.py", "schedule/test_states.py", "engine/test_windows.py")),
    ("offload", _TRANSFERS),
    ("offload.tiers", _TIERS),
    ("offload.tiers.stack", ("offload/test_checksums.py", *_TIERS)),
    (
        "engine",
        ("engine/test_requests.py", "engine/test_close.py", "engine/test_failures.py", "engine/test_offload.py"),
    ),
    ("engine.build", ("engine/test_build.py", "engine/test_capacity.py")),
    ("engine.engine", ("engine/test_reset.py", "engine/test_close.py", "engine/test_requests.py")),
    ("engine.failures", ("engine/test_failures.py", "engine/test_device_lost.py", "engine/test_close.py")),
    ("engine.inbox", ("engine/test_listening.py", "engine/test_idle.py", "engine/test_inbox.py")),
    (
        "engine.loop",
        (
            "engine/test_idle.py",
            "engine/test_failures.py",
            "engine/test_requests.py",
            "engine/test_front_door.py",
            "engine/test_weights.py",
            "engine/test_reset.py",
        ),
    ),
    (
        "engine.output_stream",
        (
            "engine/test_output_stream.py",
            "engine/test_outputs.py",
            "engine/test_stops.py",
            "engine/test_failures.py",
        ),
    ),
    ("engine.stats", ("engine/test_second_runs.py", "engine/test_stats.py", "engine/test_gauges.py")),
    ("ranks", ("ranks",)),
    (
        "runner",
        (
            "runner/test_mailbox.py",
            "runner/test_keeping_up.py",
            "runner/test_declared_accesses.py",
            "engine/test_speculation.py",
        ),
    ),
    ("runner.graphs", ("runner/test_captured_gates.py", "engine/test_short_captures.py")),
    ("runner.mailbox", ("runner/test_mailbox.py", "runner/test_keeping_up.py")),
    ("runner.sampler", ("runner/test_sampler.py", "runner/test_sample.py", "engine/test_captured_draws.py")),
    ("runner.second_run", ("engine/test_second_runs.py",)),
    ("runner.state", ("runner/test_state.py", "runner/test_step_inputs.py")),
    ("runner.step_inputs", ("runner/test_step_inputs.py", "runner/test_declared_accesses.py")),
    ("device", ("device/test_cpu.py", "device/test_group.py", "device/test_sim.py")),
)
"""Module (below the package) → its tests, below `tests`. The longest name counts."""

WITH_KERNELS = ("runner", "engine", "device")
"""Rooms whose tests may run kernels, which `tests/conftest.py` prepares; that takes several seconds."""


@dataclass(frozen=True, slots=True)
class EquivalentMutant:
    """A mutant that changes nothing that can be observed.

    change   the mutant's `change`, so that a row does not mean another mutant after the code has changed
    """

    name: str
    change: str
    reason: str


EQUIVALENT_MUTANTS: tuple[EquivalentMutant, ...] = (
    EquivalentMutant(
        "auto:kv.pool:FencedPool.take:delete:0",
        "fences[block_id] = tuple((fence for fence in fences[block_id] if not fence.poll())) → pass",
        "a finished fence stays with its block, and the next owner and the next release drop it",
    ),
    EquivalentMutant(
        "auto:kv.pool:merge_fences:compare:0",
        "if not fence.poll() and (fence.stream not in last or last[fence.stream].tick < fence.tick): → if not "
        "fence.poll() and (fence.stream not in last or last[fence.stream].tick <= fence.tick):",
        "two fences of a stream with the same tick are the same position",
    ),
    EquivalentMutant(
        "auto:schedule.planning:Admission._try_admit:constant:0",
        "if self._prefix_cache.is_pending(wanted[len(hits):reuse.num_joinable + 1]): → if "
        "self._prefix_cache.is_pending(wanted[len(hits):reuse.num_joinable + 2]):",
        "the pending blocks of a request follow its findable ones without a gap",
    ),
    EquivalentMutant(
        "auto:schedule.planning:DecodePlanner._make_room:operand:0",
        "if drafts and (not self._reserve(request, request.launched_len + 1 + drafts, step, preempting=False)): → if "
        "not self._reserve(request, request.launched_len + 1 + drafts, step, preempting=False):",
        "without drafts, the second call reserves the same blocks",
    ),
    EquivalentMutant(
        "auto:schedule.planning:DecodePlanner._make_room:operand:2",
        "if not (drafts or self._reserve(request, stop, step, preempting=not request.drafts_in_flight)): → if not "
        "self._reserve(request, stop, step, preempting=not request.drafts_in_flight):",
        "with drafts, the blocks are reserved already, and the second call changes nothing",
    ),
    EquivalentMutant(
        "auto:schedule.scheduler:Scheduler.plan_loads:constant:0",
        "step = StepBuilder(0, 0.0, 0.0, loads_only=True, after=self._owed) → step = StepBuilder(1, 0.0, 0.0, "
        "loads_only=True, after=self._owed)",
        "every request that is admitted here has a load, so it gets no chunk from the budget",
    ),
    EquivalentMutant(
        "auto:offload.loads:Loads.submit:operand:1",
        "if len(slots.ids) < len(plan.keys) or self._context.switches.abandoned: → if len(slots.ids) < len(plan.keys):",
        "an abandoned worker drops the load in the same turn, with the same event",
    ),
    EquivalentMutant(
        "auto:offload.tiers.index:TierIndex.reserve:constant:0",
        "self._next_serial += 1 → self._next_serial += 2",
        "serial numbers must grow, and may have gaps",
    ),
    EquivalentMutant(
        "auto:schedule.states:StateCache.reach:operand:0",
        "if sources and len((sources := locate(parts))) == len(parts): → if len((sources := locate(parts))) == "
        "len(parts):",
        "a checkpoint without its first part lacks a part, so only time is lost",
    ),
    EquivalentMutant(
        "auto:runner.executor:StepWork._states_hook:constant:0",
        "for fence in gates.by_layer[0]: → for fence in gates.by_layer[1]:",
        "the KV of later layers is loaded behind that of the first layer, so its fences are done later",
    ),
    EquivalentMutant(
        "auto:runner.mailbox:Mailbox.read:argument:0",
        "entry.lease.release(after=(fence,)) → entry.lease.release()",
        "the fence is done: the same function has checked it",
    ),
    EquivalentMutant(
        "auto:runner.mailbox:Mailbox.read:element:1",
        "entry.lease.release(after=(fence,)) → entry.lease.release(after=())",
        "the fence is done: the same function has checked it",
    ),
    EquivalentMutant(
        "auto:engine.loop:WeightUpdates.apply:operand:0",
        "if not self._announced or parts.scheduler.num_begun: → if parts.scheduler.num_begun:",
        "without an announced update, no admission is paused, and the rest changes nothing",
    ),
)


def equivalent_mutants() -> Mapping[str, EquivalentMutant]:
    """The rows by name."""
    return {row.name: row for row in EQUIVALENT_MUTANTS}


def paths_of(mutant: Mutant) -> tuple[str, ...]:
    """The tests of a mutant, below `tests`: first the tests that notice that a rule of its statement is missing, then
    those of its module.
    """
    module = mutant.mark.module.partition(".")[2]
    rows = [row for row in TESTS if module == row[0] or module.startswith(row[0] + ".")]
    noticed = [row.noticed_by for row in EQUIVALENT if row.noticed_by and _is_at(row.mutation, mutant)]
    return (*dict.fromkeys(noticed), *max(rows, key=lambda row: len(row[0]))[1])


def needs_of(mutant: Mutant) -> frozenset[Feature]:
    """The features that a workload needs so that a missing rule of the mutant's statement is detected."""
    return next((mutation.needs for mutation in MUTATIONS if _is_at(mutation, mutant)), frozenset())


def _is_at(mutation: Mutation, mutant: Mutant) -> bool:
    """Whether a rule of the tables is that of the mutant's statement."""
    marks = (product_marks()[change.mark] for change in mutation.changes)
    return any(mark.path == mutant.mark.path and mark.statement.lineno == mutant.mark.line for mark in marks)


def conftest_folder(mutant: Mutant) -> str:
    """The folder below `tests` whose `conftest.py`, with those below it, the mutant's tests need; empty: `tests`."""
    room = mutant.mark.module.split(".")[1]
    apart = room not in WITH_KERNELS and all(path.partition("/")[0] == room for path in paths_of(mutant))
    return room if apart else ""
