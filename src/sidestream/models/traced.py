"""Replaces the attention of transformers' modules that have attention code of their own.

These modules do not call transformers' `AttentionInterface`. But all of them give their keys and values to a cache, and
then compute softmax(scale * query @ keys) @ values with it. `TracedLayers` gives them a cache that returns stand-ins.
The first product, of a query with the stand-in of keys, only notes the query; operations on its result note the scale;
the second product calls the attention function of `AttentionInterface` with the query, the keys, the values and the
scale. What else the code adds to its scores, such as masks, has no effect: the self-check compares each module with its
own code. Called on the thread of the forward pass; knows nothing of pools and batches.
"""

from __future__ import annotations

import contextlib
import inspect
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sidestream.errors import InvariantError, ModelError
from sidestream.models.recurrent import CACHE_ARGUMENTS

# Only kinds that were compared with transformers' own logits.
TRACED = frozenset(
    {
        *("bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "openai-gpt", "xglm"),
    }
)
"""Kinds whose attention is replaced."""

_PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm"})
_VIEWS = frozenset({"transpose", "view", "reshape", "contiguous", "to", "float"})
_TIMES, _OVER = (
    frozenset({"mul", "mul_", "__mul__", "__imul__"}),
    frozenset({"div", "div_", "__truediv__", "__itruediv__"}),
)
# They have no effect on the note: the self-check finds out if they change more than a causal mask does.
_IGNORED = frozenset({"add", "__add__", "where", "masked_fill", "max", "softmax", "dropout"})

Observer = Callable[[Callable[[], Any], Callable[[], Any]], Any]
"""Called in place of a module with two functions: its own code, and its code with replaced attention."""


class TracedLayers:
    """The modules with attention code of their own of one model. Their attention is replaced inside `run`."""

    def __init__(self, module: Any, *, num_kv_heads: int) -> None:
        self._config = module.config
        self._num_kv_heads = num_kv_heads
        self._slopes = _slopes(module)
        self._batch: Any = None
        self._device = module.device
        self._observe: Observer = _unobserved
        parts = [part for part in module.modules() if _attends(part)]
        for layer, part in enumerate(parts):
            part.layer_idx = layer
            self._replace(part)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """More inputs of the model's forward: MPT's needs a mask, of which a traced module makes no use."""
        if self._config.model_type != "mpt" or self._observe is not _unobserved:
            return {}
        return {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device)}

    def run(self, batch: Any, forward: Callable[[], Any]) -> Any:
        """Call `forward`; during the call, the modules attend with `batch`. One call at a time."""
        self._batch = batch
        try:
            return forward()
        finally:
            self._batch = None

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Inside the context, `observer` is called in place of each module, and returns the module's output."""
        self._observe = observer
        try:
            yield
        finally:
            self._observe = _unobserved

    def _replace(self, part: Any) -> None:
        window = _window(part)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
            if self._batch is None:
                raise InvariantError("attention was replaced and has no batch: call the module inside run")
            query = query.to(value.dtype).view(1, -1, *query.shape[-2:])
            if (copies := key.shape[1] // self._num_kv_heads) > 1:  # one for each query head of a KV head
                key, value = key[:, ::copies], value[:, ::copies]
            function = ALL_ATTENTION_FUNCTIONS[self._config._attn_implementation]
            attended = function(
                part,
                query,
                key,
                value,
                None,
                scaling=scale,
                sliding_window=window,
                slopes=self._slopes,
                paged_batch=self._batch,
            )
            output: torch.Tensor = attended[0].transpose(1, 2)
            return output

        name = "forward" if _cache_argument(part) else "_attn"
        own, traced = getattr(part, name), _with_cache if _cache_argument(part) else _without_cache

        def forward(*given: Any, **named: Any) -> Any:
            return self._observe(partial(own, *given, **named), partial(traced, own, attend, given, named))

        setattr(part, name, torch.compiler.disable(forward))  # type: ignore[no-untyped-call]


def _unobserved(own: Callable[[], Any], traced: Callable[[], Any]) -> Any:
    return traced()


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def _with_cache(own: Callable[..., Any], attend: Attend, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    bound = inspect.signature(own).bind(*given, **named)
    argument = next(name for name in CACHE_ARGUMENTS if name in bound.signature.parameters)
    bound.arguments[argument] = _Cache(attend)
    return own(*bound.args, **bound.kwargs)


def _without_cache(own: Callable[..., Any], attend: Attend, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    query, transposed_key, value, *others = given
    key, value = _Cache(attend).update(transposed_key.transpose(-1, -2), value)
    return own(query, key.transpose(-1, -2), value, *others, **named)


@dataclass(frozen=True, slots=True)
class _Cache:
    """The cache that a module gets in place of `transformers.Cache`."""

    attend: Attend

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[_StandIn, _StandIn]:
        keys, values = _Note(self.attend, key, value), _Note(self.attend, key, value, is_values=True)
        return _StandIn.of(key.to("meta"), keys), _StandIn.of(value.to("meta"), values)

    def get_seq_length(self, *_: Any) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _Note:
    """What a stand-in stands for: keys; values; or, with a query, scores."""

    attend: Attend
    key: torch.Tensor
    value: torch.Tensor
    is_values: bool = False
    query: torch.Tensor | None = None
    scale: float = 1.0

    def scores(self, query: torch.Tensor, scale: float) -> _Note:
        return _Note(self.attend, self.key, self.value, query=query, scale=scale)


class _StandIn(torch.Tensor):
    """A tensor without values, on the meta device, that stands for keys, values, scores or weights."""

    note: _Note

    @staticmethod
    def of(shape: torch.Tensor, note: _Note) -> _StandIn:
        made = shape.as_subclass(_StandIn)
        made.note = note
        return made

    def __add__(self, mask: Any) -> _StandIn:
        return self  # `mask` may be None, because paged attention needs none

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        inputs = [*args, *kwargs.values()]
        (first, *others) = [one for one in inputs if isinstance(one, _StandIn)]
        if name == "__get__" or name in {"size", "dim", "__len__"}:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if name in _VIEWS or name in _PRODUCTS:
            with torch._C.DisableTorchFunctionSubclass():
                shape = function(*map(_shape, args), **{key: _shape(value) for key, value in kwargs.items()})
        if name in _VIEWS:
            return _StandIn.of(shape, first.note)
        if name in _PRODUCTS:
            return _product(first, others, inputs, shape, alpha=kwargs.get("alpha", 1.0))
        if name in _TIMES or name in _OVER:
            factor = args[1]
            note = first.note
            if not isinstance(factor, numbers.Real) or note.query is None:
                return first  # by a mask
            scale = note.scale * float(factor) if name in _TIMES else note.scale / float(factor)
            return _StandIn.of(first.as_subclass(torch.Tensor), note.scores(note.query, scale))
        if name in _IGNORED:
            return first
        raise ModelError(f"its attention code uses {name}, which cannot be replaced by paged attention")


def _product(
    first: _StandIn, others: list[_StandIn], inputs: list[Any], shape: torch.Tensor, *, alpha: float
) -> torch.Tensor:
    """Of a query with keys: scores; of weights with values: attention."""
    note = first.note
    if not others and note.query is None and not note.is_values:
        query = [one for one in inputs if isinstance(one, torch.Tensor) and one is not first][-1]
        return _StandIn.of(shape, note.scores(query, alpha))
    if len(others) != 1 or note.query is None or not others[0].note.is_values:
        raise ModelError("its attention code multiplies something else than queries with keys, and weights with values")
    return note.attend(note.query, note.key, note.value, note.scale).reshape(shape.shape)


def _shape(value: Any) -> Any:
    return value.as_subclass(torch.Tensor).to("meta") if isinstance(value, torch.Tensor) else value


def _attends(part: nn.Module) -> bool:
    if _cache_argument(part) is None:
        return hasattr(part, "_attn")
    return "update" in inspect.unwrap(type(part).forward).__code__.co_names


def _cache_argument(part: nn.Module) -> str | None:
    parameters = inspect.signature(type(part).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def _slopes(module: Any) -> torch.Tensor | None:
    """What ALiBi adds to the score of a key for each token between query and key, float32 [heads]; None: no ALiBi."""
    base, device = module.base_model, module.device
    heads = module.config.num_attention_heads
    if hasattr(base, "build_mpt_alibi_tensor"):
        bias = base.build_mpt_alibi_tensor(heads, 2, device=device)
    elif hasattr(base, "build_alibi_tensor"):
        bias = base.build_alibi_tensor(torch.ones(1, 2, device=device), heads, torch.float32)
    else:
        return None
    slopes: torch.Tensor = bias[:, 0, 1] - bias[:, 0, 0]
    return slopes.float().contiguous()


def _window(part: Any) -> int | None:
    """The sliding window of a module that has its mask as a buffer: what the last position sees."""
    mask = getattr(part, "bias", None)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        return None
    visible = int(mask[0, 0, -1].sum())
    return visible if visible < mask.shape[-1] else None
