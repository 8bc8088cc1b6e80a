"""Determines which tensors a PyTorch operator reads and which it writes, from the alias annotations of its schema. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sidestream_order.sim.views import runs_of

# Operators that change a tensor's metadata but not its bytes, and allocations that write nothing.
_NO_ACCESS = frozenset(
    {
        "record_stream",
        "set_",
        "resize_",
        "resize_as_",
        "is_pinned",
        "is_same_size",
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
    }
)
# Operators whose result or shape depends on data, so the host waits. Torch tags further operators of this kind.
_WAITED_FOR = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select"})
_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_MOVES = frozenset({"copy_", "_to_copy"})
# A tensor with more contiguous runs than this counts as one range from its first to its last byte.
_MAX_RUNS = 1024


@dataclass(frozen=True, slots=True)
class Use:
    """The tensors that one call of an operator accesses.

    name      the operator's name without namespace and overload
    waits     True: the host waits for the operator's result
    moves     source and destination, if the operator may copy between host and device
    blocking  True: the host waits for this copy
    """

    name: str
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    waits: bool = False
    moves: tuple[torch.Tensor, torch.Tensor] | None = None
    blocking: bool = False


def use_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Use | None:
    """The tensors that the call `func(*args, **kwargs)` with the result `out` reads and writes. None if it accesses no
    bytes, or if `func` has no schema.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    name = schema.name.partition("::")[2]
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    results = tensors_in(out)
    for number, argument in enumerate(schema.arguments):
        value = kwargs.get(argument.name) if number >= len(args) else args[number]
        found = tensors_in(value)
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(found)
    if name in _NO_ACCESS:
        return None
    inputs = {_storage_key(tensor) for tensor in (*reads, *writes)}
    fresh = [tensor for tensor in results if _storage_key(tensor) not in inputs]
    if not schema.is_mutable and results and not fresh and name not in _MOVES:
        return None  # a view shares its bytes with an argument
    moves = None
    if name == "copy_" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        moves = args[1], args[0]
    elif name == "_to_copy" and fresh:
        moves = args[0], fresh[0]
    given = args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking")
    waits = name in _WAITED_FOR or not _TAGS.isdisjoint(func.tags)
    return Use(name, tuple(reads), (*writes, *fresh), waits, moves, blocking=not given)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument or a result, including those in lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_in(one)]
    if isinstance(value, Mapping):
        return [tensor for one in value.values() for tensor in tensors_in(one)]
    return []


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and has bytes of its own."""
    try:
        return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0
    except (NotImplementedError, RuntimeError):
        return False


def ranges_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The byte ranges of a tensor in its storage."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    last = sum((int(count) - 1) * int(stride) for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = first, first + (last + 1) * size
    if tensor.is_contiguous() or _num_runs(tensor) > _MAX_RUNS:
        return [span]
    return [(first + start, first + stop) for start, stop in runs_of(tensor)]


def _num_runs(tensor: torch.Tensor) -> int:
    """An upper bound of the number of contiguous runs: the product of all axes except the contiguous one."""
    counts = [count for count, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    inner = max((count for count, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 1), default=1)
    total = 1
    for count in counts:
        total *= count
    return total // max(inner, 1)


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if has_storage(tensor) else id(tensor)
