"""What this machine has and can do, one probe a function; each says what it found, whether that is well, and what to do
if not.

Called by `doctor` on the main thread. The probes that measure take about a third of a second each; the disk's writes
and reads `_DISK_BYTES` through the disk tier itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from sidestream.cli.options import DEMO_MODEL
from sidestream.config import EngineConfig, OffloadConfig
from sidestream.device.machine import cpu_name, instruction_set, memory_bytes
from sidestream.errors import ConfigError, TierError

if TYPE_CHECKING:
    from sidestream.device.base import CopyBatch, Device
    from sidestream.tiers.disk import DiskTier

_MIB, _GIB = 1 << 20, 1 << 30
_COPY_BYTES = 64 * _MIB
_COPY_S = 0.3
_DISK_BYTES = 96 * _MIB
_SLOW_DISK = 100 * _MIB  # bytes a second; below, recomputing a prefix with a small model is about as fast as reading it
_STORED = "bfloat16"  # what the demo model and most others are stored in
_MODEL_BYTES = _GIB  # the demo model with its working memory, and some for everybody else


class Status(StrEnum):
    """How well something is; only a failure makes serving impossible."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found: `text` for people, `data` for programs. `remedy` says what to do when it is not well."""

    name: str
    status: Status
    text: str
    remedy: str = ""
    data: dict[str, object] = field(default_factory=dict)


def findings(disk: Path | None) -> Iterator[Finding]:
    """All findings, each as soon as it is there. `disk` is where the disk tier would be; None: the cache directory."""
    packages = list(_packages())
    yield from packages
    yield from _extras()
    if any(finding.status is Status.FAIL for finding in packages):
        return  # what follows uses them
    yield _cpu()
    dtype = _dtype()
    yield dtype
    yield from _memory()
    gpu = _gpus()
    yield gpu
    on_gpu = gpu.data["device"] == "cuda"
    yield _copy_speed("cpu")
    if on_gpu:
        yield _copy_speed("cuda")
    yield _memory_lock(on_gpu)
    yield from _disk(disk, str(dtype.data["dtype"]))
    yield from _cache()


def _packages() -> Iterator[Finding]:
    """Sidestream itself, Python, and what the package's own requirements say of the versions of everything else."""
    from sidestream import __version__

    python = platform.python_version()
    yield Finding(
        "sidestream", Status.OK, f"{__version__}, Python {python}", data={"version": __version__, "python": python}
    )
    try:
        requirements = importlib.metadata.requires("sidestream") or ()
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path: what it needs is written nowhere else
        requirements = ()
        yield Finding("packages", Status.WARN, "not checked, sidestream itself is not installed", "pip install -e .")
    for requirement in requirements:
        if (
            parts := re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement)
        ) is not None:  # those of extras have a marker behind
            yield from _package(parts[1], parts[2], remedy=f"pip install '{requirement}'")


def _package(name: str, bound: str, *, remedy: str) -> Iterator[Finding]:
    """Torch and transformers are always worth a line; the others only when they are missing or too old."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
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
    """Why `name` cannot be imported, in one line; empty if it can. A package may be there and its libraries not."""
    try:
        importlib.import_module(name)
    except Exception as fault:
        return next(iter(str(fault).splitlines()), "") or type(fault).__name__
    return ""


def _numbers(version: str) -> list[int]:
    """`2.13.0+cpu` as [2, 13, 0]."""
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
    """What `--dtype auto` means here for models as most are stored."""
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
    threads = torch.get_num_threads()  # what --threads is by default
    text = f"{cpu_name()}, {limit:g} of {os.cpu_count()} cores usable, {threads} compute threads"
    data: dict[str, object] = {"model": cpu_name(), "cores": os.cpu_count(), "usable_cores": limit, "threads": threads}
    if threads > limit:
        remedy = f"more threads than cores wait for one another: use --threads {max(1, int(limit))}, or unset OMP_NUM_THREADS"
        return Finding("cpu", Status.WARN, text, remedy, data)
    if threads < int(limit):
        return Finding(
            "cpu", Status.WARN, text, f"cores lie idle: use --threads {int(limit)}, or unset OMP_NUM_THREADS", data
        )
    return Finding("cpu", Status.OK, text, data=data)


def _cgroup_cores() -> float | None:
    """Cores that the container may use on average; None: no such limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        if quota != "max":
            return int(quota) / int(period)
    return None


def _memory() -> Iterator[Finding]:
    total, available = memory_bytes()
    if total is None or available is None:
        return
    wanted = (EngineConfig().sizes("cpu").kv_bytes or 0) + _MODEL_BYTES
    text = f"{_size(available)} of {_size(total)} available"
    data: dict[str, object] = {"total_bytes": total, "available_bytes": available}
    if available < wanted:
        remedy = f"the demo model with the default KV pool takes up to {_size(wanted)}: free some, or lower --kv-memory"
        yield Finding("memory", Status.WARN, text, remedy, data)
    else:
        yield Finding("memory", Status.OK, text, data=data)


def _gpus() -> Finding:
    import torch

    from sidestream.device.choice import why_no_gpu

    names = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    missing = why_no_gpu()
    data: dict[str, object] = {"names": names, "device": "cpu" if missing else "cuda", "missing": missing}
    if missing is None:
        free, total = torch.cuda.mem_get_info(0)
        text = f"{', '.join(names)}; --device cuda uses the first one, {_size(free)} of its {_size(total)} are free"
        return Finding("gpus", Status.OK, text, data={**data, "free_bytes": free, "total_bytes": total})
    if names:
        return Finding("gpus", Status.WARN, f"{', '.join(names)}: cannot be used, --device auto is cpu", missing, data)
    return Finding("gpus", Status.OK, f"none that can be used, --device auto is cpu ({missing})", data=data)


def _memory_lock(on_gpu: bool) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = OffloadConfig().host_bytes
    text = f"limit of pinned memory {_limit(soft)} (hard limit {_limit(hard)}); the cpu device pins none"
    if on_gpu:
        text += ", the cuda device all of its host tier (the driver's pins may not count)"
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
    """Both ways as loads and stores go: copies on a stream of their own, between host memory and memory of the
    device.
    """
    import numpy as np

    from sidestream.device.base import CopyBatch
    from sidestream.device.cpu import CpuDevice
    from sidestream.device.cuda import CudaDevice

    device: Device = CpuDevice() if kind == "cpu" else CudaDevice()
    try:
        host, memory = device.allocate_host("host", _COPY_BYTES), device.allocate("kv", _COPY_BYTES)
        host.data.fill_(1)
        start = np.zeros(1, np.int64)
        load, store = (
            CopyBatch(host, memory, start, start, _COPY_BYTES),
            CopyBatch(memory, host, start, start, _COPY_BYTES),
        )
        speed = _measure(device, load)
        if kind == "cpu":
            return Finding("host to device", Status.OK, f"{_speed(speed)}, by one thread", data={"bytes_per_s": speed})
        back = _measure(device, store)
        data: dict[str, object] = {"to_gpu_bytes_per_s": speed, "from_gpu_bytes_per_s": back}
        return Finding("host to gpu", Status.OK, f"{_speed(speed)}, and back {_speed(back)}, pinned", data=data)
    finally:
        device.close()


def _measure(device: Device, batch: CopyBatch) -> float:
    """Bytes a second of the copy, again and again."""
    stream = device.stream(f"{batch.source.name} to {batch.target.name}")
    device.wait_host(stream.submit(lambda: stream.copy(batch)), reason="warm up")  # touches the pages
    copies, started_s = 0, time.monotonic()
    while time.monotonic() - started_s < _COPY_S:
        device.wait_host(stream.submit(lambda: stream.copy(batch)), reason="measure")
        copies += 1
    return copies * batch.num_bytes / (time.monotonic() - started_s)


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
            else f"the disk tier takes up to {_size(wanted)}: lower --offload-disk-capacity, free some, or choose another --disk"
        )
        yield Finding(
            "disk space",
            Status.OK if enough else Status.WARN,
            f"{_size(free)} free for {directory}",
            remedy,
            {"directory": str(directory), "free_bytes": free},
        )
        if free < 2 * _DISK_BYTES:
            yield Finding(
                "disk speed",
                Status.WARN,
                f"not measured: that takes {_size(2 * _DISK_BYTES)}",
                "free some, or choose another --disk",
            )
        else:
            yield _disk_speed(directory, dtype)
    except (OSError, ConfigError, TierError) as fault:
        yield Finding(
            "disk",
            Status.WARN,
            f"{directory} cannot be used: {fault}",
            "choose a directory that you may write to with --disk, or set SIDESTREAM_CACHE",
        )


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists: doctor creates none."""
    path = path.expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _disk_speed(directory: Path, dtype: str) -> Finding:
    """Blocks as the tier writes them and reads them back, verified, without the help of the page cache."""
    from sidestream.kv.layout import KVLayout
    from sidestream.tiers.disk import DiskTier, entry_bytes

    layout = KVLayout(
        num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=EngineConfig().block_tokens, dtype=dtype
    )  # the demo model's
    num_blocks = _DISK_BYTES // layout.block_bytes
    with tempfile.TemporaryDirectory(prefix=".sidestream-doctor-", dir=directory) as scratch:
        tier = DiskTier.open(
            scratch, layout=layout, fingerprint="doctor", capacity_bytes=(num_blocks + 1) * entry_bytes(layout)
        )
        try:
            write, sync, read = _time_blocks(tier, Path(scratch), num_blocks, layout.block_bytes)
        finally:
            tier.close()
    moved = num_blocks * layout.block_bytes
    speeds = {"write": moved / write, "write_synced": moved / (write + sync), "read": moved / read}
    text = f"read {_speed(speeds['read'])}, write {_speed(speeds['write'])} ({_speed(speeds['write_synced'])} until it is on the medium)"
    slow = speeds["read"] < _SLOW_DISK
    remedy = "recomputing a prefix may be as fast as reading it: choose a faster disk with --disk" if slow else ""
    data: dict[str, object] = {f"{name}_bytes_per_s": value for name, value in speeds.items()}
    return Finding("disk speed", Status.WARN if slow else Status.OK, text, remedy, data)


def _time_blocks(tier: DiskTier, scratch: Path, num_blocks: int, block_bytes: int) -> tuple[float, float, float]:
    """Seconds to write, to sync, and to read `num_blocks` blocks."""
    keys = [index.to_bytes(16, "big") for index in range(num_blocks)]
    payload = memoryview(os.urandom(block_bytes))  # a disk that compresses shall not look fast
    out = memoryview(bytearray(block_bytes))
    grants = [grant for key in keys if (grant := tier.index.reserve(key)) is not None]  # None: held already
    started_s = time.monotonic()
    for grant in grants:
        tier.write(grant, payload)
    written_s = time.monotonic()
    _sync_and_forget(scratch)
    synced_s = time.monotonic()
    for grant in grants:
        tier.index.publish(grant)
    lease = tier.index.pin(keys)
    reading_s = time.monotonic()
    for entry in lease.entries:
        tier.read(entry, out)
    read_s = time.monotonic() - reading_s
    lease.release()
    return written_s - started_s, synced_s - written_s, read_s


def _sync_and_forget(scratch: Path) -> None:
    """Bring every file to the medium and out of the page cache, as a later process would find it."""
    for path in scratch.rglob("*-*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


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
            "set SIDESTREAM_CACHE to a directory that you may write to",
            data,
        )
    path = prepared(DEMO_MODEL)
    text = f"{DEMO_MODEL} is prepared" if path is not None else f"{DEMO_MODEL} is not prepared"
    remedy = "" if path is not None else f"sidestream models prepare {DEMO_MODEL} (or it is done when it is first used)"
    yield Finding(
        "demo model", Status.OK if path is not None else Status.WARN, text, remedy, {"prepared": path is not None}
    )


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", 1024)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _speed(bytes_per_s: float) -> str:
    return f"{_size(bytes_per_s)}/s"
