"""The checks of `sidestream doctor`, one function for each check. The results are findings."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from sidestream.cli.machine import DISK_BYTES, copy_speeds, disk_speeds
from sidestream.cli.options import DEMO_MODEL
from sidestream.config import EngineConfig
from sidestream.errors import ConfigError, TierError
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.kinds import CPU, CUDA
from sidestream_kv.device.machine import cpu_name, instruction_set, memory_bytes
from sidestream_kv.kv.state_layout import blocks_per_state

_MIB, _GIB = 1 << 20, 1 << 30
_SLOW_DISK = 100 * _MIB  # bytes per second; with a slower disk, a small model recomputes a prefix as fast as it is read
_STORED = "bfloat16"  # dtype of the demo model and of most checkpoints
_MODEL_BYTES = _GIB  # memory of the demo model while it runs, plus some for other processes


class Status(StrEnum):
    """Status of a finding. FAIL: the machine cannot serve; WARN: it can."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    text     the result as a sentence
    remedy   advice if the status is not OK
    data     the result for programs (`--json`)
    """

    name: str
    status: Status
    text: str
    remedy: str = ""
    data: dict[str, object] = field(default_factory=dict)


def findings(disk: Path | None, model: str | None = None) -> Iterator[Finding]:
    """Yield each finding as soon as it is known.

    disk   directory of the disk tier; None: the cache directory
    model  model whose KV and state sizes are reported; None: no such finding
    """
    packages = list(_packages())
    yield from packages
    yield from _extras()
    if any(finding.status is Status.FAIL for finding in packages):
        return  # the other checks import these packages
    yield _cpu()
    dtype = _dtype()
    yield dtype
    yield from _memory()
    gpu = _gpus()
    yield gpu
    on_gpu = gpu.data["device"] == CUDA
    yield _copy_speed(CPU)
    if on_gpu:
        yield _copy_speed(CUDA)
    yield _memory_lock(on_gpu)
    yield from _disk(disk, str(dtype.data["dtype"]))
    yield from _cache()
    if model is not None:
        yield _model(model, str(gpu.data["device"]))


def _packages() -> Iterator[Finding]:
    """Versions of Sidestream, Python and the required packages."""
    from importlib import metadata  # takes 20 ms to import

    from sidestream import __version__

    python = platform.python_version()
    yield Finding(
        "sidestream", Status.OK, f"{__version__}, Python {python}", data={"version": __version__, "python": python}
    )
    try:
        requirements = metadata.requires("sidestream") or ()
    except metadata.PackageNotFoundError:  # sources on the path without an installation have no metadata
        requirements = ()
        yield Finding(
            "packages", Status.WARN, "not checked, because sidestream itself is not installed", "pip install -e ."
        )
    for requirement in requirements:
        parts = re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement)  # requirements of extras end in a marker: no match
        if parts is not None:
            yield from _package(parts[1], parts[2], remedy=f"pip install '{requirement}'")


def _package(name: str, bound: str, *, remedy: str) -> Iterator[Finding]:
    """Check the version of a package. A package that is installed and new enough makes a finding only if it is torch or
    transformers.
    """
    from importlib import metadata

    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        yield Finding(name, Status.FAIL, f"not installed, {bound} or later is needed", remedy)
        return
    if _numbers(version) < _numbers(bound):
        yield Finding(name, Status.FAIL, f"{version}, {bound} or later is needed", remedy, {"version": version})
    elif name == "torch" and (fault := _import_fault("torch")):
        yield Finding(
            name,
            Status.FAIL,
            f"{version} cannot be imported: {fault}",
            "install it again, for this Python",
            {"version": version},
        )
    elif name in ("torch", "transformers"):
        yield Finding(name, Status.OK, version, data={"version": version})


def _import_fault(name: str) -> str:
    """The error of importing `name` in one line; empty if the import succeeds."""
    try:
        importlib.import_module(name)
    except Exception as fault:
        return next(iter(str(fault).splitlines()), "") or type(fault).__name__
    return ""


def _numbers(version: str) -> list[int]:
    """The numbers of a version: [2, 13, 0] for `2.13.0+cpu`."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _extras() -> Iterator[Finding]:
    for extra, modules, purpose in (
        ("server", ("starlette", "uvicorn", "prometheus_client"), "sidestream serve"),
        ("demo", ("gguf",), "preparing the demo model"),
    ):
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            yield Finding(
                f"extra {extra}",
                Status.WARN,
                f"{', '.join(missing)} not installed; {purpose} needs it",
                f"pip install 'sidestream[{extra}]'",
            )


def _dtype() -> Finding:
    """The meaning of `--dtype auto` on this machine."""
    from sidestream.models.precision import choose_precision, time_over_float32

    choice = choose_precision("auto", _STORED, weights_bytes=0, on_cpu=True)
    text = f"{instruction_set()}; on this CPU --dtype auto serves a {_STORED} model in {choice}"
    data: dict[str, object] = {
        "instruction_set": instruction_set(),
        "dtype": choice.dtype,
        f"{_STORED}_time_over_float32": time_over_float32(_STORED),
    }
    return Finding("dtype", Status.OK, text, data=data)


def _cpu() -> Finding:
    import torch

    usable = len(os.sched_getaffinity(0))
    quota = _cgroup_cores()
    limit = usable if quota is None else min(usable, quota)
    threads = torch.get_num_threads()  # the default of --threads
    text = f"{cpu_name()}, {limit:g} of {os.cpu_count()} cores usable, {threads} compute threads"
    data: dict[str, object] = {"model": cpu_name(), "cores": os.cpu_count(), "usable_cores": limit, "threads": threads}
    if threads > limit:
        remedy = (
            f"more threads than cores block each other: use --threads {max(1, int(limit))}, or unset OMP_NUM_THREADS"
        )
        return Finding("cpu", Status.WARN, text, remedy, data)
    if threads < int(limit):
        return Finding(
            "cpu", Status.WARN, text, f"some cores are idle: use --threads {int(limit)}, or unset OMP_NUM_THREADS", data
        )
    return Finding("cpu", Status.OK, text, data=data)


def _cgroup_cores() -> float | None:
    """Cores that the container may use on average; None: no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        if quota != "max":
            return int(quota) / int(period)
    return None


def _memory() -> Iterator[Finding]:
    total, available = memory_bytes()
    if total is None or available is None:
        return
    wanted = (EngineConfig().sizes(CPU).kv_bytes or 0) + _MODEL_BYTES
    text = f"{_size(available)} of {_size(total)} available"
    data: dict[str, object] = {"total_bytes": total, "available_bytes": available}
    if available < wanted:
        remedy = (
            f"the demo model with the default KV pool takes up to {_size(wanted)}: free memory, or lower --kv-memory"
        )
        yield Finding("memory", Status.WARN, text, remedy, data)
    else:
        yield Finding("memory", Status.OK, text, data=data)


def _gpus() -> Finding:
    import torch

    from sidestream_kv.device.choice import why_no_gpu

    names = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    missing = why_no_gpu()
    data: dict[str, object] = {"names": names, "device": CPU if missing else CUDA, "missing": missing}
    if missing is None:
        free, total = torch.cuda.mem_get_info(0)
        text = f"{', '.join(names)}; --device cuda uses the first one, {_size(free)} of its {_size(total)} are free"
        return Finding("gpus", Status.OK, text, data={**data, "free_bytes": free, "total_bytes": total})
    if names:
        return Finding("gpus", Status.WARN, f"{', '.join(names)}: cannot be used, --device auto is cpu", missing, data)
    return Finding("gpus", Status.OK, f"none usable, --device auto is cpu ({missing})", data=data)


def _memory_lock(on_gpu: bool) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = OffloadConfig().host_bytes
    text = f"limit of pinned memory {_limit(soft)} (hard limit {_limit(hard)}); the cpu device pins no memory"
    if on_gpu:
        text += ", the cuda device pins all of its host tier (memory that the driver pins may not count)"
    remedy = (
        f"if pinning fails: ulimit -l {wanted >> 10}, or more for a larger --offload-host"
        if on_gpu and 0 <= soft < wanted
        else ""
    )
    data: dict[str, object] = {
        name: None if value == resource.RLIM_INFINITY else value
        for name, value in (("soft_bytes", soft), ("hard_bytes", hard))
    }
    return Finding("memory lock", Status.OK, text, remedy, data)


def _limit(num_bytes: int) -> str:
    return "none" if num_bytes == resource.RLIM_INFINITY else _size(num_bytes)


def _copy_speed(kind: str) -> Finding:
    load, store = copy_speeds(kind)
    if kind == CPU:
        return Finding("host to device", Status.OK, f"{_speed(load)}, by one thread", data={"bytes_per_s": load})
    data: dict[str, object] = {"to_gpu_bytes_per_s": load, "from_gpu_bytes_per_s": store}
    return Finding("host to gpu", Status.OK, f"{_speed(load)}, and back {_speed(store)}, pinned", data=data)


def _disk(chosen: Path | None, dtype: str) -> Iterator[Finding]:
    from sidestream.models.catalog import cache_root

    directory = _existing(chosen if chosen is not None else cache_root())
    try:
        free = shutil.disk_usage(directory).free
        wanted = OffloadConfig().disk_bytes
        enough = free >= wanted
        remedy = (
            ""
            if enough
            else f"the disk tier takes up to {_size(wanted)}: "
            "lower --offload-disk-capacity, free disk space, or choose another --disk"
        )
        yield Finding(
            "disk space",
            Status.OK if enough else Status.WARN,
            f"{_size(free)} free for {directory}",
            remedy,
            {"directory": str(directory), "free_bytes": free},
        )
        if free < 2 * DISK_BYTES:
            yield Finding(
                "disk speed",
                Status.WARN,
                f"not measured: that needs {_size(2 * DISK_BYTES)} of free space",
                "free disk space, or choose another --disk",
            )
        else:
            yield _disk_speed(directory, dtype)
    except (OSError, ConfigError, TierError) as fault:
        yield Finding(
            "disk",
            Status.WARN,
            f"{directory} cannot be used: {fault}",
            "choose a writable directory with --disk, or set SIDESTREAM_CACHE",
        )


def _existing(path: Path) -> Path:
    """`path`, or its nearest existing parent, because doctor creates no directory."""
    path = path.expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _disk_speed(directory: Path, dtype: str) -> Finding:
    speeds, direct = disk_speeds(directory, dtype)
    read, write, synced = (_speed(speeds[name]) for name in ("read", "write", "write_synced"))
    slow = speeds["read"] < _SLOW_DISK
    return Finding(
        "disk speed",
        Status.WARN if slow else Status.OK,
        f"read {read}, write {write} ({synced} with sync to the disk), {'direct' if direct else 'buffered'} I/O",
        "reading a prefix may take as long as recomputing it: choose a faster disk with --disk" if slow else "",
        {"direct_io": direct, **{f"{name}_bytes_per_s": value for name, value in speeds.items()}},
    )


def _cache() -> Iterator[Finding]:
    from sidestream.models.catalog import cache_root, prepared

    root = cache_root()
    nearest = _existing(root)
    data: dict[str, object] = {"directory": str(root)}
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        yield Finding("cache", Status.OK, str(root), data=data)
    else:
        yield Finding(
            "cache",
            Status.WARN,
            f"{root} is not writable",
            "set SIDESTREAM_CACHE to a writable directory",
            data,
        )
    path = prepared(DEMO_MODEL)
    text = f"{DEMO_MODEL} is prepared" if path is not None else f"{DEMO_MODEL} is not prepared"
    remedy = "" if path is not None else f"sidestream models prepare {DEMO_MODEL} (the first use prepares it, too)"
    yield Finding(
        "demo model", Status.OK if path is not None else Status.WARN, text, remedy, {"prepared": path is not None}
    )


def _model(model: str, device: str) -> Finding:
    """Bytes of a model's KV and recurrent states on the device. Reads no weights."""
    import torch

    from sidestream.models import cache_parts
    from sidestream.models.catalog import CATALOG, prepared

    path = prepared(model) if model in CATALOG else model
    if path is None:
        return Finding("model", Status.WARN, f"{model} is not prepared", f"sidestream models prepare {model}")
    try:
        parts = cache_parts(str(path), block_tokens=None, device=torch.device(device))
    except (ConfigError, OSError) as error:
        remedy = "give a name that `sidestream models` lists, a directory or a hub id, of a supported model"
        return Finding("model", Status.WARN, str(error), remedy)
    kv, state = parts.kv, parts.state
    text = f"{model} in {kv.dtype}: {_size(kv.token_bytes)} of KV a token"
    data: dict[str, object] = {"dtype": kv.dtype, "kv_token_bytes": kv.token_bytes, "state_bytes": 0}
    if state is not None:
        state_bytes = blocks_per_state(state, kv.block_bytes) * kv.block_bytes
        data["state_bytes"] = state_bytes
        text += f", {_size(state_bytes)} of recurrent state for each request and each checkpoint"
    return Finding("model", Status.OK, text, data=data)


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", 1024)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _speed(bytes_per_s: float) -> str:
    return f"{_size(bytes_per_s)}/s"
