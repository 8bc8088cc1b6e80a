"""The driver's calls on a fake library: arguments, and the errors that failures become."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sidestream.errors import ConfigError, DeviceError, DeviceLost, OutOfDeviceMemory
from sidestream_kv.device.cuda.driver import Driver, named

CONTEXT = 4711


class Library:
    """libcuda, as far as it is used. `results` are what calls return, by name, one after another; then 0."""

    def __init__(self, *, batch: str | None = "cuMemcpyBatchAsync_v2", gpus: int = 1) -> None:
        self.results: dict[str, list[int]] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.segments: list[list[list[int]]] = []
        self.grids: list[dict[str, Any]] = []

        def store(index: int, value: Any) -> Callable[..., None]:
            return lambda *args: setattr(args[index]._obj, "value", value)

        self._add("cuInit")
        self._add("cuDeviceGetCount", store(0, gpus))
        self._add("cuDeviceGet", store(0, 0))
        self._add("cuDevicePrimaryCtxRetain", store(0, CONTEXT))
        self.current: int | None = None  # of the calling thread
        self._add("cuCtxSetCurrent", lambda context: setattr(self, "current", context.value))
        self._add("cuCtxGetCurrent", lambda current: setattr(current._obj, "value", self.current))
        self._add("cuDeviceGetAttribute", store(0, 2**31 - 1))
        self._add(
            "cuCtxGetStreamPriorityRange",
            lambda low, high: (setattr(low._obj, "value", 0), setattr(high._obj, "value", -5)),
        )
        self._add("cuStreamCreateWithPriority", store(0, 99))
        self._add("cuStreamDestroy_v2")
        self._add("cuMemHostRegister_v2")
        self._add("cuMemHostUnregister")
        self._add("cuGraphLaunch")
        self._add("cuMemcpyAsync")
        self._add("cuMemcpy2DAsync_v2", self._grid)
        self._add("cuGetErrorName", lambda rc, text: setattr(text._obj, "value", b"CUDA_ERROR_SOMETHING"))
        self._add("cuGetErrorString", lambda rc, text: setattr(text._obj, "value", b"something"))
        if batch is not None:
            self._add(batch, self._batch)

    def _add(self, name: str, effect: Callable[..., Any] = lambda *args: None) -> None:
        def call(*args: Any) -> int:
            self.calls.append((name, tuple(getattr(arg, "value", arg) for arg in args)))
            results = self.results.get(name)
            rc = results.pop(0) if results else 0
            if not rc:
                effect(*args)
            return rc

        setattr(self, name, call)

    def _batch(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        first: int,
        num_attributes: int,
        *rest: int,
    ) -> None:
        rows = [list((ctypes.c_int64 * count).from_address(address)) for address in (targets, sources, sizes)]
        self.segments.append(rows)
        assert (ctypes.c_size_t.from_address(first).value, num_attributes) == (0, 1)
        self.attributes = list((ctypes.c_int * 6).from_address(attributes))
        self.rest = rest

    def _grid(self, address: int, stream: int) -> None:
        fields = (ctypes.c_size_t * 16).from_address(address)
        self.grids.append(
            {"source": list(fields[:7]), "target": list(fields[7:14]), "width": fields[14], "height": fields[15]}
        )

    def made(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.calls if called == name]


def table(*segments: tuple[int, int, int]) -> Any:
    """Of `(target, source, bytes)`."""
    return np.array(segments, dtype=np.int64).T.copy()


def test_a_batch_copy_is_one_call_with_targets_sources_and_sizes() -> None:
    library = Library()
    Driver(library).copy_batch(table((1, 2, 3), (4, 5, 6)), 99, from_device=True, to_device=False)
    assert library.segments == [[[1, 4], [2, 5], [3, 6]]]
    assert library.attributes == [1, 1, 0, 2, 0, 0]  # in the stream's order, from the device, to the host
    assert library.rest == (99,)


def test_the_first_version_of_the_batch_call_has_an_output_for_failures() -> None:
    library = Library(batch="cuMemcpyBatchAsync")
    Driver(library).copy_batch(table((1, 2, 3)), 99, from_device=False, to_device=True)
    assert library.attributes == [1, 2, 0, 1, 0, 0]
    assert len(library.rest) == 2
    assert library.rest[1] == 99


def test_a_driver_without_batch_copies_reports_it_and_copies_one_by_one() -> None:
    library = Library(batch=None)
    driver = Driver(library)
    assert not driver.has_batch
    driver.copy_each(table((1, 2, 3), (4, 5, 6)), 99)
    assert library.made("cuMemcpyAsync") == [(1, 2, 3, 99), (4, 5, 6, 99)]


def test_copy_grid_makes_one_two_dimensional_copy_for_each_pair() -> None:
    library = Library()
    Driver(library).copy_grid(
        [1000, 2000],
        [30, 40],
        99,
        from_device=True,
        to_device=False,
        target_pitch=8,
        source_pitch=64,
        width=8,
        height=5,
    )
    assert library.grids[0] == {
        "source": [0, 0, 2, 30, 30, 0, 64],
        "target": [0, 0, 1, 1000, 1000, 0, 8],
        "width": 8,
        "height": 5,
    }
    assert (library.grids[1]["source"][3], library.grids[1]["target"][4]) == (40, 2000)


@pytest.mark.parametrize("error", [201, 1])  # the batched copy says "invalid value" of a thread that has no context
@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync_v2", "cuMemHostRegister_v2"])
def test_the_first_driver_call_of_a_thread_sets_its_context(call: str, error: int) -> None:
    library = Library()
    driver = Driver(library)
    library.results[call] = [error]
    library.calls.clear()
    library.current = None
    if call == "cuMemHostRegister_v2":
        driver.register(4096, 4096)
    else:
        driver.copy_batch(table((1, 2, 3)), 99, from_device=True, to_device=False)
    assert [name for name, _ in library.calls] == [call, "cuCtxGetCurrent", "cuCtxSetCurrent", call]
    assert library.made("cuCtxSetCurrent") == [(CONTEXT,)]


def test_pages_are_pinned_for_every_context_and_for_kernels() -> None:
    library = Library()
    Driver(library).register(4096, 8192)
    assert library.made("cuMemHostRegister_v2") == [(4096, 8192, 3)]


@pytest.mark.parametrize(("high", "priority"), [(True, -5), (False, 0)])
def test_streams_do_not_synchronize_with_the_default_stream(high: bool, priority: int) -> None:
    library = Library()
    assert Driver(library).make_stream(high=high) == 99
    assert library.made("cuStreamCreateWithPriority")[0][1:] == (1, priority)


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync_v2", "cuMemcpyAsync", "cuMemcpy2DAsync_v2", "cuGraphLaunch"])
def test_driver_error_codes_become_named_exceptions(call: str) -> None:
    for rc, error in [
        (1, DeviceError),
        (2, OutOfDeviceMemory),
        (700, DeviceLost),
        (214, DeviceLost),
        (719, DeviceLost),
        (999, DeviceLost),
        (712, DeviceError),
    ]:
        library = Library()
        driver = Driver(library)
        library.results[call] = [rc]
        with pytest.raises(
            error, match=rf"{call.removesuffix('_v2')} failed: CUDA_ERROR_SOMETHING \({rc}\), something"
        ) as caught:
            match call:
                case "cuMemcpyAsync":
                    driver.copy_each(table((1, 2, 3)), 99)
                case "cuMemcpy2DAsync_v2":
                    driver.copy_grid(
                        [1],
                        [2],
                        99,
                        from_device=True,
                        to_device=False,
                        target_pitch=8,
                        source_pitch=8,
                        width=8,
                        height=1,
                    )
                case "cuGraphLaunch":
                    driver.launch_graph(7, 99)
                case _:
                    driver.copy_batch(table((1, 2, 3)), 99, from_device=True, to_device=False)
        assert type(caught.value) is error


def test_a_missing_gpu_raises_a_config_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"there is no GPU 3: the driver sees 2.*CUDA_VISIBLE_DEVICES"):
        Driver(Library(gpus=2), index=3)


def coded(code: int, text: str = "CUDA error: something") -> RuntimeError:
    error = RuntimeError(text)
    error.error_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (coded(700), DeviceLost),
        (coded(710), DeviceLost),
        (coded(2), OutOfDeviceMemory),
        (coded(1), DeviceError),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), DeviceLost),
        (
            coded(
                1, "CUDA error: invalid argument\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
            ),
            DeviceError,
        ),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), DeviceLost),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfDeviceMemory),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfDeviceMemory),
    ],
)
def test_errors_of_torch_and_triton_become_device_errors(error: RuntimeError, name: type[DeviceError]) -> None:
    ours = named(error)
    assert type(ours) is name
    assert ours.__cause__ is error
    assert "\n" not in str(ours)


@pytest.mark.parametrize(
    "error", [ValueError("CUDA out of memory"), RuntimeError("shapes differ"), DeviceLost("the GPU is lost")]
)
def test_other_errors_are_not_converted(error: BaseException) -> None:
    assert named(error) is error


def test_device_cuda_imports_without_a_gpu_and_the_device_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sidestream_kv.device import cuda

    def missing() -> Any:
        raise ConfigError(
            "the CUDA driver cannot be loaded (libcuda.so.1): install NVIDIA's driver, or use the cpu device"
        )

    monkeypatch.setattr("sidestream_kv.device.cuda.device.load_library", missing)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        cuda.CudaDevice()
    monkeypatch.setattr("sidestream_kv.device.cuda.device.load_library", types.SimpleNamespace)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="built without CUDA: install a CUDA build of torch"):
        cuda.CudaDevice()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no GPU it can use"):
        cuda.CudaDevice()


@pytest.mark.parametrize(("wanted", "found"), [(3, 3), (4, 8)])
def test_memory_cached_by_torch_counts_as_free(monkeypatch: pytest.MonkeyPatch, wanted: int, found: int) -> None:
    """After an engine was closed, torch holds its memory: 20 GiB of KV seemed not to fit into an empty GPU."""
    free = [3]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.__setitem__(0, 8))
    assert Driver(Library()).free_memory(wanted) == (found, 9)
