"""The torture test: runs the real engine on the simulated device, many times, in different orders of execution.

A workload is a set of requests and faults, drawn from a seed. A schedule is one run of a workload in one order of
execution, which a policy decides. An oracle is a check of a run. A mutation removes one rule from the code.

    torture(...)          many schedules of the unmodified code
    hunt(...), kill(...)  schedules with a mutation, until an oracle reports a failure
    hunt_mutants(...)     schedules with an automatic mutant, then the unit tests of its module
    check_excuses(...)    check the mutations that no schedule can detect, and the unit tests that detect them
    run_schedule(...)     one schedule
    shrink(...)           reduce a failing schedule
    load_replay(...)      read a failing schedule from a file

Results of these functions depend on the seed only, not on a clock, threads or other processes.

Without an engine, block transfers on a real device, where timing also affects the result
(`proof.torture.hardware`):

    torture_device(...)   block transfers of the unmodified code
    hunt_device(...)      block transfers with a mutation

A whole engine on a real device (`proof.torture.service`):

    torture_service(...)  requests to a toy model whose text depends on every KV byte

A language model on several ranks, each in its own process. This module is not imported here, because it imports
transformers:

    rank_service.torture_ranks(...)   requests whose answers must equal those of transformers
"""

from proof.torture.campaign import POLICIES, Failure, Report, run_one, torture
from proof.torture.drawing import draw_workload
from proof.torture.excuses import SCHEDULES_PER_EXCUSE, ExcuseRow, Excuses, check_excuses
from proof.torture.hardware import (
    DEVICES,
    HUNT_BLOCKS,
    ON_HARDWARE,
    DeviceReport,
    Missed,
    hunt_device,
    torture_device,
)
from proof.torture.hunting import MAX_SCHEDULES, Hunt, Killed, Row, hunt, kill, kill_miniature
from proof.torture.mutants import SCHEDULES_PER_MUTANT, MutantHunt, MutantRow, hunt_mutants
from proof.torture.oracle import Reference, reference_of
from proof.torture.replay import Replay, load_replay
from proof.torture.run import Outcome, run_schedule
from proof.torture.service import EAGER_GATES, GATES, ServiceReport, hunt_service, torture_service
from proof.torture.shrinking import Shrunk, rerun, shrink
from proof.torture.verdict import ORACLES, Finding
from proof.torture.workload import FEATURES, Asked, Event, Fault, Workload
from sidestream_order.trace import TraceLine, explain, render

__all__ = [
    "DEVICES",
    "EAGER_GATES",
    "FEATURES",
    "GATES",
    "HUNT_BLOCKS",
    "MAX_SCHEDULES",
    "ON_HARDWARE",
    "ORACLES",
    "POLICIES",
    "SCHEDULES_PER_EXCUSE",
    "SCHEDULES_PER_MUTANT",
    "Asked",
    "DeviceReport",
    "Event",
    "ExcuseRow",
    "Excuses",
    "Failure",
    "Fault",
    "Finding",
    "Hunt",
    "Killed",
    "Missed",
    "MutantHunt",
    "MutantRow",
    "Outcome",
    "Reference",
    "Replay",
    "Report",
    "Row",
    "ServiceReport",
    "Shrunk",
    "TraceLine",
    "Workload",
    "check_excuses",
    "draw_workload",
    "explain",
    "hunt",
    "hunt_device",
    "hunt_mutants",
    "hunt_service",
    "kill",
    "kill_miniature",
    "load_replay",
    "reference_of",
    "render",
    "rerun",
    "run_one",
    "run_schedule",
    "shrink",
    "torture",
    "torture_device",
    "torture_service",
]
