"""Reports the streams, events and graphs of a real GPU to the recorder: wraps the methods of `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch

from sidestream_kv.device.kinds import CUDA, on_gpu
from sidestream_order.check_trace.judge import Event
from sidestream_order.check_trace.recorder import Recorder


class CudaRuntime:
    """PyTorch's CUDA runtime, see `Runtime`."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], str] = {}
        self._record_stream = torch.Tensor.record_stream

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        self._record_stream(tensor, stream)

    def stream_of(self, device: torch.device) -> str:
        """See `Runtime.stream_of`. The name is also correct in a thread of autograd, which uses the stream of the
        forward pass.
        """
        return self.name_of(torch.cuda.current_stream(device))

    def name_of(self, stream: Any) -> str:
        index, number = int(stream.device_index), int(stream.stream_id)
        name = self._streams.get((index, number))
        if name is None:
            sides = sum(1 for _, other in self._streams if other)
            name = f"stream{sides + 1}" if number else "default"
            name = self._streams[index, number] = f"{CUDA}:{index} {name}" if index else name
        return name

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return tensor.device if on_gpu(tensor.device) else None

    def lifetime_of(self, tensor: torch.Tensor) -> object:
        return tensor.untyped_storage()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    @contextmanager
    def patched(self, recorder: Recorder) -> Iterator[None]:
        """See `Runtime.patched`. Calls report after they have succeeded."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.cuda.Event, "__init__", _keep_external))
            for owner, name, report in _reports(recorder):
                stack.enter_context(mock.patch.object(owner, name, _reporting(getattr(owner, name), report)))
            yield


def _reporting(original: Callable[..., Any], report: Callable[..., None]) -> Callable[..., Any]:
    """Wrap `original`: afterwards, call `report` with its result and its arguments."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        report(result, *args, **kwargs)
        return result

    return call


def _event(event: Any) -> Event:
    """The judge's record of an event; created at the first use."""
    known: Event | None = getattr(event, "_check_trace_event", None)
    if known is None:
        known = event._check_trace_event = Event()
    return known


def _keep_external(event: Any, *args: Any, external: bool = False, **kwargs: Any) -> None:
    """Replaces the constructor of events, because `__new__` has already created the event."""
    event._check_trace_event = Event(external=external)


def _reports(recorder: Recorder) -> list[tuple[Any, str, Callable[..., None]]]:
    """The wrapped names: owner, name, and the function that reports a call."""
    judge, name_of = recorder.judge, recorder.runtime.name_of

    def stream_of(stream: Any) -> str:
        return name_of(torch.cuda.current_stream() if stream is None else stream)

    def recorded(result: None, event: Any, stream: Any = None) -> None:
        judge.recorded(_event(event), stream_of(stream))

    def waited(result: None, event: Any, stream: Any = None) -> None:
        judge.waited_event(_event(event), stream_of(stream))

    def event_done(result: Any, event: Any) -> None:
        if result is not False:
            judge.host_saw(_event(event).mark)

    def stream_done(result: Any, stream: Any) -> None:
        if result is not False:
            judge.host_saw(judge.mark(name_of(stream)))

    def capture_began(result: None, graph: Any, *args: Any, **kwargs: Any) -> None:
        judge.capture_began(name_of(torch.cuda.current_stream()))

    def capture_ended(result: None, graph: Any) -> None:
        graph._check_trace_graph = judge.capture_ended()

    def replayed(result: None, graph: Any) -> None:
        if (captured := getattr(graph, "_check_trace_graph", None)) is not None:
            judge.replayed(captured, name_of(torch.cuda.current_stream()))

    def synchronized(result: None, *args: Any, **kwargs: Any) -> None:
        judge.synchronized()

    return [
        (torch.cuda.Event, "record", recorded),
        (torch.cuda.Event, "wait", waited),
        (torch.cuda.Event, "synchronize", event_done),
        (torch.cuda.Event, "query", event_done),
        (torch.cuda.Stream, "synchronize", stream_done),
        (torch.cuda.Stream, "query", stream_done),
        (torch.cuda.CUDAGraph, "capture_begin", capture_began),
        (torch.cuda.CUDAGraph, "capture_end", capture_ended),
        (torch.cuda.CUDAGraph, "replay", replayed),
        (torch.cuda, "synchronize", synchronized),
    ]
