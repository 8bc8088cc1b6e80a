"""Fences that are done when every rank has passed them."""

from __future__ import annotations

import pytest

from sidestream.errors import DeviceError, DeviceLost
from sidestream.ranks.fences import JointFence, Progress, local_fence, names_of


class _Local:
    stream, tick = "h2d", 7

    def __init__(self) -> None:
        self.done = False
        self.failure: BaseException | None = None

    def poll(self) -> bool:
        return self.done


def test_joint_fence_is_done_when_the_last_rank_has_passed() -> None:
    progress, local = Progress(3), _Local()
    fence = JointFence(local, ("h2d", 2), progress)
    local.done = True
    assert not fence.poll()
    progress.raise_to(1, [("h2d", 2)])
    assert not fence.poll()
    progress.raise_to(2, [("h2d", 1)])
    assert not fence.poll()
    progress.raise_to(2, [("compute", 5)])
    assert not fence.poll()
    progress.raise_to(2, [("h2d", 3)])
    assert fence.poll()
    local.done = False
    assert not fence.poll()


def test_failure_on_any_rank_fails_the_fence() -> None:
    progress, local = Progress(2), _Local()
    first, second = (JointFence(local, ("h2d", number), progress) for number in (1, 2))
    error = DeviceError("on rank 1: no")
    progress.fail(first.name, error)
    assert first.failure is error
    assert second.failure is None
    local.failure = own = DeviceError("own")
    assert second.failure is own


def test_lost_rank_raises_the_first_error_from_every_fence() -> None:
    progress = Progress(2)
    fence = JointFence(_Local(), ("h2d", 1), progress)
    progress.raise_to(1, [("h2d", 1)])
    progress.lose(DeviceLost("rank 1 ended"))
    progress.lose(DeviceLost("rank 1 ended again"))
    with pytest.raises(DeviceLost, match=r"rank 1 ended$"):
        fence.poll()


def test_the_observer_is_told_of_every_rank_with_the_tick_of_rank_0() -> None:
    heard: list[tuple[int, str, int]] = []
    progress = Progress(3, observed=lambda *what: heard.append(what))
    fence = JointFence(_Local(), ("h2d", 1), progress)
    progress.raise_to(1, [("h2d", 1)])
    fence.poll()
    assert heard == []
    progress.raise_to(2, [("h2d", 1)])
    fence.poll()
    assert heard == [(1, "h2d", 7), (2, "h2d", 7)]


def test_only_joint_fences_have_names() -> None:
    local = _Local()
    joint = JointFence(local, ("h2d", 4), Progress(2))
    assert names_of([local, joint]) == (("h2d", 4),)
    assert local_fence(joint) is local
    assert local_fence(local) is local
