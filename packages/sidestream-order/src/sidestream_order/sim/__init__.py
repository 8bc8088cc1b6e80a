"""A simulated device for tests: a seed chooses the order of work among all orders that the fences allow."""

from sidestream_order.sim.device import POISON, SimDevice
from sidestream_order.sim.policies import POLICIES, Choice, Policy, make_policy
from sidestream_order.sim.stream import Guard, SimEvent, SimFence, SimGraph, SimStream
from sidestream_order.sim.thread import SimThread
from sidestream_order.sim.turns import Deadlock

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
