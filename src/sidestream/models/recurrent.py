"""Finds the layers with recurrent state in a transformers model, determines the layout of their states, and runs them
on a packed batch with states in a pool.

This works for every model family, because all recurrent layers of transformers use one interface to keep state
(`Cache.update_conv_state`, `Cache.update_recurrent_state`). Modules that use this interface are found by their code. A
run on the meta device gives the shapes of the states. Each call of a layer gets a cache object with the states of its
rows. Error messages say "its" for the model, because `loader.naming_model` puts the model's name in front.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from sidestream.attention.states import Kernels, Part, StateBatch, States
from sidestream.errors import ModelError
from sidestream.models.continued_scan import ContinuedScan, continued
from sidestream.models.gpu_functions import keep_kernels_on_gpu
from sidestream.models.text_part import causal_classes
from sidestream_kv.device.kinds import on_gpu
from sidestream_kv.kv.layout import DTYPE_BYTES
from sidestream_kv.kv.state_layout import StateLayout, StateTensor

_KEEPS_STATE = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
_ATTENDS = frozenset({"ALL_ATTENTION_FUNCTIONS"})
Compute = Callable[[torch.Tensor, StateBatch | None], torch.Tensor]
"""Computes a layer's output for hidden states `[1, T, hidden_size]`, with the states of a batch. Without a batch
(None), the tokens are one whole sequence.
"""
Observer = Callable[[int, torch.Tensor, StateBatch | None, Compute], torch.Tensor]
"""Called in place of a layer. Arguments: the layer's number in the model, input and batch, and a function that computes
the layer.
"""

NO_LIMIT = (0.0, math.inf)
"""Bounds of time steps that bound none."""

CACHE_ARGUMENTS = ("cache_params", "past_key_values", "layer_past")
"""Names that layers use for the parameter that takes the cache."""


def keeps_state(module_class: type) -> bool:
    """Whether modules of this class keep recurrent state in transformers' cache."""
    return issubclass(module_class, nn.Module) and _uses(module_class, _KEEPS_STATE)


def attention_layers(module: nn.Module) -> list[int]:
    """The numbers, in the model, of the layers that use transformers' attention interface, in order."""
    return [layer if part.layer_idx is None else part.layer_idx for layer, part in enumerate(_attending(module))]


def number_attention_layers(module: nn.Module, *, first: int = 0) -> None:
    """Renumber the attention layers consecutively from `first` on, because the block pool has KV of attention layers
    only.
    """
    for layer, part in enumerate(_attending(module), first):
        part.layer_idx = layer


def stateful_modules(module: nn.Module) -> dict[int, nn.Module]:
    """The modules with recurrent state, by the number of their layer in the model."""
    found: dict[int, nn.Module] = {}
    for name, part in module.named_modules():
        if not keeps_state(type(part)):
            continue
        layer = getattr(part, "layer_idx", None)
        if not isinstance(layer, int) or layer in found:
            raise ModelError(
                f"its {name} keeps recurrent state, but has no layer number of its own: at most one module with "
                "recurrent state per layer is served"
            )
        found[layer] = part
    return dict(sorted(found.items()))


def unbind_time_steps(module: nn.Module) -> bool:
    """Let no layer of Mamba 2 bound its time steps. transformers bounds the time steps of prompts, but not those of
    generated tokens, so the state after a token would depend on how the token was computed: as part of a prompt, alone,
    or once more after a preemption. Models whose config asks for bounds are refused. Returns whether a layer had
    bounds.
    """
    changed = False
    for part in stateful_modules(module).values():
        if tuple(getattr(part, "time_step_limit", NO_LIMIT)) != NO_LIMIT:
            part.time_step_limit = NO_LIMIT  # type: ignore[assignment]
            changed = True
    return changed


def skeleton(config: PreTrainedConfig, dtype: str) -> nn.Module:
    """The model of a config without weights, on the meta device."""
    with torch.device("meta"):
        module: nn.Module = causal_classes(config)[0]._from_config(
            copy.deepcopy(config), dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    return module.eval()


def state_layout_of(module: nn.Module, config: PreTrainedConfig) -> StateLayout | None:
    """The layout of the model's recurrent states, from a run of each layer over two tokens. None: the model has no
    recurrent state.

    module   model of `config`; on the meta device, the run computes nothing
    """
    tensors: list[StateTensor] = []
    for layer, part in stateful_modules(module).items():
        keep_kernels_on_gpu(type(part))
        parameter = next(part.parameters())
        hidden = torch.zeros(1, 2, config.hidden_size, dtype=parameter.dtype, device=parameter.device)
        cache = _EmptyStates(config=config)
        kept = cache.layers[layer]
        if not isinstance(kept, LinearAttentionCacheLayerMixin):
            raise ModelError(
                f"layer {layer} ({type(part).__name__}) keeps recurrent state, but transformers' cache has no state "
                "for this layer of the config"
            )
        with torch.inference_mode():
            _called(part)(hidden, **{_cache_argument(part): cache})
        for kind, states in (("conv", kept.conv_states), ("recurrent", kept.recurrent_states)):
            for index, state in states.items():
                if state is None:
                    continue
                dtype = str(state.dtype).removeprefix("torch.")
                if dtype not in DTYPE_BYTES:
                    raise ModelError(f"layer {layer} keeps {dtype} state: only {', '.join(DTYPE_BYTES)} are served")
                tensors.append(StateTensor(layer, kind, index, tuple(state.shape[1:]), dtype))
    if not tensors:
        return None
    return StateLayout(tuple(tensors), config.hidden_size, str(parameter.dtype).removeprefix("torch."))


class StatefulLayers:
    """The modules with recurrent state of one model. Their `forward` is replaced, so that they use the states of a
    batch inside `run`. Outside `run`, they compute one sequence without a cache, as transformers does.

    needs_chunk_lengths   whether some module needs the lengths of chunks on the host
    """

    def __init__(self, module: nn.Module) -> None:
        self._batch: StateBatch | None = None
        self._observe: Observer | None = None
        self.needs_chunk_lengths = False
        for layer, part in stateful_modules(module).items():
            self._replace_forward(layer, part)

    def run(self, batch: StateBatch, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call `forward`; during the call, the modules use the states of `batch`. One call at a time."""
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
            self._observe = None

    def _replace_forward(self, layer: int, part: nn.Module) -> None:
        keep_kernels_on_gpu(type(part))
        (own, scan), argument = continued(part), _cache_argument(part)
        own, in_pair = _called(part, own), "set_linear_cache" in type(part).forward.__code__.co_names
        kernels = _kernels(part, layer)
        self.needs_chunk_lengths |= kernels is None

        def compute(hidden_states: torch.Tensor, batch: StateBatch | None) -> torch.Tensor:
            if batch is None:
                output: torch.Tensor = own(hidden_states)
                return output
            return _packed(own, argument, layer, hidden_states, batch, kernels, scan)

        def forward(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            if self._observe is None:
                output = compute(hidden_states, self._batch)
            else:
                output = self._observe(layer, hidden_states, self._batch, compute)
            return (output, None) if in_pair else output

        part.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]


def _kernels(part: nn.Module, layer: int) -> Kernels | None:
    """Our kernels for the module; None: transformers' code computes it."""
    if not on_gpu(next(part.parameters()).device):
        return None
    from sidestream.models.gated_delta import GatedDelta  # imported here, because it imports triton

    return GatedDelta(part, layer) if GatedDelta.fits(part) else None


def _packed(
    own: Callable[..., torch.Tensor],
    argument: str,
    layer: int,
    hidden: torch.Tensor,
    batch: StateBatch,
    kernels: Kernels | None,
    scan: ContinuedScan | None,
) -> torch.Tensor:
    """A layer's output, `[1, T, hidden_size]`. Padding may follow the batch; the output of padding has no meaning."""

    def advance(inputs: torch.Tensor, states: States) -> torch.Tensor:
        if scan is not None:
            scan.continue_from(states["recurrent", 0])
        try:
            return own(inputs, **{argument: _RowStates(layer, states)})
        finally:
            if scan is not None:
                scan.continue_from(None)

    return batch.compute(layer, hidden[0], advance, kernels=kernels)[None]


def _called(part: nn.Module, own: Callable[..., Any] | None = None) -> Callable[..., torch.Tensor]:
    """The forward of a layer, without its other arguments, which recurrent layers ignore, and other results."""
    parameters = inspect.signature(type(part).forward).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD][2:]

    def call(hidden: torch.Tensor, **cache: Any) -> torch.Tensor:
        found = (own or part)(hidden, **{**dict.fromkeys(needed), **cache})
        output: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return output

    return call


class _LinearCache:
    """A cache that MiniMax's layers can use, which have methods of their own for recurrent state."""

    layers: Any

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        state: torch.Tensor | None = self.layers[layer_idx].recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        self.layers[layer_idx].update_recurrent_state(state)


class _EmptyStates(_LinearCache, DynamicCache):  # type: ignore[misc]
    """The cache of a whole model."""


class _RowStates(_LinearCache):
    """The cache object that a layer gets in place of `transformers.Cache`. It holds the states of the rows, and the
    layer changes the states in place.
    """

    def __init__(self, layer: int, states: Mapping[Part, torch.Tensor]) -> None:
        kept = LinearAttentionLayer(number_of_states=1 + max(index for _, index in states))
        for (kind, index), state in states.items():
            kept.has_previous_state[index] = True
            if kind == "conv":
                kept.conv_states[index], kept.conv_kernel_size[index] = state, state.shape[-1]
                kept.is_conv_states_initialized[index] = True
            else:
                kept.recurrent_states[index] = state
                kept.is_recurrent_states_initialized[index] = True
        kept.device, kept.dtype = state.device, state.dtype
        self.layers = {layer: kept}

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> torch.Tensor:
        updated: torch.Tensor = self.layers[layer_idx].update_conv_state(conv_states, state_idx=state_idx, **options)
        return updated

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> torch.Tensor:
        layer = self.layers[layer_idx]
        updated: torch.Tensor = layer.update_recurrent_state(recurrent_states, state_idx=state_idx, **options)
        return updated


def _attending(module: nn.Module) -> list[Any]:
    """The modules with attention, by the number of their layer; Zamba's have none, and are in order."""
    found: list[Any] = [part for part in module.modules() if _uses(type(part), _ATTENDS) and hasattr(part, "layer_idx")]
    return sorted(found, key=lambda part: part.layer_idx or 0)


def _cache_argument(part: nn.Module) -> str:
    names = inspect.signature(type(part).forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in names:
            return name
    raise ModelError(
        f"{type(part).__name__} has no parameter for its state with a known name ({', '.join(CACHE_ARGUMENTS)})"
    )


def _uses(module_class: type, names: frozenset[str]) -> bool:
    """Whether code of the class refers to one of these names."""
    for base in module_class.__mro__[: module_class.__mro__.index(nn.Module)]:
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            if code is not None and not names.isdisjoint(code.co_names):
                return True
    return False
