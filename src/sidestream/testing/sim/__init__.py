"""A simulated device for tests: a seed chooses the order of work among all orders that the fences allow."""

from sidestream.testing.sim.device import POISON, Guard, SimDevice
from sidestream.testing.sim.policies import POLICIES, Choice, Policy, make_policy
from sidestream.testing.sim.stream import SimEvent, SimFence, SimGraph, SimStream
from sidestream.testing.sim.thread import SimThread
from sidestream.testing.sim.turns import Deadlock

__all__ = [
    "POISON",
    "POLICIES",
    "Choice",
    "Deadlock",
    "Guard",
    "Policy",
    "SimDevice",
    "SimEvent",
    "SimFence",
    "SimGraph",
    "SimStream",
    "SimThread",
    "make_policy",
]
