"""The torture test of block transfers on a real device. There is no model: requests write a test pattern into each
block, and all streams are delayed at random.

    torture_device(...)   transfer blocks in several layouts, with the unmodified code
    hunt_device(...)      transfer blocks with a mutation (one rule of the code removed), until wrong bytes are detected

The seed determines the requests, but not the timing. The simulated device tests orders of execution; this test checks
the copies, kernels and events of real hardware.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from proof.mutations import Mutation, applied, changed_functions, copies, find, loads, tier_io
from proof.rig import Rig
from proof.torture.narrow import narrow_lanes
from proof.torture.traffic import Habits, Meddler, Tally, Traffic
from sidestream.errors import ConfigError, InvariantError
from sidestream_kv.config import unknown_name
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.cuda import CudaDevice
from sidestream_kv.device.kinds import CPU, CUDA
from sidestream_kv.kv.layout import KVLayout
from sidestream_order.checker import Checker

DEVICES = (CPU, CUDA)

NOT_ON_HARDWARE: dict[str, str] = {
    "disk-": "this test has no disk: on every device, host threads do its reads and writes",
    "failed-disk-": "there is no disk",
    "refused-disk-": "there is no disk",
    "finished-disk-": "there is no disk",
    "promotion-": "there is no disk",
    "ended-promotion-": "there is no disk",
    "reset-drops-keys-of-the-disk": "there is no disk",
    "transfers-check-the-generation": "it concerns reads and writes of the disk; see "
    "store-from-before-a-reset-publishes-nothing",
    "load-settles-after-its-pieces-ended": "blocks are released after all transfers submitted so far, and this traffic "
    "always submits more after a load",
    "deferred-store-": "the engine submits deferred stores",
    "host-tier-uses-only-pinned-memory": "the host memory is small, so all of it is pinned before the traffic begins",
    "failure-of-the-offload-worker-is-reported": "the worker fails only if the device is lost, and this test cannot go "
    "on without its device",
    "reset-that-failed-says-so": "it concerns the engine's reset on a lost device",
    "reset-waits-for-the-tiers": "the traffic does not wait for a reset: it submits loads at once, which must find "
    "nothing",
}
"""Name prefix → reason, for mutations that this test cannot detect and that only the simulated device tests. The
packages `schedule`, `runner` and `engine`, and the persistent tiers, do not run in this test.
"""

# Rules of pools that make a stream wait. The other rules of pools are bookkeeping on the host, which no device affects.
_OF_POOLS = ("release-keeps-its-fences", "take-passes-the-fences-on")

ON_HARDWARE: tuple[str, ...] = (
    *(
        mutation.name
        for table in (copies, loads, tier_io)
        for mutation in table.MUTATIONS
        if not mutation.name.startswith(tuple(NOT_ON_HARDWARE))
    ),
    *_OF_POOLS,
)
"""Mutations that this test must detect on every kind of device."""


@dataclass(frozen=True, slots=True)
class World:
    """A configuration that exercises certain kinds of copies.

    group_layers   layers per group of a load. Each group ends with a fence of its own
    layered, together   see `Rig`
    narrow         True: a request's copies are cut into many slices, and a load into many pieces
    """

    name: str
    layout: KVLayout
    group_layers: int
    num_blocks: int
    num_slots: int
    habits: Habits
    layered: bool = False
    together: bool = False
    narrow: bool = False


_USUAL = (0.1, 10e-6, 3e-3)
# Large delays, so that work that should wait for delayed work, but does not, runs first.
_LATE = (0.5, 1e-3, 5e-3)

# Transfers that take longer than this count as hanging, which some mutations cause. Even on a busy machine, other
# transfers are faster.
_IMPATIENCE_S = 10.0
_ROUNDS = 3
# Blocks of a round, at most. It limits only configurations with long requests. They would otherwise take most of the
# blocks of a hunt, but some mutations are detected in other configurations only.
_MOST_ROUND_BLOCKS = 4_000
# Several pieces of a load run at a time, so that some still run after one has failed.
_NARROW_IN_FLIGHT = 4

# Needs of mutations that concern copies that fail.
_FAILING = frozenset({"failing_copy", "failing_load"})

HUNT_BLOCKS = 200_000
"""A mutation counts as undetected after this many transferred blocks."""

_SMALL = KVLayout(
    num_layers=4, num_kv_heads=1, head_dim=32, block_tokens=4, dtype="float32", windows=(8, 0, 0, 8)
)  # 4 KiB, 1 KiB per layer; loads may leave out the first and the last layer
_MIDDLE = KVLayout(
    num_layers=4, num_kv_heads=4, head_dim=128, block_tokens=8, dtype="bfloat16"
)  # 64 KiB, 16 KiB per layer
_LARGE = KVLayout(
    num_layers=4, num_kv_heads=8, head_dim=128, block_tokens=8, dtype="bfloat16", windows=(8, 0, 0, 8)
)  # 128 KiB, 32 KiB per layer; loads may leave out the first and the last layer

# Copy methods on a GPU:
#   4 KiB     kernels in both directions; copies of the longest requests are cut into slices
#   64 KiB    stores by the driver's batched copy, loads by kernels
#   striped   two-dimensional copies in both directions
#   apart     the driver's batched copy in both directions, piece by piece
#   narrow    kernels in both directions, two blocks in a piece; the offload worker is always busy
WORLDS = (
    World("4 KiB blocks", _SMALL, 2, 1536, 3072, Habits(longest=700, delay=_USUAL)),
    World("64 KiB blocks", _MIDDLE, 1, 384, 768, Habits(longest=128, delay=_USUAL)),
    World(
        "128 KiB blocks, striped", _LARGE, 2, 384, 768, Habits(longest=128, delay=_USUAL), layered=True, together=True
    ),
    World("128 KiB blocks, layers apart", _LARGE, 2, 384, 768, Habits(longest=128, delay=_USUAL), layered=True),
    World("4 KiB blocks, failing copies", _SMALL, 2, 1536, 3072, Habits(longest=700, delay=_USUAL, faults=0.05)),
    World(
        "128 KiB blocks, striped, failing copies",
        _LARGE,
        2,
        384,
        768,
        Habits(longest=128, delay=_USUAL, faults=0.05),
        True,
        True,
    ),
    World("4 KiB blocks, narrow lanes", _SMALL, 2, 384, 768, Habits(longest=96, delay=_USUAL), narrow=True),
    World(
        "4 KiB blocks, narrow lanes, failing copies",
        _SMALL,
        2,
        384,
        768,
        Habits(longest=96, delay=_USUAL, faults=0.02),
        narrow=True,
    ),
)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The result of a run. `objections` are the findings of the order checker, if it was attached."""

    tally: Tally
    seconds: float
    objections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Missed:
    """The result for one mutation.

    `after` is the number of block transfers until the mutation was detected; None: it was not. `said` is the message of
    the check that detected it.
    """

    name: str
    hazard: str
    after: int | None
    said: str


def torture_device(
    kind: str,
    *,
    blocks: int,
    seed: int = 0,
    check_order: bool = False,
    worlds: Sequence[World] = WORLDS,
    tell: Callable[[int, str], None] = lambda done, text: None,
) -> DeviceReport:
    """Transfer `blocks` blocks and compare each with its pattern. Stops after the first round with an error. Blocks.

    check_order   attach the checker, which makes the test several times slower
    tell          receives the number of compared blocks so far, and in words what is being done

    Raises ConfigError when the device does not exist, and any error that ends the transfer engine.
    """
    if blocks < 1:
        raise ConfigError(f"blocks is {blocks}: give a whole number from 1")
    tally = Tally()
    objections: list[str] = []
    start = time.monotonic()
    for index, world in enumerate(worlds):
        until = blocks * (index + 1) // len(worlds)
        checker = Checker(allowed_waits=frozenset({"torture"})) if check_order else None

        def tell_moved(moved: int, world: World = world) -> None:
            tell(tally.blocks, f"{world.name}, {moved:,} not compared yet")

        tell_moved(0)
        with _traffic(kind, world, seed=seed + index, tally=tally, checker=checker) as traffic:
            while tally.blocks < until and not tally.wrong:
                traffic.round(min(_round_blocks(kind), 2 * (until - tally.blocks)), tell_moved)
        if checker is not None:
            objections += [str(finding) for finding in (*checker.findings, *checker.check_idle())]
        if tally.wrong or objections:
            break
    return DeviceReport(tally, time.monotonic() - start, tuple(objections))


def hunt_device(
    kind: str,
    names: Sequence[str] = (),
    *,
    blocks: int = HUNT_BLOCKS,
    seed: int = 0,
    tell: Callable[[int, str], None] = lambda done, text: None,
) -> list[Missed]:
    """Apply the mutations one by one. With each, transfer at most `blocks` blocks, until the test detects it.

    Raises ConfigError when the device or mutation does not exist, or the test cannot detect the mutation;
    InvariantError when the mutation does not fit the code, or when the unmodified code fails.
    """
    _check_kind(kind)
    mutations = [find(name) for name in names or ON_HARDWARE]
    for mutation in mutations:
        if mutation.name not in ON_HARDWARE:
            raise ConfigError(unknown_name("mutation for a device", mutation.name, ON_HARDWARE))
        changed_functions(mutation)  # a mutation that does not match the code must fail now, not half an hour later
    for index, world in enumerate(WORLDS):
        tell(0, f"the unmodified code, {world.name}")
        if said := _run_late(kind, world, seed=seed + index, tally=Tally(), abrupt=True, rounds=1):
            raise InvariantError(f"the unmodified code fails: {said}: results with mutations would mean nothing")
    found: list[Missed] = []
    for mutation in mutations:
        tell(len(found), mutation.name)
        found.append(_kill(kind, mutation, blocks=blocks, seed=seed))
    return found


def _kill(kind: str, mutation: Mutation, *, blocks: int, seed: int) -> Missed:
    """Run with the mutation in one `World` after the other, until an error is detected."""
    tally = Tally()
    fails = not mutation.needs.isdisjoint(_FAILING)
    worlds = [world for world in WORLDS if bool(world.habits.faults) == fails]
    resets, abrupt = 0.05 if "reset" in mutation.needs else 0.0, "close" in mutation.needs
    while tally.stored + tally.loaded < blocks:
        for world in worlds:
            with applied(mutation):
                said = _run_late(kind, world, seed=seed, tally=tally, resets=resets, abrupt=abrupt)
            if said:
                return Missed(mutation.name, mutation.hazard, tally.stored + tally.loaded, said)
            seed += 1
    return Missed(mutation.name, mutation.hazard, None, "")


def _run_late(
    kind: str,
    world: World,
    *,
    seed: int,
    tally: Tally,
    resets: float = 0.0,
    abrupt: bool = False,
    rounds: int = _ROUNDS,
) -> str:
    """Run a few rounds with large delays. Returns the first error or exception as text; empty: none.

    abrupt   then close everything while requests are running
    """
    usual = world.habits
    habits = replace(usual, delay=_LATE, faults=4 * usual.faults, resets=resets, patience_s=_IMPATIENCE_S)
    try:
        with _traffic(kind, replace(world, habits=habits), seed=seed, tally=tally) as traffic:
            for _ in range(rounds):
                traffic.round(min(12 * habits.longest, _MOST_ROUND_BLOCKS))
                if tally.wrong:
                    return tally.findings[0]
            if abrupt:
                traffic.break_off()
        if abrupt:
            traffic.judge_ledgers()
            if tally.wrong:
                return tally.findings[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _traffic(kind: str, world: World, *, seed: int, tally: Tally, checker: Checker | None = None) -> Iterator[Traffic]:
    """A device, a rig and traffic for one world."""
    device = open_device(kind, checker)
    layout = (
        world.layout if kind == CUDA else replace(world.layout, block_tokens=1)
    )  # smaller blocks on a CPU, which copies more slowly
    device.segment_bytes = world.group_layers * layout.layer_bytes
    meddler = Meddler(device, world.habits, seed=seed)
    rig, traffic = None, None
    level = logging.getLogger("sidestream").level
    logging.getLogger("sidestream").setLevel(logging.CRITICAL + 1)  # injected failures are expected: do not log them
    try:
        with narrow_lanes(in_flight=_NARROW_IN_FLIGHT) if world.narrow else contextlib.nullcontext():
            rig = Rig(
                device,
                layout,
                num_blocks=world.num_blocks,
                num_slots=world.num_slots,
                layered=world.layered,
                together=world.together,
                seed=seed,
            )
            traffic = Traffic(rig, world.habits, seed=seed, name=world.name, tally=tally)
            yield traffic
    finally:
        if rig is not None:
            rig.transfers.flush(
                timeout_s=0.0 if traffic is not None and traffic.broken_off else world.habits.patience_s
            )
        device.close()
        if rig is not None:
            rig.transfers.close()
        tally.failed_slices += meddler.failed
        if kind == CUDA:
            gc.collect()
            torch.cuda.empty_cache()  # closures of closed streams' work may still hold tensors
        logging.getLogger("sidestream").setLevel(level)


def open_device(kind: str, checker: Checker | None = None) -> CpuDevice | CudaDevice:
    """Open a real device. Raises ConfigError when it does not exist."""
    _check_kind(kind)
    if kind == CPU:
        return CpuDevice(compute_threads=1, tracer=checker)
    device = CudaDevice(tracer=checker)
    device.warm_up()
    return device


def _check_kind(kind: str) -> None:
    if kind not in DEVICES:
        raise ConfigError(unknown_name("device", kind, DEVICES))


def _round_blocks(kind: str) -> int:
    return 20_000 if kind == CUDA else 2_000
