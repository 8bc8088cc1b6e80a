"""A device on which a seed decides what runs when, among everything that the fences allow."""

from sidestream.device.sim.device import SimDevice, SimEvent, SimFence, SimGraph, SimStream, SimThread
from sidestream.device.sim.policies import POLICIES, Choice, Policy, make_policy
from sidestream.device.sim.turns import Deadlock

__all__ = [
    "POLICIES",
    "Choice",
    "Deadlock",
    "Policy",
    "SimDevice",
    "SimEvent",
    "SimFence",
    "SimGraph",
    "SimStream",
    "SimThread",
    "make_policy",
]
