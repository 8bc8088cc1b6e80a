"""Several processes on one directory, and kill -9 in the middle of writing and between any two file operations."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_fixtures import holds, key, load, open_tier, records

# For each line of input, fork a process that opens the tier with that many entries and stores keys until it is killed.
# It prints its id, then a key's number after each publish. Forking saves importing everything once more for every kill.
WRITERS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from disk_fixtures import block, key, open_tier

def write_for_ever(directory, first, max_entries):
    tier = open_tier(directory, max_entries=max_entries)
    print(os.getpid(), flush=True)
    with ThreadPoolExecutor(3) as streams:
        while True:
            grants = [tier.index.reserve(key(number)) for number in range(first, first + 3)]
            if first % 2:  # at once, or one block on each stream
                assert tier.write_all(grants, [block(grant.entry.key) for grant in grants]) == [None] * 3
            else:
                for work in [streams.submit(tier.write, grant, block(grant.entry.key)) for grant in grants]:
                    work.result()
            for grant in grants:
                tier.index.publish(grant)
            print(first, flush=True)
            first += 3

for line in sys.stdin:
    first, max_entries = map(int, line.split())
    child = os.fork()
    if child == 0:
        write_for_ever(sys.argv[1], first, max_entries)
    _, status = os.waitpid(child, 0)
    print("killed by", os.WTERMSIG(status), flush=True)
"""


class Writers:
    """A process that forks one writer after another; see WRITERS."""

    def __init__(self, directory: Path) -> None:
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITERS, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def start(self, first: int, *, max_entries: int) -> int:
        """Start a writer; its process id."""
        assert self.process.stdin is not None
        print(first, max_entries, file=self.process.stdin, flush=True)
        return int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self, writer: int) -> list[int]:
        """kill -9; the numbers of the keys that were published but not read from the pipe yet."""
        os.kill(writer, signal.SIGKILL)
        published: list[int] = []
        while not (line := self.line()).startswith("killed by"):
            published.extend(range(int(line), int(line) + 3))
        assert line == f"killed by {signal.SIGKILL:d}"
        return published


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    writers = Writers(tmp_path)
    yield writers
    assert writers.process.stdin is not None
    assert writers.process.stdout is not None
    writers.process.stdin.close()
    writers.process.wait(timeout=30)
    writers.process.stdout.close()


def test_kill_9_at_any_moment_loses_no_published_block_and_shows_no_partial_one(
    tmp_path: Path, writers: Writers
) -> None:
    rng, first, published = random.Random(3), 0, set[int]()
    for _ in range(8):
        writer = writers.start(first, max_entries=10_000)
        for _ in range(rng.randrange(1, 12)):
            published.update(range(number := int(writers.line()), number + 3))
        published.update(writers.kill(writer))
        tier = open_tier(tmp_path, max_entries=10_000)
        first = max(published) + 1
        assert all(holds(tier, key(number)) for number in published)
        complete = [
            number for number in range(first, first + 3) if key(number) in tier.index
        ]  # complete, not published yet
        assert all(holds(tier, key(number)) for number in complete)
        assert len(tier.index) == len(published) + len(complete) == len(records(tier))
        assert tier.index.stats.corrupt == 0
        published.update(complete)
        first += 3
        tier.close()


def test_kill_9_while_evicting_leaves_complete_entries_within_the_capacity(tmp_path: Path, writers: Writers) -> None:
    rng, first = random.Random(4), 0
    for _ in range(4):
        writer = writers.start(first, max_entries=9)
        for _ in range(rng.randrange(5, 15)):
            first = int(writers.line()) + 3
        first = max([first, *writers.kill(writer)]) + 10
        tier = open_tier(tmp_path, max_entries=9)
        assert len(tier.index) >= 6  # all but the three that were being written
        for wanted in tier.index:
            load(tier, wanted)
        tier.close()


# Forks a child that kills itself at its n-th call of a file operation, and examines the directory: n = 1, 2, … up to
# a child that lives. A part of a write is done. A child opens a tier for two entries, writes, evicts, loses its
# directory, makes it anew and writes again, at last two blocks at once. It reports the keys that it has published since
# the loss, or since it began to replace all of them.
KILLED_AT_EACH_CALL = """
import os, shutil, signal, sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from disk_fixtures import block, holds, key, open_tier, records, store
from sidestream.errors import TierLost

directory = Path(sys.argv[1])

def live(published):
    tier = open_tier(directory, max_entries=2)
    for number in (0, 1, 2):
        store(tier, key(number))
        os.write(published, bytes([number]))
    directory.rename(directory.with_name("lost"))
    os.write(published, b"-")
    grant = tier.index.reserve(key(3))
    with suppress(TierLost):
        tier.write(grant, block(key(3)))
        os._exit(1)
    tier.index.abandon(grant)
    tier.index.clear()
    for number in (4, 5, 6):
        store(tier, key(number))
        os.write(published, bytes([number]))
    os.write(published, b"-")  # in place of both
    grants = [tier.index.reserve(key(number)) for number in (7, 8)]
    assert tier.write_all(grants, [block(key(7)), block(key(8))]) == [None, None]
    for grant in grants:
        tier.index.publish(grant)
    os.write(published, bytes([7, 8]))
    tier.close()

def counted(call, left):
    def counts(*args, **options):
        if next(left) == 0:
            if call.__name__ == "pwritev":
                call(args[0], [args[1][0]], args[2])
            elif call.__name__ == "pwrite":
                with suppress(OSError):  # direct I/O has no halves
                    call(args[0], args[1][: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    return counts

for calls in count(1):
    for made in (directory, directory.with_name("lost")):
        shutil.rmtree(made, ignore_errors=True)
    reading, published = os.pipe()
    child = os.fork()
    if child == 0:
        left = count(calls - 1, -1)
        for name in ("open", "mkdir", "pwrite", "pwritev", "posix_fallocate", "rename", "unlink", "fsync"):
            setattr(os, name, counted(getattr(os, name), left))
        live(published)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.close(published)
    done = os.read(reading, 100).rpartition(b"-")[2]
    os.close(reading)
    tier = open_tier(directory, max_entries=2)
    found = [number for number in range(9) if key(number) in tier.index]
    assert all(holds(tier, key(number)) for number in found), (calls, found)
    assert set(done[-1:]) <= set(found), (calls, done, found)  # the key before it may be a victim already
    assert len(found) == len(records(tier)) <= 2, (calls, found, records(tier))
    store(tier, key(9))
    assert holds(tier, key(9))
    tier.close()
    if os.WIFEXITED(status):
        print(os.WEXITSTATUS(status), calls)
        break
"""


def test_kill_9_between_file_operations_keeps_every_published_block(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EACH_CALL, str(tmp_path / "tier")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    status, calls = map(int, ended.stdout.split())
    assert status == 0
    assert calls > 40
