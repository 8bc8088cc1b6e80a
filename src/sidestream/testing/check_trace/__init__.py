"""Judges a real PyTorch program: records its CUDA streams, events, graphs, copies and operators, and gives them to the
ordering checker.

    python -m sidestream.testing.check_trace script.py [args]     status 1 with findings, 0 without
    check_script("script.py")                                     the same from Python
    touches(reads=[x], writes=[y])                                in the program: what a custom kernel accesses

`recorder` observes operators, `real` the streams of a GPU; `fakes` runs the program on a machine without a GPU; `judge`
knows the rules of streams, events and the caching allocator, and `sidestream.testing.checker` decides.
"""

from sidestream.testing.check_trace.recorder import touches
from sidestream.testing.check_trace.script import DEVICES, Judgement, check_script

__all__ = ["DEVICES", "Judgement", "check_script", "touches"]
