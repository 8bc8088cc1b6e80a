"""The test kit that ships with the package: fakes, fault injection, reference results, a checker that finds races
between streams, and the torture test, which runs the engine in many orders of execution.

To check another KV offloading implementation:

1. Write a program: a function of a `SimDevice` that makes memories and streams, submits each copy and each computation
   with the tensors that it touches (`SimStream.submit`), orders streams with `SimStream.wait`, and raises
   AssertionError if its results are wrong.
2. `sidestream.testing.explore.explore(program)` runs it in many orders and prints the first finding as a short
   interleaving; `replay` repeats a schedule.

Report leases through `device.tracer`: `backed`, `took`, `released` and `published` (see `sidestream_kv.types.Tracer`).
Without these calls, the checker checks only accesses. `examples/two_stream_offloader.py` and the programs in
`examples/races` are complete.
"""
