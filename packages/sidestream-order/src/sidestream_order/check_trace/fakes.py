"""A fake of `torch.cuda` for machines without a GPU: PyTorch programs for one GPU run on the CPU.

Tensors "on the GPU" are `DeviceTensor`: their `device` is `cuda:0`, and a CPU tensor keeps their bytes. Torch's C++
code sees them on the device `meta`, which needs no driver. Programs that use `meta` tensors themselves cannot run here.
Work runs when it is enqueued, so the program's results are those of a correct order, even if it has a race. Queries of
events and streams always say that they are done. The program may use several threads.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from sidestream_kv.device.kinds import CPU, CUDA, on_gpu
from sidestream_order.check_trace.judge import Event, Graph, Judge
from sidestream_order.check_trace.operators import tensors_in
from sidestream_order.check_trace.recorder import Recorder

_META = torch.device("meta")
_HOST = torch.device(CPU)
_GPU = torch.device(CUDA, 0)
_ISOLATION = "CUDA error: dependency created on uncaptured work in another stream"
_MEMORY = 80 << 30  # the size that the fake `torch.cuda` reports


class _Lifetime:
    """Stands for a storage "on the GPU". It is deleted together with the last tensor of the storage."""


class DeviceTensor(torch.Tensor):
    """A tensor "on the GPU".

    bytes      the CPU tensor with its contents
    lifetime   shared by all tensors of one storage. It is deleted with the last of them, even if a captured graph keeps
               the bytes
    """

    bytes: torch.Tensor
    lifetime: _Lifetime

    @staticmethod
    def __new__(cls, contents: torch.Tensor) -> DeviceTensor:
        """Wrap a CPU tensor."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            contents.shape,
            strides=contents.stride(),
            storage_offset=contents.storage_offset(),
            dtype=contents.dtype,
            device=_META,
        )
        made.bytes = contents
        made.lifetime = _lifetime_of(contents.untyped_storage())
        return made

    device = property(lambda self: _GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Execute an operator outside of a recording."""
        return _execute(func, args, kwargs or {})[0]

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the bytes."""
        return self.bytes.untyped_storage()

    def data_ptr(self) -> int:
        """The address of the bytes."""
        return self.bytes.data_ptr()

    def get_device(self) -> int:
        """Always GPU 0."""
        return 0


@dataclass(frozen=True, slots=True)
class _Step:
    """One captured call, on CPU tensors, and the new tensors that it returned."""

    func: Any
    args: Any
    kwargs: Any
    made: tuple[torch.Tensor, ...]

    def repeat(self) -> None:
        """Repeat the call, and copy the results into the tensors of the first call."""
        inputs = {id(tensor) for tensor in tensors_in((self.args, self.kwargs))}
        again = [tensor for tensor in tensors_in(self.func(*self.args, **self.kwargs)) if id(tensor) not in inputs]
        for target, tensor in zip(self.made, again, strict=True):
            if target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor)


class FakeCuda:
    """The `Runtime` of the fake GPU. Its streams, events and graphs report to `judge`."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self._pinned: dict[int, weakref.ref[Any]] = {}
        self._here = threading.local()
        self._numbers = itertools.count()
        self._steps: list[_Step] | None = None
        self._before: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}
        self.names = self._make_names()
        self.default: FakeStream = self.names["Stream"]()

    # ------------------------------------------------------------------ Runtime

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See `Runtime.call`. In a capture, the call is repeated at each replay."""
        if self._steps is not None and func._schema.is_mutable:
            for tensor in tensors_in((args, kwargs)):
                self._keep(tensor.bytes if isinstance(tensor, DeviceTensor) else tensor)
        out, step = _execute(func, args, kwargs)
        if self._steps is not None:
            self._steps.append(step)
        if func._schema.name == "aten::_to_copy" and kwargs.get("non_blocking") and type(out) is torch.Tensor:
            self._pin(out)  # torch also returns pinned memory here
        return out

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Runtime.function`. Replaces the device `cuda` in arguments."""
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and name in _METHODS:
            return getattr(self, f"_{name}")(func, args, kwargs)
        pinned = bool(kwargs.get("pin_memory"))
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        if _names_gpu(kwargs.get("device")):
            if name in ("tensor", "as_tensor"):  # the originals cannot read data of the device meta
                return torch.Tensor.to(func(*args, **{**kwargs, "device": _HOST}), _META)
            kwargs = {**kwargs, "device": _META}
        out = func(*args, **kwargs)
        return self._pin(out) if pinned else out

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """See `Runtime.record_stream`. No effect: fake work ends before a tensor can be deleted."""

    def stream_of(self, device: torch.device) -> str:
        return self.current.name

    def name_of(self, stream: Any) -> str:
        return str(stream.name)

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return _GPU if isinstance(tensor, DeviceTensor) else None

    def lifetime_of(self, tensor: torch.Tensor) -> object:
        return tensor.lifetime if isinstance(tensor, DeviceTensor) else tensor.untyped_storage()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, DeviceTensor) and tensor.untyped_storage()._cdata in self._pinned

    @contextmanager
    def patched(self, recorder: Recorder) -> Iterator[None]:
        with ExitStack() as stack:
            for name, value in self.names.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value, create=True))
            yield

    # ------------------------------------------------------------------ methods of tensors

    def _tolist(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(args[0].cpu() if isinstance(args[0], DeviceTensor) else args[0])

    def _numpy(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], DeviceTensor):
            raise TypeError(f"can't convert {_GPU} device type tensor to numpy. Use Tensor.cpu() first.")
        return func(*args, **kwargs)

    ___array__ = _numpy

    def ___format__(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(args[0].detach().cpu() if isinstance(args[0], DeviceTensor) else args[0], *args[1:])

    def ___repr__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], DeviceTensor):
            return f"{repr(args[0].detach().cpu())[:-1]}, device='{_GPU}')"
        return func(*args, **kwargs)

    def _is_pinned(self, func: Any, args: Any, kwargs: Any) -> bool:
        return self.is_pinned(args[0])

    def _pin_memory(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._pin(torch.empty_like(args[0]).copy_(args[0]))

    def _cuda(self, func: Any, args: Any, kwargs: Any) -> Any:
        blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return torch.Tensor.to(args[0], _META, non_blocking=blocking)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _names_gpu(kwargs.get("device")):
            kwargs = {**kwargs, "device": _META}
        return func(args[0], *(_META if _names_gpu(arg) else arg for arg in args[1:]), **kwargs)

    # ------------------------------------------------------------------ streams and graphs

    @property
    def current(self) -> FakeStream:
        """The calling thread's current stream."""
        return getattr(self._here, "stream", self.default)

    def select(self, stream: FakeStream | None) -> None:
        """`torch.cuda.set_stream`."""
        if stream is not None:
            self._here.stream = stream

    def next_name(self) -> str:
        """Name of a new stream."""
        number = next(self._numbers)
        return f"stream{number}" if number else "default"

    def capture(self) -> None:
        """Begin a capture: from now on, keep calls for replays."""
        self._steps, self._before = [], {}

    def captured(self) -> list[_Step]:
        """End a capture. Returns the calls since `capture`, and undoes their writes, because a real capture executes
        nothing.
        """
        steps, self._steps = self._steps or [], None
        for tensor, contents in self._before.values():
            tensor.untyped_storage().copy_(contents)
        self._before = {}
        return steps

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._before:
            self._before[storage._cdata] = tensor, storage.clone()  # type: ignore[no-untyped-call]

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key, None))
        return tensor

    def _make_names(self) -> dict[str, Any]:
        """The replacements for names of `torch.cuda`."""
        bound = {"runtime": self}
        event, stream = type("Event", (FakeEvent,), bound), type("Stream", (FakeStream,), bound)
        return {
            "Event": event,
            "Stream": stream,
            "ExternalStream": stream,
            "CUDAGraph": type("CUDAGraph", (FakeGraph,), bound),
            "graph": type("graph", (_Capture,), bound),
            "StreamContext": type("StreamContext", (_Selected,), bound),
            "stream": type("StreamContext", (_Selected,), bound),
            "device": lambda device: nullcontext(),
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.default,
            "set_stream": self.select,
            "synchronize": lambda device=None: self.judge.synchronized(),
            "is_current_stream_capturing": lambda: self.judge.capturing(self.current.name),
            "graph_pool_handle": lambda: (0, 0),
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "get_device_name": lambda device=None: "fake GPU",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: SimpleNamespace(name="fake GPU", total_memory=_MEMORY),
            "mem_get_info": lambda device=None: (_MEMORY, _MEMORY),
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
        }


class FakeStream:
    """`torch.cuda.Stream` of the fake."""

    runtime: FakeCuda
    device_index = 0
    device = _GPU

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        self.name = self.runtime.next_name()
        self.priority = priority

    def __repr__(self) -> str:
        return f"<fake torch.cuda.Stream {self.name}>"

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = self.runtime.names["Event"]() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """See `torch.cuda.Stream.query`. All work is done."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.runtime.judge.host_saw(self.runtime.judge.mark(self.name))

    def __enter__(self) -> FakeStream:
        self._outer = self.runtime.current
        self.runtime.select(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.runtime.select(self._outer)


class FakeEvent:
    """`torch.cuda.Event` of the fake."""

    runtime: FakeCuda

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.event = Event(external=external)

    def record(self, stream: FakeStream | None = None) -> None:
        self.runtime.judge.recorded(self.event, (stream or self.runtime.current).name)

    def wait(self, stream: FakeStream | None = None) -> None:
        """See `torch.cuda.Event.wait`. Raises RuntimeError in a capture if the event was recorded outside of it."""
        name, mark = (stream or self.runtime.current).name, self.event.mark
        if mark is not None and not mark.captured and not self.event.external and self.runtime.judge.capturing(name):
            raise RuntimeError(_ISOLATION)
        self.runtime.judge.waited_event(self.event, name)

    def query(self) -> bool:
        """See `torch.cuda.Event.query`. All work is done."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.runtime.judge.host_saw(self.event.mark)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        """Always 0, because fake work takes no time."""
        return 0.0


class FakeGraph:
    """`torch.cuda.CUDAGraph` of the fake: a replay repeats the captured calls."""

    runtime: FakeCuda

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: Graph | None = None
        self._steps: list[_Step] = []

    def capture_begin(self, *args: object, **kwargs: object) -> None:
        self.runtime.judge.capture_began(self.runtime.current.name)
        self.runtime.capture()

    def capture_end(self) -> None:
        self._steps = self.runtime.captured()
        self._graph = self.runtime.judge.capture_ended()

    def replay(self) -> None:
        if self._graph is not None:
            self.runtime.judge.replayed(self._graph, self.runtime.current.name)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for step in self._steps:
                step.repeat()

    def reset(self) -> None:
        self._graph, self._steps = None, []

    def pool(self) -> tuple[int, int]:
        return 0, 0


class _Capture:
    """`torch.cuda.graph` of the fake."""

    runtime: FakeCuda

    def __init__(self, cuda_graph: FakeGraph, pool: object = None, stream: Any = None, **kwargs: object) -> None:
        self._graph = cuda_graph
        self._stream = stream if stream is not None else self.runtime.names["Stream"]()
        self._outer = self.runtime.current

    def __enter__(self) -> None:
        self.runtime.judge.synchronized()
        self._outer = self.runtime.current
        self.runtime.select(self._stream)
        self._graph.capture_begin()

    def __exit__(self, *exception: object) -> None:
        self._graph.capture_end()
        self.runtime.select(self._outer)


class _Selected:
    """`torch.cuda.stream` of the fake."""

    runtime: FakeCuda

    def __init__(self, stream: FakeStream | None) -> None:
        self._stream = stream
        self._outer = self.runtime.current

    def __enter__(self) -> None:
        self._outer = self.runtime.current
        self.runtime.select(self._stream)

    def __exit__(self, *exception: object) -> None:
        self.runtime.select(self._outer)


def _execute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, _Step]:
    """Call an operator on CPU tensors. Its results are `DeviceTensor` if the call names the GPU, or if an argument is
    on the GPU.
    """
    wrappers: dict[int, torch.Tensor] = {}

    def unwrap(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            contents = value.bytes if isinstance(value, DeviceTensor) else value
            wrappers[id(contents)] = value
            return contents
        return _HOST if isinstance(value, torch.device) and value == _META else value

    host_args, host_kwargs = tree_map(unwrap, tuple(args)), tree_map(unwrap, dict(kwargs))
    device = kwargs.get("device")
    on_gpu = any(isinstance(one, DeviceTensor) for one in wrappers.values()) if device is None else device == _META
    made: list[torch.Tensor] = []

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in wrappers:
            return wrappers[id(value)]
        made.append(value)
        return DeviceTensor(value) if on_gpu else value

    out = tree_map(wrap, func(*host_args, **host_kwargs))
    return out, _Step(func, host_args, host_kwargs, tuple(made))


def _lifetime_of(storage: Any) -> _Lifetime:
    known = getattr(storage, "_check_trace_lifetime", None)
    lifetime = None if known is None else known()
    if lifetime is None:
        lifetime = _Lifetime()
        storage._check_trace_lifetime = weakref.ref(lifetime)
    return lifetime


def _names_gpu(device: Any) -> bool:
    """Whether an argument names the GPU: as a device, a name or a number."""
    if isinstance(device, torch.device):
        return on_gpu(device)
    return isinstance(device, str) and device.partition(":")[0] == CUDA


_METHODS = frozenset({"tolist", "numpy", "__array__", "__repr__", "__format__", "is_pinned", "pin_memory", "to", CUDA})
