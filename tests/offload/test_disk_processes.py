"""Two processes on one directory, and kill -9 in the middle of writing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_fixtures import entry_files, holds, key, load, open_tier, store

from sidestream.errors import ConfigError

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
        renamed = [
            number for number in range(first, first + 3) if key(number) in tier.index
        ]  # complete, not published yet
        assert all(holds(tier, key(number)) for number in renamed)
        assert len(tier.index) == len(published) + len(renamed) == len(entry_files(tmp_path))
        assert tier.index.stats.corrupt == 0
        published.update(renamed)
        first += 3
        tier.close()


def test_kill_9_while_evicting_leaves_at_most_the_capacity_all_of_it_whole(tmp_path: Path, writers: Writers) -> None:
    rng, first = random.Random(4), 0
    for _ in range(4):
        writer = writers.start(first, max_entries=9)
        for _ in range(rng.randrange(5, 15)):
            first = int(writers.line()) + 3
        first = max([first, *writers.kill(writer)]) + 10
        assert len(entry_files(tmp_path)) <= 9
        tier = open_tier(tmp_path, max_entries=9)
        assert len(tier.index) >= 6  # all but the three that were being written
        for wanted in tier.index:
            load(tier, wanted)
        tier.close()


def test_a_directory_held_by_another_process_is_refused_until_that_is_killed(tmp_path: Path, writers: Writers) -> None:
    writer = writers.start(0, max_entries=10_000)
    with pytest.raises(ConfigError, match=f"is in use by process {writer}: stop that process"):
        open_tier(tmp_path, max_entries=1)
    writers.kill(writer)
    tier = open_tier(tmp_path, max_entries=10_000)
    store(tier, key(-1))
    assert holds(tier, key(-1))
