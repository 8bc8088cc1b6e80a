"""The configuration of the offload tiers, and how configurations are checked. Every object checks its values when it
is made. The message for an unknown option names the most similar known option.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sidestream_kv.errors import ConfigError, SidestreamError

T = TypeVar("T")
WRITE_POLICIES = ("all", "reused")
"""See `OffloadConfig.write_policy`."""
KV_DTYPES = ("auto", "int8")
"""See `OffloadConfig.kv_dtype`."""
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?\s*$", re.IGNORECASE)
_UNIT = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SHOWN_NAMES = 40  # known names that a message lists


def parse_bytes(value: int | str, *, option: str) -> int:
    """Bytes of `"4GiB"`, `"512MiB"` or a plain number. Units are powers of 1024. Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"{option} is {value} bytes: give a size of 0 or more, such as 512MiB")
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{option} is {value!r}: give a size such as 512MiB or 4GiB")
    unit = (match.group(2) or "").upper().replace("IB", "").replace("B", "")
    return int(float(match.group(1)) * _UNIT[unit])


def options_checked(
    error: type[SidestreamError], *, renamed: Mapping[str, str] | None = None
) -> Callable[[type[T]], type[T]]:
    """Decorator for a dataclass: an unknown keyword raises `error` instead of TypeError. The message names the new name
    of a keyword in `renamed`, else the most similar known keyword.

    The class keeps its signature and its types, and can be copied and pickled as before.
    """

    def decorate(kind: type[T]) -> type[T]:
        known = frozenset(option.name for option in dataclasses.fields(kind) if option.init)  # type: ignore[arg-type]
        build = kind.__init__

        @functools.wraps(build)
        def check_and_build(self: T, *values: Any, **options: Any) -> None:
            for name in options:
                if name in known:
                    continue
                if renamed is not None and name in renamed:
                    raise error(renamed_option(name, renamed[name]))
                raise error(unknown_name("option", name, known))
            build(self, *values, **options)

        kind.__init__ = check_and_build  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def renamed_option(old: str, new: str) -> str:
    """The message for an option that got another name."""
    return f"no option {old}: it is {new} now"


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name: `no option max_num_seq; did you mean max_num_seqs?`."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names[:_SHOWN_NAMES])}{more}"
    return f"no {what} {name}; {hint}"


@options_checked(ConfigError)
@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The offload tiers: storage outside the device that keeps KV blocks, such as host memory and disk.

    host             size of the host tier: bytes of host memory for KV blocks
    disk             directory of the disk tier, or several, one on each disk: each block is in one of them. None: no
                     disk tier
    disk_capacity    bytes that the disk tier may use in each directory
    load_deadline_s  maximum seconds that a request waits for KV from a tier; then the engine recomputes the KV
    write_policy     which blocks persistent tiers (such as the disk) write while the engine serves: `"all"`, or
                     `"reused"`: all until the tier is full, then those that were reused, and those of requests that
                     reused a third of their prompt; the others when the engine closes or is flushed. A policy for all
                     tiers, or one for each tier by its name. None: each tier's default, which is `"reused"` for the
                     disk, else `"all"`
    tiers            options of further tiers, by the tier's name (docs/tiers.md)
    kv_dtype         `"auto"`: the tiers hold KV as the device does; `"int8"`: in 8 bits, with a small error
                     (docs/tiers.md)
    shared_memory    socket of a cache process (`sidestream cache serve`) in whose memory the host tier is, which other
                     engines of this machine share; None: memory of the engine's own
    """

    host: int | str = "1GiB"
    disk: str | Path | Sequence[str | Path] | None = None
    disk_capacity: int | str = "10GiB"
    load_deadline_s: float = 10.0
    write_policy: str | Mapping[str, str] | None = None
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)  # a URL may hold a password
    shared_memory: str | Path | None = None
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        parse_bytes(self.host, option="offload host")
        parse_bytes(self.disk_capacity, option="offload disk_capacity")
        if not (
            isinstance(self.load_deadline_s, int | float)
            and self.load_deadline_s > 0
            and math.isfinite(self.load_deadline_s)
        ):
            raise ConfigError(f"load_deadline_s is {self.load_deadline_s!r}: give a positive number of seconds")
        policies = self.write_policy.values() if isinstance(self.write_policy, Mapping) else [self.write_policy]
        if wrong := [policy for policy in policies if policy is not None and policy not in WRITE_POLICIES]:
            raise ConfigError(f"write_policy is {wrong[0]!r}: give {' or '.join(WRITE_POLICIES)}")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype is {self.kv_dtype!r}: give {' or '.join(KV_DTYPES)}")
        if self.kv_dtype != "auto" and self.host_bytes == 0:
            raise ConfigError(f"kv_dtype is {self.kv_dtype}, but there is no host tier: give offload host a size")
        if len({path.resolve() for path in self.disks}) < len(self.disks):
            raise ConfigError(f"offload disk names a directory twice ({', '.join(map(str, self.disks))}): give it once")
        if self.shared_memory is not None and self.host_bytes == 0:
            raise ConfigError("shared_memory is for the host tier: give offload host a size, such as 4GiB")
        if self.disks and self.host_bytes == 0:
            raise ConfigError("offload to disk goes through host memory: give offload host a size, such as 256MiB")
        if self.tiers and self.host_bytes == 0:
            raise ConfigError(
                f"offload to {', '.join(self.tiers)} goes through host memory: give offload host a size, such as 256MiB"
            )

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier."""
        return parse_bytes(self.host, option="offload host")

    @property
    def disks(self) -> tuple[Path, ...]:
        """The directories of the disk tier."""
        given = (self.disk,) if isinstance(self.disk, str | Path) else self.disk or ()
        return tuple(Path(each).expanduser() for each in given)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the disk tier may use in each directory."""
        return parse_bytes(self.disk_capacity, option="offload disk_capacity")
