"""The order checker: finds races between the streams of a program, on a laptop.

To check a program of your own:

1. Write it as a function of a `SimDevice` that makes memories and streams, submits each copy and each computation with
   the tensors that it touches (`SimStream.submit`), orders streams with `SimStream.wait`, and raises AssertionError if
   its results are wrong.
2. `sidestream_order.explore.explore(program)` runs it in many orders and prints the first finding as a short
   interleaving; `replay` repeats a schedule. `exhaust` (`sidestream_order.exhaust`) runs a small program in all orders.

Report leases through `device.tracer`: `backed`, `took`, `released` and `published` (see `sidestream_kv.Tracer`).
Without these calls, the checker checks only accesses. `examples/two_stream_offloader.py` and the programs in
`examples/races` are complete. `check-trace script.py` judges the CUDA streams of any PyTorch program.
"""

from __future__ import annotations

from sidestream_order.version import VERSION

__version__ = VERSION
