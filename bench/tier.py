"""Speed of the disk tier beside raw direct I/O on the same file system, the cost of its checksums, and the time to open
a directory of a million blocks.

raw      threads that write and read whole blocks of large files, with direct I/O where the file system allows it and
         nothing else: no header, checksum, record or lease. With `--fio`, fio does that
tier     the tier's own streams, checksums on

Both move the same bytes with the same number of threads and sizes of blocks, in turn; ratios are medians of the rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from proof.report import Figure, at_least, at_most
from sidestream.errors import SidestreamError
from sidestream_kv.config import parse_bytes
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers import slots
from sidestream_kv.offload.tiers.base import batch_blocks
from sidestream_kv.offload.tiers.directory import TierDirectory
from sidestream_kv.offload.tiers.disk import SEGMENT_BYTES, DiskTier, entry_bytes

_SIZES = {"": 2 << 20, "_128k": 128 << 10}
_BOUNDS = {"": 0.9, "_128k": 0.8}
_MEMORY_BLOCKS = 64
_MILLION = 1_000_000

Memory = npt.NDArray[np.uint8]


def measure(
    *, directory: Path, size: str, rounds: int, entries: int, fio: bool, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Measure in a new directory below `directory`, which is removed. `size`: bytes of each write and read. `entries`:
    blocks of the directory that is opened. Raises SidestreamError if fio is wanted and missing.
    """
    num_bytes = parse_bytes(size, option="size")
    if fio and shutil.which("fio") is None:
        raise SidestreamError("there is no fio: install it, or leave --fio out")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix=".sidestream-tier-", dir=directory) as scratch:
        for suffix, block_bytes in _SIZES.items():
            seconds: dict[str, list[float]] = {}
            for number in range(rounds):
                on_progress(f"{block_bytes >> 10} KiB blocks, round {number + 1} of {rounds}")
                for name, value in _round(Path(scratch), block_bytes, num_bytes, fio).items():
                    seconds.setdefault(name, []).append(value)
            figures += _figures(suffix, num_bytes, seconds)
        on_progress(f"opening {entries} blocks")
        opened_s = _open_s(Path(scratch) / "many", entries)
    return [
        *figures,
        Figure("files_per_gib", (1 << 30) / SEGMENT_BYTES, "files", at_most(4)),
        Figure("start_up_s_million_entries", opened_s * _MILLION / entries, "s", at_most(2)),
    ]


def _figures(suffix: str, num_bytes: int, seconds: dict[str, list[float]]) -> list[Figure]:
    def over(one: str, other: str) -> float:
        return median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))

    bound = _BOUNDS[suffix]
    return [
        Figure(f"disk_read_over_raw{suffix}", over("raw_read", "read"), "ratio", at_least(bound)),
        Figure(f"disk_write_over_raw{suffix}", over("raw_write", "write"), "ratio", at_least(bound)),
        Figure(f"checksum_cost{suffix}", over("read", "read_without") - 1, "share", at_most(0.05)),
        *(
            Figure(f"{name}_mb_s{suffix}", num_bytes / median(seconds[name]) / 1e6, "MB/s")
            for name in ("read", "write", "raw_read", "raw_write")
        ),
    ]


def _round(scratch: Path, block_bytes: int, num_bytes: int, fio: bool) -> dict[str, float]:
    """Seconds of each kind."""
    count = num_bytes // block_bytes
    memory = np.frombuffer(mmap(-1, _MEMORY_BLOCKS * block_bytes), np.uint8).reshape(_MEMORY_BLOCKS, block_bytes)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape, np.uint8)
    with _tier(scratch / "tier", memory, count) as tier:
        threads = (tier.streams.writers, tier.streams.readers)
        found = {"write": _write_s(tier, memory, count)}
        found["raw_write"], found["raw_read"] = (_fio_s if fio else raw_s)(scratch / "raw", memory, count, *threads)
        found["read"] = _read_s(tier, memory)
        with _without_checksums():
            found["read_without"] = _read_s(tier, memory)
    return found


@contextmanager
def _tier(path: Path, memory: Memory, count: int) -> Iterator[DiskTier]:
    block_bytes = memory.shape[1]
    layout = KVLayout(1, 1, block_bytes // 64, 16, "bfloat16")
    tier = DiskTier.open(path, layout=layout, fingerprint="bench", capacity_bytes=count * entry_bytes(layout))
    try:
        _write_s(tier, memory, count)  # so that the files are written once, like those of raw
        tier.index.clear()
        yield tier
    finally:
        tier.close()
        shutil.rmtree(path)


def _write_s(tier: DiskTier, memory: Memory, count: int) -> float:
    grants = [grant for at in range(count) if (grant := tier.index.reserve(at.to_bytes(16, "big"))) is not None]
    batches = _batches(tier, memory, count)
    seconds = _run(
        tier.streams.writers,
        len(batches),
        lambda at: _check(tier.write_all([grants[each] for each in batches[at]], _blocks(memory, batches[at]))),
    )
    for grant in grants:
        tier.index.publish(grant)
    return seconds


def _read_s(tier: DiskTier, memory: Memory) -> float:
    entries = list(tier.index.entries)
    batches = _batches(tier, memory, len(entries))
    return _run(
        tier.streams.readers,
        len(batches),
        lambda at: _check(tier.read_all([entries[each] for each in batches[at]], _blocks(memory, batches[at]))),
    )


def _batches(tier: DiskTier, memory: Memory, count: int) -> list[range]:
    """The blocks that the offload worker gives to a stream at once."""
    size = batch_blocks(tier, memory.shape[1])
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _blocks(memory: Memory, batch: range) -> list[Memory]:
    return [memory[at % len(memory)] for at in batch]


def _check(failures: Iterable[Exception | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure


@contextmanager
def _without_checksums() -> Iterator[None]:
    digest = slots._digest
    slots._digest = lambda header, payload: bytes(header[slots._DIGEST_AT :])
    try:
        yield
    finally:
        slots._digest = digest


def raw_s(path: Path, memory: Memory, count: int, writers: int, readers: int) -> tuple[float, float]:
    """Seconds to write and to read the blocks of files as large as a segment, with nothing else."""
    path.mkdir()
    block_bytes = memory.shape[1]
    per_file = SEGMENT_BYTES // block_bytes
    direct = os.O_DIRECT if slots.allows_direct_io(TierDirectory.open(path)) else 0
    fds = []
    try:
        for number in range(-(-count // per_file)):
            fds.append(os.open(path / str(number), os.O_RDWR | os.O_CREAT | direct))
            os.posix_fallocate(fds[-1], 0, per_file * block_bytes)

        def place(at: int) -> tuple[int, list[memoryview], int]:
            return fds[at // per_file], [memory[at % len(memory)].data], at % per_file * block_bytes

        _run(writers, count, lambda at: os.pwritev(*place(at)))
        return (
            _run(writers, count, lambda at: os.pwritev(*place(at))),
            _run(readers, count, lambda at: os.preadv(*place(at))),
        )
    finally:
        for fd in fds:
            os.close(fd)
        shutil.rmtree(path)


def _fio_s(path: Path, memory: Memory, count: int, writers: int, readers: int) -> tuple[float, float]:
    """Seconds that fio takes to write and to read the same blocks."""
    path.mkdir()

    def run(kind: str, jobs: int) -> float:
        size = count // jobs * memory.shape[1]
        options = f"--name=raw --rw={kind} --bs={memory.shape[1]} --numjobs={jobs} --size={size} --direct=1"
        command = ["fio", *options.split(), "--ioengine=psync", "--group_reporting", "--output-format=json"]
        ran = subprocess.run([*command, f"--directory={path}"], check=True, capture_output=True, text=True)
        rate = float(json.loads(ran.stdout)["jobs"][0][kind]["bw_bytes"])
        return int(count * memory.shape[1]) / rate

    try:
        run("write", writers)
        return run("write", writers), run("read", readers)
    finally:
        shutil.rmtree(path)


def _run(threads: int, count: int, work: Callable[[int], object]) -> float:
    """Seconds for `count` pieces of work on this number of threads, which all begin at once."""
    begin = threading.Barrier(threads + 1)

    def share(first: int) -> None:
        begin.wait()
        for at in range(first, count, threads):
            work(at)

    with ThreadPoolExecutor(threads) as pool:
        shares = [pool.submit(share, first) for first in range(threads)]
        begin.wait()
        start_s = time.perf_counter()
        for done in shares:
            done.result()
        return time.perf_counter() - start_s


def _open_s(path: Path, count: int) -> float:
    """Seconds to open a directory with this number of blocks: the median of five."""
    layout = KVLayout(1, 1, 32, 16, "bfloat16")
    options = {"layout": layout, "fingerprint": "bench", "capacity_bytes": count * entry_bytes(layout)}
    tier = DiskTier.open(path, **options)  # type: ignore[arg-type]
    geometry = tier._medium.geometry
    tier.close()
    records, random = slots.Records.void(count), np.random.default_rng(0)
    records.bodies["key"] = random.integers(0, 1 << 63, (count, 2), np.uint64)
    records.bodies["serial"] = np.arange(count)
    records.stamps[:] = random.permutation(count)
    records.checks[:] = slots._checks(np.arange(count, dtype=np.uint64), records.bodies)
    slots.SlotTable.create(TierDirectory.open(path), geometry, records=records, opens=1)
    seconds = []
    for _ in range(5):
        start_s = time.perf_counter()
        tier = DiskTier.open(path, **options)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - start_s)
        assert len(tier.index) == count
        tier.close()
        del tier
    return median(seconds)
