"""A KV offloader in plain PyTorch: blocks are computed on the default stream, and copied to the host and back on a side
stream.

    python examples/check_trace/two_stream_offloader.py              # with all waits; needs a GPU
    sidestream check-trace examples/check_trace/two_stream_offloader.py --drop store
    sidestream check-trace examples/check_trace/two_stream_offloader.py --drop load
    sidestream check-trace examples/check_trace/two_stream_offloader.py --drop reuse

`--drop store`: the copy to the host does not wait for the block's computation. `--drop load`: the computation does not
wait for the copy back. `--drop reuse`: a copied block is deleted, and its memory is used again during the copy.
"""

import argparse

import torch

BLOCK, STEPS = 1 << 16, 4


def offload(drop: str) -> None:
    copies = torch.cuda.Stream()
    host = torch.empty(STEPS, BLOCK, pin_memory=True)
    for step in range(STEPS):
        block = torch.full((BLOCK,), float(step), device="cuda")
        if drop != "store":
            copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            host[step].copy_(block, non_blocking=True)
        if drop != "reuse":
            block.record_stream(copies)
        del block
    total = torch.zeros(BLOCK, device="cuda")
    for step in range(STEPS):
        with torch.cuda.stream(copies):
            block = host[step].to("cuda", non_blocking=True)
        if drop != "load":
            torch.cuda.current_stream().wait_stream(copies)
        total += block
        block.record_stream(torch.cuda.current_stream())
    assert total.sum().item() == BLOCK * sum(range(STEPS)), "a block came back with wrong bytes"
    print("all blocks came back")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--drop", choices=("store", "load", "reuse"), default="")
    offload(parser.parse_args().drop)
