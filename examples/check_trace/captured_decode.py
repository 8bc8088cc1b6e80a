"""A captured decode step in plain PyTorch: a side stream loads the KV that the CUDA graph reads.

    python examples/check_trace/captured_decode.py              # with the wait and the input kept; needs a GPU
    sidestream check-trace examples/check_trace/captured_decode.py --drop wait
    sidestream check-trace examples/check_trace/captured_decode.py --drop input

`--drop wait`: a replay does not wait for the load. `--drop input`: a tensor that the graph reads is deleted after the
capture, so each replay reads memory that may belong to another tensor.
"""

import argparse

import torch

SIZE, STEPS = 4096, 3


def decode(drop: str) -> None:
    loads = torch.cuda.Stream()
    host = torch.arange(STEPS, dtype=torch.float32).repeat_interleave(SIZE).view(STEPS, SIZE).pin_memory()
    kv = torch.zeros(SIZE, device="cuda")
    scale = torch.full((SIZE,), 2.0, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kv * scale
    if drop == "input":
        del scale
    for step in range(STEPS):
        loads.wait_stream(torch.cuda.current_stream())  # the last replay has read kv
        with torch.cuda.stream(loads):
            kv.copy_(host[step], non_blocking=True)
        if drop != "wait":
            torch.cuda.current_stream().wait_stream(loads)
        graph.replay()
        print(f"step {step}: {out[0].item():g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--drop", choices=("wait", "input"), default="")
    decode(parser.parse_args().drop)
