"""Checks a real PyTorch program for races: records its CUDA streams, events, graphs, copies and operators, and reports
them to the order checker.

    python -m sidestream_order.check_trace script.py [args]     run a script; exit status 1 with findings, 0 without
    check_script("script.py")                                     the same from Python
    touches(reads=[x], writes=[y])                                call it in the program, to declare the accesses of a
                                                                  custom kernel

`recorder` observes operators. `real` observes the streams of a GPU; `fakes` replaces the GPU on a machine without one.
`judge` translates streams, events and the caching allocator into events of the order checker
(`sidestream_order.checker`), which finds the races.
"""

from sidestream_order.check_trace.recorder import touches
from sidestream_order.check_trace.script import DEVICES, Judgement, check_script

__all__ = ["DEVICES", "Judgement", "check_script", "touches"]
