"""Products with quantised matrices by ggml, the library of llama.cpp, on a CPU.

Only functions of its public C interface are called, through ctypes, and no structure of it is read: `_DECLARED` lists
all of them, and `_check` compares what else must be equal in each version. The functions that only describe a product
take microseconds and keep the interpreter's lock; those that run long release it. A matrix is not copied: ggml reads
the bytes where they are, and a repacked copy exists only if it is asked for. Its threads are those of OpenMP, which
torch has loaded before, so both use the same ones. Knows nothing of files and modules.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestream.errors import InvariantError

logger = logging.getLogger(__name__)

# The packages that hold the library, and its files below their folders, in the order in which they must be loaded.
_HOLDERS = {"llama_cpp": ("lib/*ggml-base.*", "lib/*ggml-cpu*.*", "lib/*ggml.*"), "xllamacpp": ("xllamacpp.*.so",)}
FLOAT32, _I32 = 0, 26  # of ggml's enum of types
_ALIGNMENT = 64  # at least ggml's own
_DESCRIPTION_BYTES = 1 << 14  # of the tensors and the graph of one computation: about 4 KiB
_NODES = 16  # at least the number of a graph's tensors
_SUCCESS = 0
_WARNING, _ERROR = 3, 4  # of the levels of ggml's messages; without a receiver, it writes all to stderr
_CPU_REPACK = b"CPU_REPACK"  # ggml's name of the buffers that have another order
# A repacked matrix is faster up to 8 rows: 0.43 to 0.87 of the time with two builds of ggml. With 12 or more, one of
# them takes 1.0 to 1.9 times as long (decision 65).
REPACKED_ROWS = 8


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
    "ggml_new_tensor_3d": (c_void_p, (c_void_p, c_int, c_int64, c_int64, c_int64)),
    "ggml_mul_mat": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "ggml_mul_mat_id": (c_void_p, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "ggml_add_id": (c_void_p, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "ggml_swiglu_oai": (c_void_p, (c_void_p, c_void_p, c_void_p, c_float, c_float)),
    "ggml_swiglu_split": (c_void_p, (c_void_p, c_void_p, c_void_p)),
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
    "ggml_log_set": (None, (c_void_p, c_void_p)),
    "ggml_backend_cpu_reg": (c_void_p, ()),
    "ggml_backend_reg_dev_get": (c_void_p, (c_void_p, c_size_t)),
    "ggml_backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    "ggml_backend_buft_name": (c_char_p, (c_void_p,)),
    "ggml_backend_buft_get_alloc_size": (c_size_t, (c_void_p, c_void_p)),
    "ggml_backend_buft_alloc_buffer": (c_void_p, (c_void_p, c_size_t)),
    "ggml_backend_buffer_get_base": (c_void_p, (c_void_p,)),
    "ggml_backend_dev_supports_op": (c_bool, (c_void_p, c_void_p)),
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
}
# They run long.
_WITHOUT_LOCK = {"ggml_backend_graph_compute", "ggml_validate_row_data", "ggml_backend_tensor_set"}


def _log(level: int, text: bytes, _user_data: None) -> None:
    if level in (_WARNING, _ERROR):
        logger.warning("ggml: %s", text.decode(errors="replace").rstrip())


_LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(_log)  # kept, because ggml calls it until the process ends


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
        self.log_set(_LOG, None)
        self._check()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"ggml_{name} is not declared")

    def _check(self) -> None:
        weight = np.zeros((32, 34), dtype=np.uint8)  # the identity in Q8_0: 32 bytes and a scale of one half
        weight[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), dtype=np.uint8)
        weight[range(32), range(2, 34)] = 2
        packed = torch.from_numpy(weight)
        matrix = Matrix(self, packed, 8, (32, 32))
        stack = Matrix(self, torch.cat([packed, torch.zeros_like(packed)]), 8, (2, 32, 32))
        states = torch.arange(-32.0, 32.0).view(2, 32)
        chosen = stack.product(states, torch.tensor([[1], [0]]))[:, 0]
        products = ((matrix.product(states), states), (chosen, states * torch.tensor([[0], [1]])))
        wrong = any((found - expected).abs().max() > 0.2 for found, expected in products)
        if wrong or not matrix.rows(torch.arange(32)).equal(torch.eye(32)):
            raise OSError("it computes a wrong product")

    def supports(self, name: str, number: int, values: int, num_bytes: int) -> bool:
        """Whether this copy has the kind of blocks as `gguf_file.Kind` describes it."""
        found: bytes | None = self.type_name(number)
        sizes = (self.blck_size(number), self.type_size(number))
        return found is not None and found.decode().upper() == name.upper() and sizes == (values, num_bytes)

    def repacks(self, number: int, shape: tuple[int, ...]) -> bool:
        """Whether this processor has kernels for such a matrix in another order. Takes no memory."""
        context = self.init(_Params(_DESCRIPTION_BYTES, None, True))
        placed = self.place_repacked(context, number, shape)
        _free(self, context, [] if placed is None else [placed[1]])
        return placed is not None

    def described(self, context: int, number: int, shape: Sequence[int]) -> int:
        """A tensor of 1 to 3 dimensions, without memory."""
        create = (self.new_tensor_1d, self.new_tensor_2d, self.new_tensor_3d)[len(shape) - 1]
        return int(create(context, number, *reversed(shape)))

    def place_repacked(self, context: int, number: int, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """A tensor whose bytes are kept in the order of this processor's kernels, and its buffer, to be freed; None: it
        has no such kernels. The memory is reserved, and taken when the bytes are set.
        """
        if self._repacking is None or len(shape) == 1:
            return None
        device, buffers = self._repacking
        tensor = self.described(context, number, shape)
        buffer = self.backend_buft_alloc_buffer(buffers, self.backend_buft_get_alloc_size(buffers, tensor))
        if not buffer:
            return None
        self.backend_tensor_alloc(buffer, tensor, self.backend_buffer_get_base(buffer))
        states = self.described(context, FLOAT32, (1, shape[-1]))
        if len(shape) == 2:
            product = self.mul_mat(context, tensor, states)
        else:
            product = self.mul_mat_id(context, tensor, states, self.described(context, _I32, (1, 1)))
        if self.backend_dev_supports_op(device, product):
            return tensor, buffer
        self.backend_buffer_free(buffer)
        return None

    @functools.cached_property
    def _repacking(self) -> tuple[int, int] | None:
        """The processor, and the type of its buffers with another order."""
        registry = self.backend_cpu_reg()
        device = self.backend_reg_dev_get(registry, 0)
        found = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not found:
            return None
        types = ctypes.PYFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(found)(device)
        for one in itertools.takewhile(bool, types or ()):
            if self.backend_buft_name(one) == _CPU_REPACK:
                return device, one
        return None


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
    """A matrix, or a stack of one for each expert, whose bytes stay where they are. Calls may come from any thread.

    shape   its numbers of rows and columns, and before them that of the experts
    """

    def __init__(
        self, ggml: Ggml, packed: Tensor, number: int, shape: tuple[int, ...], order: Tensor | None = None
    ) -> None:
        """`packed`: uint8, in blocks of the type that has this number in ggml's enum. Copied only if not aligned.
        `order`: for each value of a product, the row that computes it; None: the same one.
        """
        self.shape, self._order = shape, order
        packed = packed.contiguous()
        self._packed = packed.clone() if packed.data_ptr() % 32 else packed
        self._number, self.ggml = number, ggml
        context = ggml.init(_Params(_DESCRIPTION_BYTES, None, True))
        self._tensor = ggml.described(context, number, shape)
        expected = math.prod(shape) // ggml.blck_size(number) * ggml.type_size(number)
        if packed.nbytes != expected:
            ggml.free(context)
            raise InvariantError(f"a matrix {shape} of this type has {expected} bytes, not {packed.nbytes}")
        self._context, self._buffers = context, [_place(ggml, self._tensor, self._packed)]
        self._repacked: int | None = None
        weakref.finalize(self, _free, ggml, context, self._buffers)

    def repack(self) -> bool:
        """Keep a second copy of the bytes, in the order of this processor's kernels for few rows; takes their memory.

        False: there are no such kernels, or the memory cannot be had, or they compute another product, which is logged.
        """
        if self._repacked is not None:
            return True
        if (placed := self.ggml.place_repacked(self._context, self._number, self.shape)) is None:
            return False
        self._buffers.append(placed[1])
        packed = self._packed if self._order is None else self._packed.view(self.shape[0], -1)[self._order]
        self.ggml.backend_tensor_set(placed[0], packed.data_ptr(), 0, packed.nbytes)
        states = torch.linspace(-1, 1, self.shape[-1])[None]
        chosen = None if len(self.shape) == 2 else torch.arange(self.shape[0])[None]
        expected = self.product(states, chosen)
        self._repacked = placed[0]
        if not (self.product(states, chosen) - expected).norm() <= 1e-4 * expected.norm():
            logger.warning("ggml of %s computes a wrong product with repacked weights", self.ggml.paths[0].parent)
            self._repacked = None
        return self._repacked is not None

    def is_valid(self) -> bool:
        """Whether no scale is infinite or NaN. Reads all bytes."""
        return bool(self.ggml.validate_row_data(self._number, self._packed.data_ptr(), self._packed.nbytes))

    def product(self, states: Tensor, chosen: Tensor | None = None) -> Tensor:
        """`[T, columns]` to `[T, rows]`, float32. Each row of `states` is rounded to 8 bits in blocks of 32 or 256
        values, by itself, so its result does not depend on the other rows.

        chosen  of a stack, the experts of each row, `[T, count]`; the result is then `[T, count, rows]`
        """
        if chosen is None:
            return self.ordered(multiplied([self], len(states)).run(states)[0])
        return chosen_products(self, *chosen.shape).run(states[:, None], chosen)[0]

    def rows(self, indices: Tensor) -> Tensor:
        """The rows with these indices `[T]`, float32 `[T, columns]`."""
        computation = Computation(self.ggml, torch.empty(len(indices), dtype=torch.int32))
        computation.call("get_rows", self._tensor, *computation.inputs, shape=(len(indices), self.shape[1]))
        return computation.run(indices)[0]

    def tensor(self, num_rows: int) -> int:
        """The one of its tensors that is faster for a product with so many rows, of a stack for each expert."""
        return self._repacked if self._repacked and num_rows <= REPACKED_ROWS else self._tensor

    def ordered(self, result: Tensor) -> Tensor:
        """What ggml computed with `tensor`, as a product. The rows of a repacked copy are in order."""
        if self._order is None or self.tensor(len(result)) == self._repacked:
            return result
        return result.index_select(1, self._order)


class Computation:
    """A computation of ggml that is described once, and run any number of times by one thread at a time.

    inputs  tensors in ggml of the values that each run is given, float32 or int32
    called  those of the results
    """

    def __init__(self, ggml: Ggml, *given: Tensor) -> None:
        self._given, self._ggml = given, ggml
        self._context = ggml.init(_Params(_DESCRIPTION_BYTES, None, True))
        self._backend = ggml.backend_cpu_init()  # holds working memory, so it serves one computation
        self._graph = ggml.new_graph_custom(self._context, _NODES, False)
        self._buffers: list[int] = []
        self._results: list[Tensor] = []
        self.called: list[int] = []
        self.inputs: list[int] = []
        for values in given:
            kind = _I32 if values.dtype == torch.int32 else FLOAT32
            self.inputs.append(ggml.described(self._context, kind, values.shape))
            self._place(self.inputs[-1], values)
        weakref.finalize(self, _free, ggml, self._context, self._buffers, self._backend)

    def multiply(self, matrix: Matrix, states: int, bias: Matrix | None = None) -> int:
        """Add the products of a matrix, or of the matrices of a stack that the second input has for each row, and of
        these the bias `[experts, rows]`.
        """
        *_, last = self._given
        leading = last.shape[: len(matrix.shape) - 1]
        num_rows = leading.numel() * math.prod(matrix.shape[-2:]) // math.prod(matrix.shape)
        op = "mul_mat" if len(self.inputs) == 1 else "mul_mat_id"
        shape = (*leading, matrix.shape[-2])
        product = self.call(op, matrix.tensor(num_rows), states, *self.inputs[1:], shape=shape)
        if bias is None:
            return product
        return self.call("add_id", product, bias.tensor(0), *self.inputs[1:], shape=shape)

    def call(self, op: str, *arguments: float, shape: tuple[int, ...]) -> int:
        """Add the result of a function of ggml: float32 in this shape."""
        result: int = getattr(self._ggml, op)(self._context, *arguments)
        self._results.append(torch.empty(shape))
        self._place(result, self._results[-1])
        self._ggml.build_forward_expand(self._graph, result)
        self.called.append(result)
        return result

    def run(self, *values: Tensor) -> list[Tensor]:
        """All results for these inputs, in the order of the calls. The next run writes to the same memory."""
        for given, one in zip(self._given, values, strict=True):
            given.copy_(one)
        if self._given[0].nbytes:
            self._ggml.backend_cpu_set_n_threads(self._backend, torch.get_num_threads())
            status = self._ggml.backend_graph_compute(self._backend, self._graph)
            if status != _SUCCESS:
                raise InvariantError(f"a computation of ggml failed with status {status}")
        return self._results

    def _place(self, tensor: int, values: Tensor) -> None:
        if values.nbytes:
            self._buffers.append(_place(self._ggml, tensor, values))


def multiplied(matrices: Sequence[Matrix], num_rows: int) -> Computation:
    """`Matrix.product` of each with the same states `[num_rows, columns]`, before `Matrix.ordered`."""
    computation = Computation(matrices[0].ggml, torch.empty(num_rows, matrices[0].shape[1]))
    for one in matrices:
        computation.multiply(one, computation.inputs[0])
    return computation


def chosen_products(stack: Matrix, num_rows: int, num_chosen: int) -> Computation:
    """`Matrix.product` of a stack. Inputs are the states `[num_rows, 1, columns]` and the experts of each row, int32
    `[num_rows, num_chosen]`.
    """
    computation = _with_chosen(stack, num_rows, num_chosen)
    computation.multiply(stack, computation.inputs[0])
    return computation


def _with_chosen(stack: Matrix, num_rows: int, num_chosen: int) -> Computation:
    states = torch.empty(num_rows, 1, stack.shape[-1])
    return Computation(stack.ggml, states, torch.empty(num_rows, num_chosen, dtype=torch.int32))


def gated(gate: Matrix, up: Matrix, down: Matrix, num_rows: int) -> Computation:
    """`down(silu(gate(states)) * up(states))` as its last result. Inputs are those of `multiplied`."""
    computation = multiplied((gate, up), num_rows)
    joined = computation.call("swiglu_split", *computation.called, shape=(num_rows, gate.shape[0]))
    computation.multiply(down, joined)
    return computation


@dataclass(frozen=True, slots=True)
class Experts:
    """The gated MLPs of a layer's experts: stacks of gates, ups and downs.

    biases   of each stack, float32 `[experts, rows]`; None: it has none
    clamped  alpha and limit of gpt-oss' product of gate and up, in place of `silu(gate) * up`
    """

    stacks: Sequence[Matrix]
    biases: Sequence[Matrix | None] = (None, None, None)
    clamped: tuple[float, float] | None = None

    def computation(self, num_rows: int, num_chosen: int) -> Computation:
        """What the chosen experts compute of each row, `[num_rows, num_chosen, width]`, as its last result. Inputs are
        those of `chosen_products`.
        """
        gate, up, down = zip(self.stacks, self.biases, strict=True)
        computation = _with_chosen(gate[0], num_rows, num_chosen)
        states, shape = computation.inputs[0], (num_rows, num_chosen, gate[0].shape[1])
        pair = [computation.multiply(stack, states, bias) for stack, bias in (gate, up)]
        op = "swiglu_oai" if self.clamped else "swiglu_split"
        joined = computation.call(op, *pair, *(self.clamped or ()), shape=shape)
        computation.multiply(down[0], joined, down[1])
        return computation


def _place(ggml: Ggml, tensor: int, data: Tensor) -> int:
    """Let a tensor of ggml have its values in `data`; returns a buffer, to be freed."""
    buffer: int = ggml.backend_cpu_buffer_from_ptr(data.data_ptr(), data.nbytes)
    ggml.backend_tensor_alloc(buffer, tensor, data.data_ptr())
    return buffer


def _free(ggml: Ggml, context: int, buffers: Iterable[int], backend: int | None = None) -> None:
    if backend is not None:
        ggml.backend_free(backend)
    for buffer in buffers:
        ggml.backend_buffer_free(buffer)
    ggml.free(context)
