"""The test kit that ships with the package: fakes, fault injection, reference results, the ordering checker, and the
torture test built on the checker.

To check another KV offloading implementation:

1. `device, checker = sidestream.testing.checker.simulated(policy, seed)`, then memories and streams from that device.
2. Submit each copy and each computation with the byte ranges that it touches (`Stream.submit(work, accesses)`); order
   streams with `Stream.wait`. Work runs only when the policy chooses it.
3. Call `device.close()`, which runs the remaining work. `checker.findings` lists the accesses that no wait ordered.
Then
   compare the bytes in host memory.

Report leases through `checker.backed`, `took`, `released` and `published` (see `sidestream.types.Tracer`). Without
these calls, the checker checks only accesses. `examples/two_stream_offloader.py` is a complete program of this kind.
"""
