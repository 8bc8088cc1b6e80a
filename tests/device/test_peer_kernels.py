"""Sums over the GPUs of all ranks, in Triton's interpreter: each rank is a process; the inboxes are shared memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys, torch
from sidestream_kv.device.cuda import peer_kernels
from sidestream_kv.device.cuda.peer_kernels import add_few, add_many, counters, few_bytes, many_bytes

size, kind = int(sys.argv[1]), sys.argv[2]
words = 4096
add, num_bytes = (add_few, few_bytes) if kind == "few" else (add_many, many_bytes)
peer_kernels._PROGRAMS, peer_kernels._TILE = 2, 1024
boxes = [torch.zeros(num_bytes(size, words), dtype=torch.uint8).share_memory_() for _ in range(size)]
addresses = torch.tensor([box.data_ptr() for box in boxes])
calls, abort = [torch.zeros(counters(words), dtype=torch.int32) for _ in range(size)], torch.zeros(1, dtype=torch.int32)

def given(dtype, count, turn):
    generator = torch.Generator().manual_seed(100 * turn + count)
    return [torch.randn(count, generator=generator).to(dtype) for _ in range(size)]

def follow(rank):
    turn = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for count in (8, 600, 4096, 4096, 1024):
            values = given(dtype, count, turn)
            mine = values[rank].clone()
            add(mine, addresses, calls[rank], abort, rank=rank, words=words)
            total = sum(each.float() for each in values).to(dtype)
            near = 2**-7 if dtype == torch.bfloat16 else 0  # the interpreter truncates to bfloat16
            assert torch.allclose(mine, total, rtol=near, atol=0), (dtype, count, turn, (mine - total).abs().max())
            turn += 1

children = []
for rank in range(size):
    if not (child := os.fork()):
        try:
            follow(rank)
        except BaseException as error:
            print(rank, repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * size
abort.fill_(1)
peer_kernels._POLLS = 50
add(torch.ones(600), addresses, calls[0], abort, rank=0, words=words)  # ends, though no other rank takes part
abort.fill_(0)
add(torch.ones(600), addresses, calls[0], abort, rank=0, words=words)  # so do later ones, which look at device memory
print("right")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(("size", "kind"), [(2, "few"), (3, "few"), (2, "many"), (3, "many")])
def test_all_ranks_get_the_same_peer_sums_in_every_call(size: int, kind: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(size), kind],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == "right\n", done.stderr[-3000:]
