"""The calls that reach the GPU: the CUDA driver's through ctypes, torch's where torch has them. Knows no order and
keeps no state of streams.

ctypes drops the interpreter lock during a call: a long one holds up no other thread. It is kept while an event is
recorded or asked for and while a graph is launched, which take less time than handing the lock over: who drops it gets
it back when others let go of it, and a thread that reads answers has it for 100 us at a time. From any thread.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sidestream.errors import ConfigError, DeviceError, DeviceLost, InvariantError, OutOfDeviceMemory, SidestreamError

_OUT_OF_MEMORY = 2
# 214 ECC, 220 NVLink, 700 address, 702 timeout, 709 context, 710 assert, 714 to 719 faults of a kernel, 999 unknown. No
# call works any more.
_LOST = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
# The same where only the driver's text is left, as in what Triton raises.
_LOST_TEXT = re.compile(
    r"illegal memory access|device-side assert|illegal instruction|misaligned address|unspecified launch failure|launch timed out"
    r"|uncorrectable (ECC|NVLink) error|hardware stack error|invalid program counter|operation not supported on global/shared address space"
)
_OUT_OF_MEMORY_TEXT = re.compile(r"CUDA.*out of memory")

_STREAM_NON_BLOCKING = 1
_PORTABLE_AND_MAPPED = 1 | 2
_MAX_PITCH = 11
_ON_DEVICE, _ON_HOST = 1, 2  # of a location in a batch
_HOST_SIDE, _DEVICE_SIDE = 1, 2  # of a two-dimensional copy
_IN_STREAM_ORDER = 1
_TIMER_SLACK = 29
_SLACK_NS = 1000

Table = npt.NDArray[np.int64]
"""Segments, int64 `[3, n]`, contiguous: target addresses, source addresses, bytes."""


class Event(Protocol):
    """A mark in a stream, as torch has it."""

    def record(self, stream: Any) -> None:
        """Mark what the stream was given so far."""
        ...

    def wait(self, stream: Any) -> None:
        """Order what the stream is given from now on behind the mark."""
        ...

    def query(self) -> bool:
        """Whether the mark has been passed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until it has been, without the interpreter lock."""
        ...


def timed_event() -> torch.cuda.Event:
    """A new event that keeps when it was passed, for measurements. To record it takes the host some two microseconds, a
    fraction of what a kernel takes it that writes the clock.
    """
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


class _Side(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _Copy2D(ctypes.Structure):
    _fields_ = (("source", _Side), ("target", _Side), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


def load_library() -> Any:
    """The driver's library. Raises ConfigError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(
            f"the CUDA driver cannot be loaded ({error}): install NVIDIA's driver, or use the cpu device"
        ) from error


def named(error: BaseException) -> BaseException:
    """The same error by our name for it, if torch, Triton or the driver raised it; else the error itself."""
    if isinstance(error, SidestreamError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return _caused(
            OutOfDeviceMemory(f"out of device memory: {_first_line(error)}; lower the KV memory or the batch"), error
        )
    if not isinstance(error, RuntimeError):
        return error
    code, text = (
        getattr(error, "error_code", None),
        _first_line(error),
    )  # torch adds a hint about device-side assertions to every error
    if code in _LOST or _LOST_TEXT.search(text):
        return _caused(DeviceLost(f"the GPU is lost: {_first_line(error)}; restart the process"), error)
    if code == _OUT_OF_MEMORY or _OUT_OF_MEMORY_TEXT.search(text):
        return _caused(
            OutOfDeviceMemory(f"out of device memory: {_first_line(error)}; lower the KV memory or the batch"), error
        )
    if code is not None:
        return _caused(DeviceError(f"a call of the GPU failed: {_first_line(error)}"), error)
    return error


@contextmanager
def naming() -> Iterator[None]:
    """What torch raises in here gets our names."""
    try:
        yield
    except RuntimeError as error:
        ours = named(error)
        if ours is error:
            raise
        raise ours from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _caused(named_error: BaseException, by: BaseException) -> BaseException:
    named_error.__cause__ = by
    return named_error


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A table of segments with what a call needs of it: address of its first row, bytes of a row, address of the
    attributes.

    pieces   columns of the table for each segment of the batch
    """

    table: Table
    address: int
    row_bytes: int
    attributes: int
    pieces: int


# Handles of streams that are not in use, by GPU and priority. They are never destroyed: torch remembers on which
# streams a pinned tensor was used, and when it is freed, whenever that is, records an event on each of them; on a
# stream that is gone that ends the process.
_spare_streams: dict[tuple[int, bool], list[int]] = {}


class _Mapped:
    """Memory of the host by the protocol in which libraries hand device memory to each other; torch keeps it as long as
    its tensor.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self.__cuda_array_interface__ = {
            "shape": tuple(data.shape),
            "typestr": "|u1",
            "data": (data.data_ptr(), False),
            "version": 3,
        }


class Driver:
    """One GPU's driver. What fails raises OutOfDeviceMemory, DeviceLost or DeviceError with the driver's name and text
    for it.

    library        libcuda, or what stands in for it
    has_batch      whether many segments can be copied by one call
    max_pitch      bytes between two rows of a two-dimensional copy at most
    """

    def __init__(self, library: Any, *, index: int = 0) -> None:
        """`index` of the GPU. The calling thread can use it from here on; others call `bind`, or a first call does it
        for them.
        """
        self.torch_device = torch.device("cuda", index)
        self._library = library
        self._call("cuInit", 0)
        count, device, context, pitch = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if index >= count.value:
            raise ConfigError(
                f"there is no GPU {index}: the driver sees {count.value}; look at CUDA_VISIBLE_DEVICES, or use the cpu device"
            )
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context
        self.bind()
        self._call("cuDeviceGetAttribute", ctypes.byref(pitch), _MAX_PITCH, device)
        self.max_pitch = pitch.value
        self._launch_graph = self._function("cuGraphLaunch", ctypes.c_void_p, ctypes.c_void_p, keeps_lock=True)
        self._copy_one = self._function(
            "cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        )
        self._copy_2d = self._function("cuMemcpy2DAsync_v2", ctypes.c_void_p, ctypes.c_void_p)
        # The second version has no place for the index of the copy that failed.
        self._second_batch = hasattr(library, "cuMemcpyBatchAsync_v2")
        self.has_batch = self._second_batch or hasattr(library, "cuMemcpyBatchAsync")
        if self.has_batch:
            void, size = ctypes.c_void_p, ctypes.c_size_t
            between = () if self._second_batch else (void,)
            name = "cuMemcpyBatchAsync_v2" if self._second_batch else "cuMemcpyBatchAsync"
            self._copy_batch = self._function(name, void, void, void, size, void, void, size, *between, void)
        # Made once: a call only names them.
        self._first = (ctypes.c_size_t * 1)(0)
        self._failed = (ctypes.c_size_t * 1)(0)
        places = {True: _Location(_ON_DEVICE, index), False: _Location(_ON_HOST, 0)}
        self._attributes = {
            (source, target): _Attributes(_IN_STREAM_ORDER, places[source], places[target], 0)
            for source in places
            for target in places
        }

    # ------------------------------------------------------------------ threads, streams, events

    def _bound_only_now(self) -> bool:
        """Whether the calling thread did not use the GPU before, but does now. Calls fail then, some of them with an
        error that says otherwise.
        """
        current = ctypes.c_void_p()
        if (
            self._context.value is None
            or self._library.cuCtxGetCurrent(ctypes.byref(current))
            or current.value == self._context.value
        ):
            return False
        return not self._library.cuCtxSetCurrent(self._context)

    def bind(self) -> None:
        """Make the GPU the calling thread's own."""
        self._call("cuCtxSetCurrent", self._context)

    def prepare_thread(self) -> None:
        """Have the calling thread use this GPU, and sleep as short as it asks for: the system adds 50 us else."""
        torch.cuda.set_device(self.torch_device)
        self.bind()
        with suppress(OSError, AttributeError):  # another system: short sleeps are less short
            ctypes.CDLL(None).prctl(
                _TIMER_SLACK, ctypes.c_ulong(_SLACK_NS), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
            )

    def make_stream(self, *, high: bool) -> int:
        """A handle of a stream that the default stream does not synchronise with. `high`: its kernels go before those
        of others.
        """
        spare = _spare_streams.setdefault((self.torch_device.index, high), [])
        with suppress(IndexError):
            return spare.pop()
        handle = ctypes.c_void_p()
        lowest, highest = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
        priority = highest.value if high else lowest.value
        self._call("cuStreamCreateWithPriority", ctypes.byref(handle), _STREAM_NON_BLOCKING, ctypes.c_int(priority))
        if not handle.value:
            raise DeviceError("cuStreamCreateWithPriority gave no stream")
        return handle.value

    def keep_stream(self, handle: int, *, high: bool) -> None:
        """Take back a handle, for whoever makes the next stream of that priority."""
        _spare_streams.setdefault((self.torch_device.index, high), []).append(handle)

    def external(self, handle: int) -> Any:
        """The stream as torch knows it."""
        return torch.cuda.ExternalStream(handle, device=self.torch_device)  # type: ignore[no-untyped-call]

    def current(self, external: Any) -> AbstractContextManager[Any]:
        """Makes the stream the calling thread's current one, for kernels. May be entered again and again, by one thread
        at a time.
        """
        return torch.cuda.stream(external)

    def event(self, *, external: bool = False) -> Event:
        """A new event without timing. `external`: inside a graph, a wait for it is a node that waits at each replay."""
        return torch.cuda.Event(external=external)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ memory

    def free_memory(self) -> tuple[int, int]:
        """Bytes of device memory that are free, and all there are."""
        with naming():
            free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(free), int(total)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Device memory, uint8 `[num_bytes]`, not set to anything."""
        with naming():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def mapped(self, data: torch.Tensor) -> torch.Tensor:
        """Registered memory of the host, uint8 `[num_bytes]`, as a tensor on the GPU; it keeps `data`."""
        with naming():
            mapped = torch.as_tensor(_Mapped(data), device=self.torch_device)
        if mapped.data_ptr() != data.data_ptr():
            raise InvariantError("torch copied memory that the GPU is to read where it is")
        return mapped

    def register(self, address: int, num_bytes: int) -> None:
        """Pin pages of the host, for copies and for kernels, which see them at the same address. Takes 0.035 s per GiB
        (P7).
        """
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PORTABLE_AND_MAPPED)

    def unregister(self, address: int) -> None:
        """Let go of what `register` pinned at `address`."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    # ------------------------------------------------------------------ copies

    def copy_batch(self, table: Table, stream: int, *, from_device: bool, to_device: bool) -> None:
        """Enqueue all segments by one call, in no particular order."""
        self.copy_rows(self.rows(table, from_device=from_device, to_device=to_device), 0, table.shape[1], stream)

    def copy_each(self, table: Table, stream: int) -> None:
        """Enqueue the segments by one call each: for drivers before 12.8."""
        targets, sources, sizes = table.tolist()
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self._checked("cuMemcpyAsync", self._copy_one, target, source, size, stream)

    def copy_grid(
        self,
        targets: list[int],
        sources: list[int],
        stream: int,
        *,
        from_device: bool,
        to_device: bool,
        target_pitch: int,
        source_pitch: int,
        width: int,
        height: int,
    ) -> None:
        """Enqueue one two-dimensional copy for each pair of addresses: `height` rows of `width` bytes, `pitch` bytes
        from one row to the next.
        """
        copy = _Copy2D(_side(from_device, source_pitch), _side(to_device, target_pitch), width, height)
        there, here, address = copy.target, copy.source, ctypes.addressof(copy)
        for target, source in zip(targets, sources, strict=True):
            there.host = there.device = target
            here.host = here.device = source
            self._checked("cuMemcpy2DAsync", self._copy_2d, address, stream)

    def rows(self, table: Table, *, from_device: bool, to_device: bool, pieces: int = 1) -> Rows:
        """The table in the form that `copy_rows` takes parts of."""
        return Rows(
            table,
            table.ctypes.data,
            8 * table.shape[1],
            ctypes.addressof(self._attributes[from_device, to_device]),
            pieces,
        )

    def copy_rows(self, rows: Rows, first: int, count: int, stream: int) -> None:
        """Enqueue some segments of a batch by one call, in no particular order; by one call for each piece for drivers
        before 12.8.
        """
        first, count = first * rows.pieces, count * rows.pieces
        if not self.has_batch:
            self.copy_each(rows.table[:, first : first + count], stream)
            return
        base, row, which = rows.address + 8 * first, rows.row_bytes, ctypes.addressof(self._first)
        if self._second_batch:
            rc = self._copy_batch(base, base + row, base + 2 * row, count, rows.attributes, which, 1, stream)
        else:
            rc = self._copy_batch(
                base,
                base + row,
                base + 2 * row,
                count,
                rows.attributes,
                which,
                1,
                ctypes.addressof(self._failed),
                stream,
            )
        if rc and self._bound_only_now():
            self.copy_rows(rows, first // rows.pieces, count // rows.pieces, stream)
        elif rc:
            self._fail("cuMemcpyBatchAsync", rc)

    # ------------------------------------------------------------------ graphs

    def launch_graph(self, executable: int, stream: int) -> None:
        """Enqueue an instantiated graph. Keeps the interpreter lock."""
        self._checked("cuGraphLaunch", self._launch_graph, executable, stream)

    # ------------------------------------------------------------------ calls

    def _function(self, name: str, *argtypes: Any, keeps_lock: bool = False) -> Callable[..., int]:
        library = self._library
        if keeps_lock and isinstance(library, ctypes.CDLL):
            library = ctypes.PyDLL(library._name, handle=library._handle)
        function: Any = getattr(library, name)
        function.argtypes, function.restype = argtypes, ctypes.c_int
        return function  # type: ignore[no-any-return]

    def _call(self, name: str, *args: Any) -> None:
        self._checked(name, getattr(self._library, name), *args)

    def _checked(self, name: str, function: Callable[..., int], *args: Any) -> None:
        rc = function(*args)
        if rc and self._bound_only_now():
            rc = function(*args)
        if rc:
            self._fail(name, rc)

    def _fail(self, call: str, rc: int) -> None:
        what = f"{call.removesuffix('_v2')} failed: {self._say('cuGetErrorName', rc)} ({rc}), {self._say('cuGetErrorString', rc)}"
        if rc == _OUT_OF_MEMORY:
            raise OutOfDeviceMemory(f"{what}; lower the memory asked for")
        if rc in _LOST:
            raise DeviceLost(f"the GPU is lost: {what}; restart the process")
        raise DeviceError(what)

    def _say(self, function: str, rc: int) -> str:
        text = ctypes.c_char_p()
        getattr(self._library, function)(rc, ctypes.byref(text))
        return (text.value or b"unknown").decode()


def _side(on_device: bool, pitch: int) -> _Side:
    return _Side(0, 0, _DEVICE_SIDE if on_device else _HOST_SIDE, None, 0, None, pitch)
