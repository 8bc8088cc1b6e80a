"""Calls to the GPU: torch's functions where they exist, otherwise functions of the CUDA driver through ctypes. Knows no
state of streams. Any thread may call it.

ctypes releases the GIL during a call, so a long call blocks no other thread. Recording and polling an event and
launching a graph keep the GIL: they take less time than getting the GIL back from another thread, which may hold it for
100 us.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sidestream_kv.errors import (
    ConfigError,
    DeviceError,
    DeviceLost,
    InvariantError,
    OutOfDeviceMemory,
    SidestreamError,
)

_OUT_OF_MEMORY = 2
# Error codes after which no call works: 214 ECC, 220 NVLink, 700 address, 702 timeout, 709 context, 710 assert, 714 to
# 719 faults of a kernel, 999 unknown.
_LOST = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
# Texts of the same errors, because Triton's exceptions have no error code.
_LOST_TEXT = re.compile(
    r"illegal memory access|device-side assert|illegal instruction|misaligned address|unspecified launch failure"
    r"|launch timed out|uncorrectable (ECC|NVLink) error|hardware stack error|invalid program counter"
    r"|operation not supported on global/shared address space"
)
_OUT_OF_MEMORY_TEXT = re.compile(r"CUDA.*out of memory")

_STREAM_NON_BLOCKING = 1
_PORTABLE_AND_MAPPED = 1 | 2
_MAX_PITCH = 11
_ON_DEVICE, _ON_HOST = 1, 2  # kinds of locations in a batch copy
_HOST_SIDE, _DEVICE_SIDE = 1, 2  # kinds of memory in a two-dimensional copy
_IN_STREAM_ORDER = 1
_TIMER_SLACK = 29
_SLACK_NS = 1000

Table = npt.NDArray[np.int64]
"""Segments to copy, int64 `[3, n]`, contiguous. The rows are target addresses, source addresses and bytes."""


class Event(Protocol):
    """The methods of torch's event that this package uses."""

    def record(self, stream: Any) -> None:
        """Record all work submitted to the stream so far."""
        ...

    def wait(self, stream: Any) -> None:
        """Make later work of the stream wait for the recorded work."""
        ...

    def query(self) -> bool:
        """Whether the recorded work is done."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the recorded work is done. Releases the GIL."""
        ...


def timed_event() -> torch.cuda.Event:
    """A new event with a timestamp, for measurements. Recording it takes about 2 us of host time, less than
    `Stream.stamp`.
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
    """The driver's library. Raises ConfigError if it is not installed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(
            f"the CUDA driver cannot be loaded ({error}): install NVIDIA's driver, or use the cpu device"
        ) from error


def named(error: BaseException) -> BaseException:
    """The DeviceError that corresponds to an exception of torch, Triton or the driver. Other exceptions are returned
    unchanged.
    """
    if isinstance(error, SidestreamError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return _caused(
            OutOfDeviceMemory(f"out of device memory: {_first_line(error)}; lower the KV memory or the batch"), error
        )
    if not isinstance(error, RuntimeError):
        return error
    # Search only the first line, because torch appends a hint about device-side assertions to every error.
    code, text = getattr(error, "error_code", None), _first_line(error)
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
    """A context that replaces exceptions by those of `named`."""
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
class PreparedTable:
    """A table of segments with arguments of `cuMemcpyBatchAsync` that are computed once.

    address      address of the table's first row
    row_bytes    bytes of a row
    attributes   address of the copy attributes
    pieces       number of columns of the table for each segment of the batch
    """

    table: Table
    address: int
    row_bytes: int
    attributes: int
    pieces: int


# Unused stream handles, by GPU and priority. Streams are never destroyed: when a pinned tensor is freed, torch records
# an event on each stream that has used the tensor, and recording on a destroyed stream ends the process.
_spare_streams: dict[tuple[int, bool], list[int]] = {}


class _Mapped:
    """Host memory with the CUDA array interface. A torch tensor that is made from this object keeps it alive."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self.__cuda_array_interface__ = {
            "shape": tuple(data.shape),
            "typestr": "|u1",
            "data": (data.data_ptr(), False),
            "version": 3,
        }


class Driver:
    """The driver of one GPU. Failed calls raise OutOfDeviceMemory, DeviceLost or DeviceError with the driver's text.

    library        libcuda, or a fake library in tests
    has_batch      whether one call can copy many segments (CUDA 12.8)
    max_pitch      largest pitch of a two-dimensional copy in bytes
    """

    def __init__(self, library: Any, *, index: int = 0) -> None:
        """Binds the calling thread to GPU `index`. Other threads are bound by `bind`, or by their first call."""
        self.torch_device = torch.device("cuda", index)
        self._library = library
        self._call("cuInit", 0)
        count, device, context, pitch = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if index >= count.value:
            raise ConfigError(
                f"there is no GPU {index}: the driver sees {count.value}; "
                "look at CUDA_VISIBLE_DEVICES, or use the cpu device"
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
        # Version 2 of the function has no argument that receives the index of the failed copy.
        self._second_batch = hasattr(library, "cuMemcpyBatchAsync_v2")
        self.has_batch = self._second_batch or hasattr(library, "cuMemcpyBatchAsync")
        if self.has_batch:
            void, size = ctypes.c_void_p, ctypes.c_size_t
            between = () if self._second_batch else (void,)
            name = "cuMemcpyBatchAsync_v2" if self._second_batch else "cuMemcpyBatchAsync"
            self._copy_batch = self._function(name, void, void, void, size, void, void, size, *between, void)
        # Arguments that never change: calls pass the addresses of these objects.
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
        """Bind the calling thread to the GPU, and return True; return False if it was bound already. Calls of an
        unbound thread fail, with various errors.
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
        """Make the GPU's context current in the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def prepare_thread(self) -> None:
        """Bind the calling thread to the GPU, and make its short sleeps exact: Linux adds 50 us by default."""
        torch.cuda.set_device(self.torch_device)
        self.bind()
        with suppress(OSError, AttributeError):  # on other systems, short sleeps take longer
            ctypes.CDLL(None).prctl(
                _TIMER_SLACK, ctypes.c_ulong(_SLACK_NS), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
            )

    def make_stream(self, *, high: bool) -> int:
        """Handle of a stream that does not synchronise with the default stream. `high`: its kernels have high
        priority.
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
        """Keep an unused stream handle for the next stream with this priority."""
        _spare_streams.setdefault((self.torch_device.index, high), []).append(handle)

    def external(self, handle: int) -> Any:
        """torch's object for the stream."""
        return torch.cuda.ExternalStream(handle, device=self.torch_device)  # type: ignore[no-untyped-call]

    def current(self, external: Any) -> AbstractContextManager[Any]:
        """A context in which torch launches kernels on the stream. Reusable, but only by one thread at a time."""
        return torch.cuda.stream(external)

    def event(self, *, external: bool = False) -> Event:
        """A new event without timing. `external`: a wait for it during a capture becomes a node of the graph."""
        return torch.cuda.Event(external=external)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ memory

    def free_memory(self, wanted: int) -> tuple[int, int]:
        """Free and total bytes of device memory. If fewer than `wanted` bytes are free, first frees the memory of
        objects that only reference cycles keep, such as engines that were closed, and the memory that torch caches.
        """
        with naming():
            free, total = torch.cuda.mem_get_info(self.torch_device)
            if free < wanted:
                gc.collect()
                torch.cuda.empty_cache()
                free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(free), int(total)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised device memory, uint8 `[num_bytes]`."""
        with naming():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def mapped(self, data: torch.Tensor) -> torch.Tensor:
        """Registered host memory `data`, uint8 `[num_bytes]`, as a tensor on the GPU. The tensor keeps `data` alive."""
        with naming():
            mapped = torch.as_tensor(_Mapped(data), device=self.torch_device)
        if mapped.data_ptr() != data.data_ptr():
            raise InvariantError("torch copied host memory that the GPU must read in place")
        return mapped

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host pages, so that copies and kernels can use the host's addresses. Takes 0.035 s per GiB."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PORTABLE_AND_MAPPED)

    def unregister(self, address: int) -> None:
        """Unpin the pages that `register` pinned at `address`."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    # ------------------------------------------------------------------ copies

    def copy_batch(self, table: Table, stream: int, *, from_device: bool, to_device: bool) -> None:
        """Enqueue all segments with one call, in any order."""
        self.copy_prepared(self.prepare(table, from_device=from_device, to_device=to_device), 0, table.shape[1], stream)

    def copy_each(self, table: Table, stream: int) -> None:
        """Enqueue each segment with its own call, for drivers before 12.8."""
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
        """Enqueue a two-dimensional copy for each pair of addresses: `height` rows of `width` bytes. The pitches are
        the distances between rows.
        """
        copy = _Copy2D(_side(from_device, source_pitch), _side(to_device, target_pitch), width, height)
        there, here, address = copy.target, copy.source, ctypes.addressof(copy)
        for target, source in zip(targets, sources, strict=True):
            there.host = there.device = target
            here.host = here.device = source
            self._checked("cuMemcpy2DAsync", self._copy_2d, address, stream)

    def prepare(self, table: Table, *, from_device: bool, to_device: bool, pieces: int = 1) -> PreparedTable:
        """The table together with its call arguments, for `copy_prepared`."""
        return PreparedTable(
            table,
            table.ctypes.data,
            8 * table.shape[1],
            ctypes.addressof(self._attributes[from_device, to_device]),
            pieces,
        )

    def copy_prepared(self, prepared: PreparedTable, first: int, count: int, stream: int) -> None:
        """Enqueue `count` segments, in any order: one call, or one for each column of the table before CUDA 12.8."""
        first, count = first * prepared.pieces, count * prepared.pieces
        if not self.has_batch:
            self.copy_each(prepared.table[:, first : first + count], stream)
            return
        base, row, which = prepared.address + 8 * first, prepared.row_bytes, ctypes.addressof(self._first)
        if self._second_batch:
            rc = self._copy_batch(base, base + row, base + 2 * row, count, prepared.attributes, which, 1, stream)
        else:
            rc = self._copy_batch(
                base,
                base + row,
                base + 2 * row,
                count,
                prepared.attributes,
                which,
                1,
                ctypes.addressof(self._failed),
                stream,
            )
        if rc and self._bound_only_now():
            self.copy_prepared(prepared, first // prepared.pieces, count // prepared.pieces, stream)
        elif rc:
            self._fail("cuMemcpyBatchAsync", rc)

    # ------------------------------------------------------------------ graphs

    def launch_graph(self, executable: int, stream: int) -> None:
        """Enqueue an instantiated graph, without releasing the GIL."""
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
        name, text = self._error_text("cuGetErrorName", rc), self._error_text("cuGetErrorString", rc)
        message = f"{call.removesuffix('_v2')} failed: {name} ({rc}), {text}"
        if rc == _OUT_OF_MEMORY:
            raise OutOfDeviceMemory(f"{message}; ask for less memory")
        if rc in _LOST:
            raise DeviceLost(f"the GPU is lost: {message}; restart the process")
        raise DeviceError(message)

    def _error_text(self, function: str, rc: int) -> str:
        text = ctypes.c_char_p()
        getattr(self._library, function)(rc, ctypes.byref(text))
        return (text.value or b"unknown").decode()


def _side(on_device: bool, pitch: int) -> _Side:
    return _Side(0, 0, _DEVICE_SIDE if on_device else _HOST_SIDE, None, 0, None, pitch)
