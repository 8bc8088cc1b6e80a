"""Records what a PyTorch program does on CUDA streams, and reports it to the judge.

`Recorder` receives calls of operators from two torch modes (`TorchDispatchMode`, `TorchFunctionMode`). It receives
calls of streams and events from `real` on a GPU, or from `fakes` without a GPU. It decides which of a call's tensors
are on the device, on which stream the call runs, and whether the host waits for it. Called from the threads of the
recorded program.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from sidestream_kv.types import Access
from sidestream_order.check_trace.judge import Judge
from sidestream_order.check_trace.operators import Use, has_storage, ranges_of, tensors_in, use_of

# Methods that read a tensor's bytes on the host. For a tensor in host memory, torch does not report them as operators.
_HOST_READS = ("numpy", "tolist", "__array__")


class Runtime(Protocol):
    """The CUDA runtime of the program: the real one, or a fake one on a machine without a GPU."""

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Execute an operator."""
        ...

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a function or a method of torch."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """`Tensor.record_stream`."""
        ...

    def stream_of(self, device: torch.device) -> str:
        """Name of the calling thread's current stream on a device."""
        ...

    def name_of(self, stream: Any) -> str:
        """Name of one of the program's streams."""
        ...

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """The GPU of a tensor; None: the tensor is in host memory."""
        ...

    def lifetime_of(self, tensor: torch.Tensor) -> object:
        """An object that is deleted together with the tensor's storage."""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in host memory is pinned."""
        ...

    def patched(self, recorder: Recorder) -> AbstractContextManager[None]:
        """A context in which calls of `torch.cuda` are reported to the recorder."""
        ...


class Recorder:
    """Reports a program's operators to `judge`; `runtime` executes them."""

    def __init__(self, judge: Judge, runtime: Runtime) -> None:
        self.judge = judge
        self.runtime = runtime
        self._names: dict[int, str] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._numbers = itertools.count(1)

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record the call of an operator that returned `out`."""
        for tensor in tensors_in(out):
            if self.runtime.device_of(tensor) is not None:
                self._name(tensor)
        use = use_of(func, args, kwargs, out)
        if use is not None:
            self.used(use)

    def used(self, use: Use) -> None:
        """Report the accesses of one call, as work of a stream or as an access by the host."""
        on_device = [tensor for tensor in (*use.writes, *use.reads) if self.runtime.device_of(tensor) is not None]
        if not on_device:
            self.judge.host_touched(self._accesses(use.reads, use.writes, known=True), use.name)
            return
        if use.moves is not None:
            source, target = (self.runtime.device_of(tensor) for tensor in use.moves)
            if source != target:
                self._moved(use, *use.moves)
                return
        device = self.runtime.device_of(on_device[0])
        assert device is not None
        stream = self.runtime.stream_of(device)
        for_host = [tensor for tensor in use.reads if self.runtime.device_of(tensor) is None]
        self.judge.host_touched(self._accesses(for_host, (), known=True), use.name)
        reads = [tensor for tensor in use.reads if self.runtime.device_of(tensor) is not None]
        self.judge.submitted(stream, self._accesses(reads, use.writes), use.name)
        if use.waits:
            self.judge.host_saw(self.judge.mark(stream))

    def host_read(self, tensor: torch.Tensor, label: str) -> None:
        """Report that the host reads a tensor in host memory."""
        if self.runtime.device_of(tensor) is None:
            self.judge.host_touched(self._accesses([tensor], (), known=True), label)

    def recorded_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Record a call of `tensor.record_stream(stream)`."""
        if has_storage(tensor):
            self.judge.recorded_stream(self._name(tensor), self.runtime.name_of(stream))

    def _moved(self, use: Use, source: torch.Tensor, target: torch.Tensor) -> None:
        """Report a copy from host to GPU, from GPU to host, or between GPUs."""
        here, there = self.runtime.device_of(source), self.runtime.device_of(target)
        if here is not None and there is not None:  # torch copies on the source's stream, with a wait before and after
            first, second = self.runtime.stream_of(here), self.runtime.stream_of(there)
            self.judge.waited(first, self.judge.mark(second))
            self.judge.submitted(first, self._accesses([source], [target]), use.name)
            self.judge.waited(second, self.judge.mark(first))
            return
        stream = self.runtime.stream_of(here or there or torch.device("meta"))
        reads = [source]
        if here is None and not self.runtime.is_pinned(source):
            # The driver copies pageable bytes before the call returns.
            self.judge.host_touched(self._accesses([source], (), known=True), use.name)
            reads = []
        self.judge.submitted(stream, self._accesses(reads, [target]), use.name)
        if use.blocking:
            self.judge.host_saw(self.judge.mark(stream))

    def _accesses(
        self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], *, known: bool = False
    ) -> list[Access]:
        """The byte ranges of tensors. `known`: only the ranges of storages that work of a stream accessed before."""
        found = []
        for write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                if has_storage(tensor) and not (known and self._key(tensor) not in self._names):
                    name = self._name(tensor)
                    found += [Access(name, start, stop, write) for start, stop in ranges_of(tensor)]
        return found

    def _name(self, tensor: torch.Tensor) -> str:
        """The name of a tensor's storage. A new storage is reported to the judge."""
        if not has_storage(tensor):
            return ""
        key = self._key(tensor)
        name = self._names.get(key)
        if name is None:
            storage = tensor.untyped_storage()
            name = self._names[key] = f"storage{next(self._numbers)}"
            self._watched[key] = weakref.ref(self.runtime.lifetime_of(tensor), self._end_of(key, name))
            device = self.runtime.device_of(tensor)
            stream = "" if device is None else self.runtime.stream_of(device)
            place = f"on {device}" if device is not None else f"of {_kind_of_host(self.runtime.is_pinned(tensor))}"
            shape = ", ".join(map(str, tensor.shape))
            text = f"{place}, first seen as {str(tensor.dtype).removeprefix('torch.')}[{shape}]"
            self.judge.made(name, storage.nbytes(), stream, text, pooled=device is not None)
        return name

    def _end_of(self, key: int, name: str) -> Callable[[object], None]:
        """Called when a storage is deleted, from any thread, also by the garbage collector."""

        def end(_: object) -> None:
            self._names.pop(key, None)
            self._watched.pop(key, None)
            self.judge.freed(name)

        return end

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every operator that the thread calls."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute and report one operator."""
        out = self.recorder.runtime.call(func, args, kwargs or {})
        self.recorder.called(func, args, kwargs or {}, out)
        return out


class FunctionMode(TorchFunctionMode):
    """Lets the runtime execute functions and methods of torch, and reports methods that give the host bytes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute and report one function or method."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        out = self._recorder.runtime.function(func, args, kwargs)
        if name in _HOST_READS and args and isinstance(args[0], torch.Tensor):
            self._recorder.host_read(args[0], name)
        return out


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside this context, record the calling thread and all threads that it starts."""
    run = threading.Thread.run

    def run_recorded(thread: threading.Thread) -> None:
        with _modes(recorder):
            run(thread)

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        recorder.runtime.record_stream(tensor, stream)
        recorder.recorded_stream(tensor, stream)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_recorded))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", record_stream))
        stack.enter_context(recorder.runtime.patched(recorder))
        stack.enter_context(_modes(recorder))
        yield


@contextmanager
def _modes(recorder: Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(FunctionMode(recorder))
        stack.enter_context(OperatorMode(recorder))
        yield


def touches(
    *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = (), label: str = "declared kernel"
) -> None:
    """Declare the tensors that the next kernel on the current stream reads and writes. Needed for kernels that PyTorch
    does not dispatch, such as Triton kernels or CUDA extensions without a schema. A view declares only its own bytes.
    Without `check_trace`, the call does nothing.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, OperatorMode):
            mode.recorder.used(Use(label, tuple(reads), tuple(writes)))


def _kind_of_host(pinned: bool) -> str:
    return "pinned host memory" if pinned else "pageable host memory"
