"""Handles the signals that ask a server to end, and SIGUSR1. Knows nothing of servers. Main threads only."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a service manager, and a terminal that is closed."""


@contextlib.contextmanager
def on_stop_signal(act: Callable[[int], None]) -> Iterator[None]:
    """During the block, each stop signal calls `act` with its number. Afterwards, the previous handlers apply again, so
    between two nested blocks no signal is lost.

    SIGINT is handled even if it was ignored, because a shell ignores it in all background jobs of a script. SIGHUP
    stays ignored, because `nohup` asks for that.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        act(number)

    numbers = [
        number
        for number in STOP_SIGNALS
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    # asyncio's `add_signal_handler` is not used, because at its end it restores the system's handlers.
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """In this block, SIGUSR1 and stop signals are blocked. A process that is started in the block begins
    with them blocked; `ignore_stop_signals` unblocks them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore the stop signals from now on."""
    for number in STOP_SIGNALS:
        # An empty handler, because children of this process would inherit SIG_IGN, but do not inherit a handler.
        signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGUSR1))


def print_stacks() -> None:
    """Print the stacks of all threads to standard error when the process crashes and on SIGUSR1, which by default would
    kill the process.
    """
    if sys.__stderr__ is not None:  # None: the process was started without standard error
        faulthandler.enable(file=sys.__stderr__)
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
