"""Shipped test kit: fakes, fault injection, oracles; the ordering checker, and the torture test that is built on it.

For a KV mover that is not ours, three steps:

1. `device, checker = sidestream.testing.checker.simulated(policy, seed)`, and memories and streams from that device.
2. Submit each copy and each computation with the byte ranges that it touches (`Stream.submit(work, accesses)`); order
streams with
   `Stream.wait`. Nothing runs before the policy picks it.
3. `device.close()` runs what is left; `checker.findings` says what no wait ordered, and the host's bytes are there to
compare.

Leases are told by `checker.backed`, `took`, `released` and `published` (see `sidestream.types.Tracer`); a mover that
tells none is judged by its accesses alone. `examples/two_stream_offloader.py` is a whole program of this kind.
"""
