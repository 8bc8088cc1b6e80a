"""Jobs of a campaign: each runs on one core, and leaves its process as it was."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass

import pytest

from proof.torture.workers import spread

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads to cores")]


@dataclass(frozen=True)
class CoresOfThreads:
    fails: bool = False

    def run(self) -> list[set[int]]:
        if self.fails:
            raise ValueError("it failed")
        cores = [os.sched_getaffinity(0)]
        other = threading.Thread(target=lambda: cores.append(os.sched_getaffinity(0)))
        other.start()
        other.join()
        return cores


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_and_its_threads_run_on_one_core(workers: int) -> None:
    allowed = os.sched_getaffinity(0)
    for own, of_thread in spread([CoresOfThreads()] * 3, workers=workers):
        assert own == of_thread and len(own) == 1 and own <= allowed
    assert os.sched_getaffinity(0) == allowed


def test_a_failed_job_leaves_the_cores_as_they_were() -> None:
    allowed = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="it failed"):
        next(spread([CoresOfThreads(fails=True)], workers=1))
    assert os.sched_getaffinity(0) == allowed
