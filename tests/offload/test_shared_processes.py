"""Engines in processes of their own, which write, evict and read the blocks of one small memory, and are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared_rig import Engine, engines_of, running, wait_until

# For each line of input, forks an engine that writes and reads blocks until it is killed. It writes each block in two
# halves, and prints a line if it reads a block with other bytes than its own.
ENGINES = """
import os, random, sys, time
from pathlib import Path
from shared_rig import Engine

def work_for_ever(path, seed):
    rng, engine = random.Random(seed), Engine(path)
    while True:
        numbers = rng.sample(range(1, 40), 3)
        if rng.random() < 0.5:
            engine.store(*numbers, halves=True)
        elif rng.random() < 0.05:
            engine.pool.forget_all()
        else:
            engine.found(*numbers)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            work_for_ever(Path(sys.argv[1]), int(line))
        except BaseException as error:
            print("failed:", repr(error), flush=True)
            os._exit(1)
    print(child, flush=True)
"""


@pytest.mark.slow  # 60 engines
def test_engines_that_are_killed_leave_only_whole_blocks_and_no_lease(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command, rng = [sys.executable, "-c", ENGINES, str(tmp_path / "cache")], random.Random(0)
    with (
        running(tmp_path / "cache"),
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as parent,
    ):
        assert parent.stdin is not None and parent.stdout is not None
        witness, alive, stored = Engine(tmp_path / "cache", slots=16), list[int](), 0
        try:
            for seed in range(60):
                print(seed, file=parent.stdin, flush=True)
                alive.append(int(parent.stdout.readline()))
                if len(alive) == 3:
                    time.sleep(rng.uniform(0.0, 0.05))
                    os.kill(alive.pop(rng.randrange(3)), signal.SIGKILL)
                    stored += len(witness.found(*range(1, 40)))
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
        assert parent.stdout.read() == ""
        assert stored > 100
        wait_until(lambda: engines_of(tmp_path / "cache") == [os.getpid()])
        witness.pool.refresh()
        assert len(witness.store(*range(1, 17))) == 16
        assert witness.found(*range(1, 17)) == [*range(1, 17)]
        witness.close()
