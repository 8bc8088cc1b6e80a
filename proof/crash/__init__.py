"""The crash test: engines of one host that share a disk directory, a cache process and a store, each in a process of
its own, and kill -9 at random moments.

    crash(...)   kill engines, the cache process and the store again and again, and damage what they share

The torture test runs every order that the engine's waits allow, on a simulated device. This test has no order: what
runs when is up to the machine, so two runs differ. It shows what processes leave behind when they end at any moment.
"""

from proof.crash.campaign import CrashReport, crash

__all__ = ["CrashReport", "crash"]
