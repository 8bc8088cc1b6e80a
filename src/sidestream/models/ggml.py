"""Products with quantised matrices by ggml, the library of llama.cpp, on a CPU.

Only functions of its public C interface are called, through ctypes, and no structure of it is read: `_DECLARED` lists
all of them, and `_check` compares what else must be equal in each version. The functions that only describe a product
take microseconds and keep the interpreter's lock; the one that computes releases it. A matrix is not copied: ggml reads
the bytes where they are. Its threads are those of OpenMP, which torch has loaded before, so both use the same ones.
Knows nothing of files and modules.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import weakref
from collections.abc import Callable, Iterable
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestream.errors import InvariantError

logger = logging.getLogger(__name__)

# The packages that hold the library, and its files below their folders, in the order in which they must be loaded.
_HOLDERS = {"llama_cpp": ("lib/*ggml-base.*", "lib/*ggml-cpu*.*", "lib/*ggml.*"), "xllamacpp": ("xllamacpp.*.so",)}
_F32, _I32 = 0, 26  # of ggml's enum of types
_ALIGNMENT = 64  # at least ggml's own
_DESCRIPTION_BYTES = 1 << 14  # of the tensors and the graph of one product: about 3 KiB
_SUCCESS = 0


class _Params(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_DECLARED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (c_void_p, (_Params,)),
    "ggml_free": (None, (c_void_p,)),
    "ggml_type_name": (c_char_p, (c_int,)),
    "ggml_type_size": (c_size_t, (c_int,)),
    "ggml_blck_size": (c_int64, (c_int,)),
    "ggml_validate_row_data": (c_bool, (c_int, c_void_p, c_size_t)),
    "ggml_new_tensor_1d": (c_void_p, (c_void_p, c_int, c_int64)),
    "ggml_new_tensor_2d": (c_void_p, (c_void_p, c_int, c_int64, c_int64)),
    "ggml_mul_mat": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "ggml_get_rows": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "ggml_new_graph_custom": (c_void_p, (c_void_p, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)),
    "ggml_backend_cpu_init": (c_void_p, ()),
    "ggml_backend_cpu_set_n_threads": (None, (c_void_p, c_int)),
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)),
    "ggml_backend_free": (None, (c_void_p,)),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, (c_void_p, c_size_t)),
    "ggml_backend_tensor_alloc": (c_int, (c_void_p, c_void_p, c_void_p)),
    "ggml_backend_buffer_free": (None, (c_void_p,)),
}
# They run long.
_WITHOUT_LOCK = {"ggml_backend_graph_compute", "ggml_validate_row_data"}


class Ggml:
    """The functions of one copy of the library, by their names without `ggml_`."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises OSError for a file that cannot be loaded, and AttributeError for a function that is missing."""
        files = [(ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))) for path in paths]
        self.paths = tuple(paths)
        for name, (result, arguments) in _DECLARED.items():
            holders = [file[name in _WITHOUT_LOCK] for file in files]
            function = getattr(next((one for one in holders if hasattr(one, name)), holders[-1]), name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self._check()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"ggml_{name} is not declared")

    def _check(self) -> None:
        weight = np.zeros((32, 34), dtype=np.uint8)  # the identity in Q8_0: 32 bytes and a scale of one half
        weight[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), dtype=np.uint8)
        weight[range(32), range(2, 34)] = 2
        matrix = Matrix(self, torch.from_numpy(weight), 8, (32, 32))
        states = torch.arange(-32.0, 32.0).view(2, 32)
        if (matrix.product(states) - states).abs().max() > 0.2 or not matrix.rows(torch.arange(32)).equal(
            torch.eye(32)
        ):
            raise OSError("it computes a wrong product")

    def supports(self, name: str, number: int, values: int, num_bytes: int) -> bool:
        """Whether this copy has the kind of blocks as `gguf_file.Kind` describes it."""
        found: bytes | None = self.type_name(number)
        sizes = (self.blck_size(number), self.type_size(number))
        return found is not None and found.decode().upper() == name.upper() and sizes == (values, num_bytes)


@functools.cache
def library() -> Ggml | None:
    """The library of an installed package; None: there is none, or none that can be used, which is logged."""
    for package, patterns in _HOLDERS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent
        paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))[:1]]
        try:
            return Ggml(paths)
        except (OSError, AttributeError, IndexError) as error:
            logger.warning("ggml of %s in %s cannot be used (%s)", package, folder, error)
    return None


class Matrix:
    """A matrix whose bytes stay where they are. Calls may come from any thread.

    shape   its numbers of rows and columns
    """

    def __init__(self, ggml: Ggml, packed: Tensor, number: int, shape: tuple[int, int]) -> None:
        """`packed`: uint8, in blocks of the type that has this number in ggml's enum. Copied only if not aligned."""
        self.shape = shape
        packed = packed.contiguous()
        self._packed = packed.clone() if packed.data_ptr() % 32 else packed
        self._number, self._ggml = number, ggml
        rows, columns = shape
        context = ggml.init(_Params(_DESCRIPTION_BYTES, None, True))
        self._tensor = ggml.new_tensor_2d(context, number, columns, rows)
        expected = rows * columns // ggml.blck_size(number) * ggml.type_size(number)
        if packed.nbytes != expected:
            ggml.free(context)
            raise InvariantError(f"a matrix {shape} of this type has {expected} bytes, not {packed.nbytes}")
        buffer = _place(ggml, self._tensor, self._packed)
        weakref.finalize(self, _free, ggml, context, [buffer])

    def is_valid(self) -> bool:
        """Whether no scale is infinite or NaN. Reads all bytes."""
        return bool(self._ggml.validate_row_data(self._number, self._packed.data_ptr(), self._packed.nbytes))

    def product(self, states: Tensor) -> Tensor:
        """`[T, columns]` to `[T, rows]`, float32. Each row of `states` is rounded to 8 bits in blocks of 32 or 256
        values, by itself, so its result does not depend on the other rows.
        """
        columns = self.shape[1]
        states = states.to(torch.float32).contiguous()
        if states.data_ptr() % _ALIGNMENT:
            states = states.clone()
        out = torch.empty(len(states), self.shape[0])
        if len(states):
            self._compute("mul_mat", "new_tensor_2d", (_F32, columns, len(states)), states, out)
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """The rows with these indices `[T]`, float32 `[T, columns]`."""
        indices = indices.to(torch.int32).contiguous()
        if indices.data_ptr() % _ALIGNMENT:
            indices = indices.clone()
        out = torch.empty(len(indices), self.shape[1])
        if len(indices):
            self._compute("get_rows", "new_tensor_1d", (_I32, len(indices)), indices, out)
        return out

    def _compute(self, op: str, new: str, shape: tuple[int, ...], given: Tensor, out: Tensor) -> None:
        ggml = self._ggml
        backend = ggml.backend_cpu_init()  # one for each call, because it holds the working memory of one
        context = ggml.init(_Params(_DESCRIPTION_BYTES, None, True))
        buffers: list[int] = []
        try:
            source = getattr(ggml, new)(context, *shape)
            buffers.append(_place(ggml, source, given))
            result = getattr(ggml, op)(context, self._tensor, source)
            buffers.append(_place(ggml, result, out))
            graph = ggml.new_graph_custom(context, 4, False)
            ggml.build_forward_expand(graph, result)
            ggml.backend_cpu_set_n_threads(backend, torch.get_num_threads())
            status = ggml.backend_graph_compute(backend, graph)
        finally:
            ggml.backend_free(backend)
            _free(ggml, context, buffers)
        if status != _SUCCESS:
            raise InvariantError(f"ggml_{op} failed with status {status}")


def _place(ggml: Ggml, tensor: int, data: Tensor) -> int:
    """Let a tensor of ggml have its values in `data`; returns a buffer, to be freed."""
    buffer: int = ggml.backend_cpu_buffer_from_ptr(data.data_ptr(), data.nbytes)
    ggml.backend_tensor_alloc(buffer, tensor, data.data_ptr())
    return buffer


def _free(ggml: Ggml, context: int, buffers: Iterable[int]) -> None:
    for buffer in buffers:
        ggml.backend_buffer_free(buffer)
    ggml.free(context)
