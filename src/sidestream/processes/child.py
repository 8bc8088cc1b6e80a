"""Starts child processes, which end with their owner: the process that started them. Runs their `main`, and sends the
engine's configuration to them. Never uses CUDA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sidestream.config import EngineConfig
from sidestream.processes.signals import ignore_stop_signals, print_stacks, stop_signals_blocked
from sidestream_kv.device.garbage import collections_paused
from sidestream_kv.device.thread_limits import thread_refused

CLOSE_S = 60.0
"""Maximum time for a process to store all complete blocks and exit, after its drain."""


def child_environment() -> dict[str, str]:
    """The environment for a child process, so that it imports the same copies of Sidestream's packages."""
    found = map(importlib.util.find_spec, ("sidestream", "sidestream_kv", "sidestream_order"))
    homes = [str(Path(spec.origin).resolve().parents[1]) for spec in found if spec is not None and spec.origin]
    paths = [*homes, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def child_command(module: str, descriptor: int, *, torch: bool = True) -> list[str]:
    """The command that runs `module.main(descriptor)` in a fresh interpreter, without importing the caller's
    `__main__`.

    torch   False: hide torch from the child, as if it was not installed
    """
    return [
        sys.executable,
        "-P",
        "-c",
        f"from sidestream.processes.child import run_child; run_child({module!r}, {descriptor}, torch={torch})",
    ]


def start_child(
    module: str, *, torch: bool = True, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that runs `module.main(descriptor)`, see `child_command`. `descriptor` is its end of a socket
    whose other end is returned. The process ends when that end is closed.

    environment   further environment variables

    Raises ConfigError if the system refuses a new process.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs, stop_signals_blocked():  # until the child handles them
            process = subprocess.Popen(
                child_command(module, theirs.fileno(), torch=torch),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**child_environment(), **(environment or {})},
                process_group=0,  # Ctrl-C at the terminal reaches the owner only
            )
    except BaseException as error:
        ours.close()
        if isinstance(error, BlockingIOError):
            raise thread_refused() from error
        raise
    return process, ours


def run_child(module: str, descriptor: int, *, torch: bool) -> None:
    """In the child: ignore stop signals, import `module` (which may take seconds), and run its `main`.

    torch   False: hide torch, as if it was not installed. Otherwise, transformers would import torch even for a
            tokenizer, which takes 3 s and 0.3 GB

    Signals are ignored, because a service manager sends them to all processes of a server, and the owner must drain
    requests before it ends this process.
    """
    os.set_inheritable(descriptor, False)
    end_with_owner(descriptor)
    print_stacks()
    ignore_stop_signals()
    if not torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # silences "PyTorch was not found"
    with collections_paused():
        main = importlib.import_module(module).main
    main(descriptor)


def how_it_ended(status: int) -> str:
    """A process's exit status, in words."""
    if status >= 0:
        return f"it exited with status {status}"
    with contextlib.suppress(ValueError):
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it was killed by signal {-status}"


_last_acts: list[Callable[[], None]] = []


def at_end_of_owner(act: Callable[[], None]) -> None:
    """Call `act` when the owner has ended, before this process ends itself. Like `atexit`, which does not run then."""
    _last_acts.append(act)


def end_with_owner(descriptor: int) -> None:
    """Exit this process as soon as the owner's end of the socket is closed, however the owner ended.

    KV on disk is always consistent, so the exit loses only blocks that were not stored yet.
    """

    def watch() -> None:
        # macOS has no POLLRDHUP, but reports a closed peer as POLLHUP, which need not be requested.
        poll = select.poll()
        poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
        poll.poll()
        for act in _last_acts:
            with contextlib.suppress(Exception):  # nothing may keep the process alive
                act()
        os._exit(1)

    threading.Thread(target=watch, name="sidestream-owner", daemon=True).start()


def plain(value: Any) -> Any:
    """A configuration as values that msgpack can encode: mappings, strings and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def config_of(values: Mapping[str, Any]) -> EngineConfig:
    """The EngineConfig that `values` describe: the inverse of `plain`."""
    from sidestream.config import KVEventsConfig, SpeculativeConfig
    from sidestream_kv.config import OffloadConfig

    kinds = {"kv_events": KVEventsConfig, "offload": OffloadConfig, "speculative": SpeculativeConfig}
    return EngineConfig(
        **{
            name: kinds[name](**value) if name in kinds and value is not None else value
            for name, value in values.items()
        }
    )
