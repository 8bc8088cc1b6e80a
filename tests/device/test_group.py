"""Collectives over torch's process groups: sums, gathers and broadcasts, and ranks that do not join or that end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from proof.thread_group import run_ranks, thread_groups
from sidestream.errors import ConfigError, ProcessFailed
from sidestream_kv.device.group import Group, NcclGroup, TorchGroup, _Meeting, _use_peers, open_group
from sidestream_kv.device.kinds import CPU, CUDA

HOST = torch.device(CPU)


def open_all(directory: Path, size: int, *, timeout_s: float = 30) -> list[Group]:
    """Gloo's groups know nothing of processes: here each rank is a thread."""
    with ThreadPoolExecutor(size) as threads:
        ranks = [
            threads.submit(open_group, directory, rank=rank, size=size, device=HOST, timeout_s=timeout_s)
            for rank in range(size)
        ]
    return [rank.result() for rank in ranks]


def on_all(groups: list[Group], work: Callable[[Group], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(work, groups))


def check_collectives(group: Group, dtype: torch.dtype) -> bool:
    """Whether each collective gives this rank the values that it must."""
    ranks = list(range(group.size))
    with torch.inference_mode():
        summed = torch.full((3, 5), group.rank + 1.0, dtype=dtype)
        group.all_reduce(summed)
        own = torch.arange(6, dtype=dtype).view(1, 2, 3) + 10 * group.rank
        gathered = group.all_gather(own.transpose(1, 2))
        sent = torch.full((4,), group.rank + 7.0, dtype=dtype)
        group.broadcast(sent)
        expected = torch.cat([(own - 10 * group.rank + 10 * rank).transpose(1, 2) for rank in ranks], dim=-1)
        return (
            bool((summed == sum(ranks) + group.size).all())
            and torch.equal(gathered, expected)
            and bool((sent == 7).all())
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gloo_collectives_give_each_rank_the_right_values(size: int, tmp_path: Path) -> None:
    groups = open_all(tmp_path, size)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert on_all(groups, lambda group, dtype=dtype: check_collectives(group, dtype)) == [True] * size
    finally:
        for group in groups:
            group.close()
            group.close()


@pytest.mark.parametrize("size", [1, 3])
def test_thread_collectives_give_each_rank_the_right_values(size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert run_ranks(size, lambda group, dtype=dtype: check_collectives(group, dtype)) == [True] * size


@pytest.mark.parametrize("count", [1000, 200_000], ids=["exchanged", "Gloo's own sum"])
def test_sums_have_equal_bits_on_all_ranks(count: int, tmp_path: Path) -> None:
    groups = open_all(tmp_path, 4)

    def summed(group: Group) -> torch.Tensor:
        values = torch.randn(count, generator=torch.Generator().manual_seed(group.rank)).bfloat16()
        group.all_reduce(values)
        return values

    first, *others = on_all(groups, summed)
    assert all(torch.equal(first, other) for other in others)


def test_torch_keeps_its_default_group_for_the_user(tmp_path: Path) -> None:
    groups = open_all(tmp_path, 2)
    assert not torch.distributed.is_initialized()
    for group in groups:
        group.close()


def test_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    before = listening()
    groups = open_all(tmp_path, 2)
    assert {address for address in listening() - before if not address.startswith("0100007F:")} == set()
    for group in groups:
        group.close()


def listening() -> set[str]:
    """This process's addresses in state LISTEN, in the system's notation (IPv4 and IPv6)."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {fields[1] for fields in lines if fields[3] == "0A" and fields[9] in inodes}


@pytest.mark.parametrize(("came", "missing"), [([0], "rank 1"), ([1], "rank 0")])
def test_an_error_names_a_rank_that_does_not_join(came: list[int], missing: str, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed) as caught:
        open_group(tmp_path, rank=came[0], size=2, device=HOST, timeout_s=0.2)
    assert f"rank {came[0]} of 2 waited 0.2 s for {missing}: look at the output" in str(caught.value)


def test_an_error_names_all_ranks_that_do_not_join(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="for ranks 0, 1, 3: "):
        open_group(tmp_path, rank=2, size=4, device=HOST, timeout_s=0.2)


def test_the_directory_of_a_killed_group_is_refused(tmp_path: Path) -> None:
    left = open_all(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"rank 0 of 1 was in .* before: two processes have the same rank"):
        open_group(tmp_path, rank=0, size=1, device=HOST, timeout_s=1)
    left[0].close()


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_outside_the_group_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} of {size}: ranks are numbered"):
        open_group(tmp_path / "new", rank=rank, size=size, device=HOST, timeout_s=1)
    assert not (tmp_path / "new").exists()


def test_a_rank_that_leaves_fails_the_collectives_of_the_others(tmp_path: Path) -> None:
    first, second = open_all(tmp_path, 2)
    second.close()
    with pytest.raises(ProcessFailed, match="all_reduce of rank 0 of 2 failed: another rank has ended"):
        first.all_reduce(torch.ones(3))
    first.close()
    with pytest.raises(ProcessFailed, match="has closed its group: broadcast cannot run"):
        first.broadcast(torch.ones(3))


def test_a_rank_that_does_not_take_part_fails_the_collectives_of_the_others(tmp_path: Path) -> None:
    groups = open_all(tmp_path, 2, timeout_s=0.5)
    with pytest.raises(ProcessFailed, match="all_gather of rank 1 of 2 failed"):
        groups[1].all_gather(torch.ones(3))
    for group in groups:
        group.close()


def test_a_thread_that_does_not_take_part_fails_the_collectives_of_the_others() -> None:
    first, _ = thread_groups(2, timeout_s=0.05)
    with pytest.raises(ProcessFailed, match=r"all_reduce of rank 0 of 2 failed: ranks \[1\] have left or did not take"):
        first.all_reduce(torch.ones(3))


RANK = """
import os, sys, pathlib, torch
from sidestream_kv.device.group import open_group
group = open_group(pathlib.Path(sys.argv[1]), rank=1, size=2, device=torch.device(sys.argv[2]), timeout_s=60)
values = torch.tensor([[1.0], [2.0]])
group.all_reduce(values)
assert values.tolist() == [[11.0], [22.0]]
assert group.all_gather(values).tolist() == [[11.0, 11.0], [22.0, 22.0]]
os._exit(3)
"""


def test_a_rank_may_be_a_process_and_its_end_is_noticed(tmp_path: Path) -> None:
    """Rank 1 is a process; rank 0 a thread of this one, as it is for a compute stream."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), CPU], env=environment)
    errors: list[BaseException] = []

    def rank_0() -> None:
        try:
            group = open_group(tmp_path, rank=0, size=2, device=HOST, timeout_s=60)
            values = torch.tensor([[10.0], [20.0]])
            group.all_reduce(values)
            group.all_gather(values)
            with pytest.raises(ProcessFailed, match="another rank has ended"):
                group.all_reduce(values)
            group.close()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=rank_0)
    thread.start()
    thread.join(90)
    assert not thread.is_alive()
    assert not errors, errors
    assert other.wait(30) == 3


def test_an_abort_returns_at_once_and_ends_before_the_group_is_closed() -> None:
    """NCCL's abort blocks until captured graphs are deleted, and Python must not end meanwhile."""
    began, graphs_are_deleted, ended = threading.Event(), threading.Event(), threading.Event()

    class Backend:
        def abort(self) -> None:
            began.set()
            graphs_are_deleted.wait(10.0)
            time.sleep(0.05)
            ended.set()

    group = TorchGroup(Backend(), rank=0, size=2, store=None)
    group.abort()
    group.abort()
    assert began.wait(10.0) and not ended.is_set()
    graphs_are_deleted.set()
    group.close()
    assert ended.is_set()


def test_closing_a_group_whose_backend_hangs_logs_an_error_and_returns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = threading.Event()

    class Backend:
        def abort(self) -> None:
            ends.wait(30.0)

    monkeypatch.setattr("sidestream_kv.device.group._CLOSE_S", 0.05)
    group = TorchGroup(Backend(), rank=0, size=2, store=None)
    group.close()
    group.close()
    ends.set()
    assert caplog.messages == [
        "rank 0 of 2 left its group, but NCCL has not ended after 0.05 s: a graph may still hold a collective"
    ]


def test_peer_sums_handle_small_tensors_and_are_closed_first() -> None:
    seen: list[str] = []

    class Peers:
        def takes(self, values: torch.Tensor) -> bool:
            return len(values) < 4

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *values: seen.append(f"peers {name}")

    class Backend:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *values: seen.append(f"nccl {name}")

    group = NcclGroup(Backend(), rank=0, size=2, store=None, peers=cast(Any, Peers()))
    group.all_reduce(torch.ones(3))
    group.all_reduce(torch.ones(4))
    group.abort()
    group.abort()
    group.close()
    group.close()
    with pytest.raises(ProcessFailed, match="has closed its group"):
        group.all_reduce(torch.ones(3))
    assert seen == [
        "peers add",
        "nccl allreduce",
        "peers abort",
        "nccl abort",
        "peers abort",
        "peers abort",
        "peers close",
    ]


class FakePeers:
    """Stands for `PeerSums` of each rank; `fault`: what goes wrong on rank 1."""

    def __init__(self, fault: str, *, rank: int, size: int, device: torch.device, check: Callable[[], None]) -> None:
        self.rank, self.fault, self.limit, self.aborted = rank, fault if rank == 1 else "", 1 << 24, False
        if self.fault == "memory":
            raise RuntimeError("out of memory\nand more")

    def handle(self) -> bytes:
        return b"handle %d" % self.rank

    def map(self, handles: list[bytes]) -> None:
        if self.fault == "map" or b"" in handles:
            raise RuntimeError(f"cannot map {handles}")
        assert handles == [b"handle 0", b"handle 1"]

    def right(self) -> bool:
        return self.fault != "right"

    def measure(self, other: Callable[[torch.Tensor], None]) -> list[tuple[int, float, float]]:
        late = 1e-5 * (self.rank == 1)  # each rank measures other times
        return [(4096, 3e-6 + late, 9e-6), (1 << 20, 9e-6 + late, 2e-5), (1 << 22, 1e-4, 9e-5)]

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        assert self.aborted


def use_fake_peers(fault: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[NcclGroup]:
    pytest.importorskip("triton")
    monkeypatch.setattr("sidestream_kv.device.cuda.peers.PeerSums", partial(FakePeers, fault))

    class Backend:
        def abort(self) -> None:
            pass

    def use(rank: int) -> NcclGroup:
        store = torch.distributed.FileStore(str(directory / "store"), 2)  # type: ignore[attr-defined]
        group = NcclGroup(Backend(), rank=rank, size=2, store=store)
        _use_peers(group, _Meeting(store, rank, 2, 20.0, lambda: None), HOST)
        return group

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(use, range(2)))


def test_all_ranks_use_peer_sums_up_to_the_size_that_rank_0_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in use_fake_peers("", tmp_path, monkeypatch):
        assert group.peers is not None and group.peers.limit == 1 << 20
        group.close()


def test_the_size_limit_of_peer_sums_minimizes_total_time() -> None:
    pytest.importorskip("triton")
    from sidestream_kv.device.cuda.peers import fastest_bytes

    assert fastest_bytes([(4, 1e-6, 4e-6), (16, 2e-5, 1e-5), (64, 1e-6, 4e-6), (256, 3e-6, 2e-6)]) == 64
    assert fastest_bytes([(4, 1e-6, 2e-6), (16, 3e-6, 1e-6), (64, 2e-6, 1e-6)]) == 4
    assert fastest_bytes([(4, 2e-6, 1e-6), (16, 1e-6, 1e-6)]) == 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("memory", "rank 1 cannot use its peers (out of memory)"),
        ("map", "rank 1 cannot use its peers (cannot map [b'handle 0', b'handle 1'])"),
        ("right", "rank 1 cannot use its peers (a sum through its memory was wrong or did not end)"),
    ],
)
def test_no_rank_uses_peer_sums_if_one_cannot(
    fault: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups = use_fake_peers(fault, tmp_path, monkeypatch)
    assert [group.peers for group in groups] == [None, None]
    assert f"NCCL adds all values, which takes longer: {reason}" in caplog.messages


def test_peer_sums_slower_than_nccl_at_every_size_are_not_used() -> None:
    peers = pytest.importorskip("sidestream_kv.device.cuda.peers", reason="needs triton")
    assert peers.fastest_bytes([(4, 2.0, 1.0), (8, 1.0, 2.0)]) == 0
    assert peers.fastest_bytes([(4, 1.0, 2.0), (8, 1.0, 2.0)]) == 8


def test_a_wait_for_other_ranks_ends_when_the_check_raises(tmp_path: Path) -> None:
    def check() -> None:
        raise ProcessFailed("rank 1 has ended")

    began_s = time.monotonic()
    with pytest.raises(ProcessFailed, match="rank 1 has ended"):
        open_group(tmp_path, rank=0, size=2, device=HOST, timeout_s=60, check=check)
    assert time.monotonic() - began_s < 20.0


GPU_RANK = """
import sys, pathlib, torch
from sidestream_kv.device.group import open_group
rank, device = int(sys.argv[2]), torch.device(sys.argv[3], int(sys.argv[2]))
torch.cuda.set_device(device)
group = open_group(pathlib.Path(sys.argv[1]), rank=rank, size=2, device=device, timeout_s=60)
values, graph = torch.ones(8, device=device), torch.cuda.CUDAGraph()
group.broadcast(values)
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    doubled = values * 2
    group.all_reduce(doubled)
    gathered = group.all_gather(doubled + rank)
values.fill_(3 + rank)
graph.replay()
assert doubled.tolist() == [14.0] * 8 and gathered.tolist() == [14.0] * 8 + [15.0] * 8
assert group.peers is not None and group.peers.limit > 0
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for turn, rows in enumerate((1, 3, 32, 128, 129, 512, 2048, 2049)):  # few values, many, and those that NCCL adds
        random = torch.Generator(device=device).manual_seed(turn)
        both = torch.randn(2, rows, 4096, generator=random, device=device).to(dtype)
        own = both[rank].clone()
        group.all_reduce(own)
        assert torch.equal(own, (both[0].float() + both[1].float()).to(dtype)), (dtype, rows)
del graph  # NCCL waits for it when the group is closed
group.close()
"""


GPU_RANK_THAT_IS_LEFT = """
import os, signal, sys, time
from pathlib import Path
import torch
from sidestream_kv.device.group import open_group

directory, rank, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
where = torch.device(kind, rank)
torch.cuda.set_device(where)
group = open_group(directory, rank=rank, size=2, device=where, timeout_s=120)
values = torch.zeros(8, device=where)
group.all_reduce(values)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    group.all_reduce(values)
torch.cuda.synchronize()
(directory / f"ready {rank}").touch()
while not (directory / f"ready {1 - rank}").exists():
    time.sleep(0.01)
if rank:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
graph.replay()
done = torch.cuda.Event()
done.record()
time.sleep(0.2)
assert not done.query()  # it waits for rank 1
began_s = time.monotonic()
group.abort()
torch.cuda.synchronize()
assert time.monotonic() - began_s < 2.0
del graph
group.close()
"""


def run_gpu_ranks(program: str, directory: Path) -> list[int]:
    """Run two ranks; returns how they ended. NCCL connects while it holds Python's lock, so ranks cannot be threads."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(directory), str(rank), CUDA], env=environment)
        for rank in range(2)
    ]
    try:
        return [rank.wait(180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_nccl_collectives_can_be_captured(tmp_path: Path) -> None:
    assert run_gpu_ranks(GPU_RANK, tmp_path) == [0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_a_captured_collective_of_a_killed_rank_ends_by_abort(tmp_path: Path) -> None:
    assert run_gpu_ranks(GPU_RANK_THAT_IS_LEFT, tmp_path) == [0, -9]
