"""Makes an error that names the limit, when the operating system refuses a new thread or process."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from sidestream_kv.errors import ConfigError


@contextlib.contextmanager
def refused_threads_named() -> Iterator[None]:
    """Raise ConfigError with the limits of threads if Python cannot start a thread in the block. Python says
    only "can't start new thread".
    """
    try:
        yield
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise thread_refused() from error


def thread_refused() -> ConfigError:
    """The error for a thread or process that the system refused."""
    limits = [
        *_limit(resource.RLIMIT_NPROC, "threads and processes of this user (ulimit -u)"),
        *_limit(resource.RLIMIT_AS, "bytes of address space (ulimit -v)"),
        *(f"{most} threads of this container (pids.max)" for most in _container_limits()),
        *(f"{most} threads of this machine (kernel.threads-max)" for most in _read("/proc/sys/kernel/threads-max")),
    ]
    return ConfigError(
        f"the system refused a new thread or process; its limits: {', '.join(limits) or 'unknown'}: raise the one that "
        "is reached, or run fewer processes and --threads"
    )


def _limit(kind: int, meaning: str) -> list[str]:
    soft, _ = resource.getrlimit(kind)
    return [] if soft == resource.RLIM_INFINITY else [f"{soft} {meaning}"]


def _container_limits() -> list[str]:
    """`pids.max` of this process's control groups, of version 2 or 1."""
    found = []
    for line in _read("/proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "pids"):
            found += [most for most in _read(f"/sys/fs/cgroup/{kinds}{path}/pids.max") if most != "max"]
    return found


def _read(path: str) -> list[str]:
    """The lines of a file of the kernel; none if it does not exist."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    return []
