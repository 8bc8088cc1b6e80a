"""Compiles a model's decoder layers, its last norm and its rotary embedding.

Layers of the same kind share one compilation for all numbers of tokens. The model is not compiled as a whole, because
that took half a minute per shape (docs/decisions/0017). Attention stays outside of compiled code, because Sidestream
has its own kernels for it. Projections of the same hidden states are merged into one matrix product. The norm and the
rotary embedding are compiled, because each would otherwise take ten kernel launches.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental import _config as symbolic_shapes
from transformers import AttentionInterface

from sidestream.errors import ModelError
from sidestream.models import adapter, few_rows
from sidestream.models.adapter import PagedModel
from sidestream.models.experts import use_own_experts
from sidestream.models.joined import join_adapted, join_projections
from sidestream.models.lora import AdaptedLinear
from sidestream.models.mtp import MtpHead
from sidestream.models.rotary import rotate_in_attention
from sidestream.ops.experts import MOST_LARGEST, MOST_SCORES

logger = logging.getLogger(__name__)

# Name under which transformers finds the attention function that is excluded from compilation.
_OUTSIDE = f"{adapter.PAGED}_outside"

_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
)
# Maximum number of compilations. A layer is compiled once for all numbers of tokens, and a model has few kinds of
# layers.
_MOST_VARIANTS = 64
# Modules whose exceptions mean that compilation failed.
_COMPILERS = ("torch._dynamo.", "torch._inductor.", "triton.")


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Context manager for the first calls of layers that `compile_layers` prepared, on the calling thread. Inside it,
    each kind of layer is compiled once for all numbers of tokens. Without it, the compiler would specialise on 128
    tokens (the size of a head) and on one token, and compile again for other numbers. The settings of the compiler are
    restored at the end.
    """
    limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    with (
        torch._dynamo.config.patch(recompile_limit=limit),
        symbolic_shapes.patch(use_duck_shape=False, backed_size_oblivious=True),  # type: ignore[attr-defined]
    ):
        yield


def compile_layers(
    model: PagedModel | MtpHead, *, backend: str | Callable[..., Any] = "inductor", required: bool = False
) -> None:
    """Compile the decoder layers of a model or of a draft head (MTP) in place. The compilation happens in the first
    calls of the layers, which take seconds and must be inside `compiling`. `decompile` reverts this.

    First joins projections of the same input (`join_projections`); their weights move to new memory, one layer at a
    time. Results differ from eager results by rounding. If the compiler fails on a kind of layer, that kind runs
    uncompiled from then on, with a warning; the other kinds stay compiled. `required`: then a call raises ModelError.
    """
    with torch.no_grad():
        for names in _JOINED:
            # The list holds no projection: an old weight must be free before the next one is copied, as all joined
            # weights together are most of a model.
            for parent in [part for part in _module(model).modules() if all(hasattr(part, name) for name in names)]:
                join_projections(parent, names)
        for adapted in [part for part in _module(model).modules() if isinstance(part, AdaptedLinear)]:
            join_adapted([adapted])
    rotate_in_attention(_module(model), model.served if isinstance(model, MtpHead) else model.module)
    AttentionInterface.register(_OUTSIDE, torch.compiler.disable(adapter.paged_attention_hook))  # type: ignore[no-untyped-call]
    _module(model).config._attn_implementation = _OUTSIDE
    use_own_experts(_module(model), (model.served if isinstance(model, MtpHead) else model.module).dtype)
    # Compiled kernels start before the previous one has ended, and wait before they read what it wrote. So may kernels
    # behind them, which read their weights until then.
    options: Any = {"joint_custom_pre_pass": _MERGE_PRODUCTS, "triton.enable_pdl": True}
    options = options if backend == "inductor" else None
    how = {"dynamic": True, "backend": backend, "options": options}
    rotary = None if isinstance(model, MtpHead) else getattr(model.module.base_model, "rotary_emb", None)
    for (kind, _), parts in _kinds(model).items():
        for part in parts:
            compiled = _compiled(part._call_impl, kind, partial(_as_written, parts), how, required=required)
            part._compiled_call_impl = _with_static_width(compiled) if part is rotary else compiled
    if isinstance(model, MtpHead):
        vars(model)["joined"] = _compiled(
            MtpHead.joined.__get__(model), "MtpHead", lambda: vars(model).pop("joined", None), how
        )


def decompile(model: PagedModel | MtpHead) -> None:
    """Run the layers uncompiled again. Joined projections keep their shared memory, but are computed one by one."""
    _as_written(compiled_parts(model))
    vars(model).pop("joined", None)
    _module(model).config._attn_implementation = adapter.PAGED


def _compiled(
    written: Callable[..., Any],
    kind: str,
    undo: Callable[[], object],
    how: Mapping[str, Any],
    *,
    required: bool = False,
) -> Callable[..., Any]:
    """The function `written` in compiled form. If the compiler fails, the call runs `written` itself, and `undo`
    prevents more attempts to compile. `required`: then it raises ModelError.
    """
    compiled = torch.compile(written, **how)

    def call(*given: Any, **named: Any) -> Any:
        try:
            return compiled(*given, **named)
        # Not every error is the compiler's: compiled code also calls attention, which raises errors of its own.
        except Exception as error:
            if not type(error).__module__.startswith(_COMPILERS):
                raise
            # No local variable holds `inner_exception`. Its traceback would refer to this frame and the frame to it,
            # and such a cycle, with all tensors of the frame, is freed late.
            if isinstance(getattr(error, "inner_exception", None), torch.OutOfMemoryError):
                raise error.inner_exception from None  # type: ignore[attr-defined]
            reason = reason_of(getattr(error, "inner_exception", error))
            if required:
                raise ModelError(
                    f"batch_invariant is on, but {kind} cannot be compiled ({reason}), and torch's own norms on a GPU "
                    "add in an order that depends on the number of rows: leave batch_invariant out"
                ) from None
            logger.warning("%s cannot be compiled (%s): it runs uncompiled, which is slower", kind, reason)
            undo()
        return written(*given, **named)

    return call


def _with_static_width(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the last dimension of the results of `compiled` as static; its size is the same in all calls. Otherwise the
    compiler treats the size as dynamic. torch 2.11 cannot halve a slice of dynamic size, and layers that rotate only a
    part of a head do so.
    """

    def call(*given: Any, **named: Any) -> Any:
        results = compiled(*given, **named)
        for result in results if isinstance(results, tuple) else ():
            torch._dynamo.mark_static(result, result.dim() - 1)
        return results

    return call


def reason_of(error: BaseException) -> str:
    """The exception's class and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"


def _as_written(parts: Sequence[nn.Module]) -> None:
    for part in parts:
        part._compiled_call_impl = None


def _kinds(model: PagedModel | MtpHead) -> Mapping[tuple[str, tuple[type, ...]], Sequence[nn.Module]]:
    """All modules to compile, grouped by kind: a name and the classes of the submodules."""
    layers = decoder_layers(model)
    types = getattr(_module(model).config, "layer_types", None) or [""] * len(layers)
    named = [
        (f"{type(layer).__name__} {of_type}".rstrip(), layer)
        for layer, of_type in zip(layers, types[-len(layers) :], strict=False)
    ]
    kinds: dict[tuple[str, tuple[type, ...]], list[nn.Module]] = {}
    for name, part in (*named, *((type(part).__name__, part) for part in _around(model))):
        kinds.setdefault((name, tuple(map(type, part.modules()))), []).append(part)
    return kinds


def compiled_parts(model: PagedModel | MtpHead) -> Sequence[nn.Module]:
    """All modules that `compile_layers` compiles."""
    return (*decoder_layers(model), *_around(model))


def decoder_layers(model: PagedModel | MtpHead) -> Sequence[nn.Module]:
    """The decoder layers; empty for a model that does not keep them in `base_model.layers`."""
    if isinstance(model, MtpHead):
        return (model.layer,)
    layers = getattr(model.module.base_model, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else ()


def _around(model: PagedModel | MtpHead) -> Sequence[nn.Module]:
    """Small modules before and after the layers, if the model has them."""
    if isinstance(model, MtpHead):
        return (model.norm,)
    found = (getattr(model.module.base_model, name, None) for name in ("rotary_emb", "norm"))
    return [module for module in found if isinstance(module, nn.Module)]


def _module(model: PagedModel | MtpHead) -> Any:
    return model if isinstance(model, MtpHead) else model.module


class _MergeProducts(CustomGraphPass):
    """A graph pass that merges equal matrix products, and what rounds their inputs. torch's own pass does not merge a
    product if the graph returns a view of it. This pass also turns the product of a column and a row (positions times
    frequencies) into an elementwise multiplication, which needs no separate kernel launch. On a GPU, it lets one kernel
    find the largest of few scores, which torch selects in one kernel and sorts in another one, lets mixtures of experts
    add what is added to their output, and lets an own kernel multiply a single row.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change the graph in place."""
        aten = torch.ops.aten
        for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
            if node.args[0].meta["val"].shape[2] == 1:
                node.target = aten.mul.Tensor
        products = (aten.mm, aten.addmm, aten._scaled_mm, aten._scaled_mm_v2)
        views = (aten.view, aten.permute, aten.t, aten.reshape, aten._unsafe_view)
        # What rounds the inputs of products in 8-bit floats: see `fp8`.
        rounding = (
            aten.abs,
            aten.amax,
            aten.clamp_min,
            aten.clamp_max,
            aten.clamp,
            aten.clone,
            aten.unsqueeze,
            aten._to_copy,
        )
        pure = {op.default for op in (*products, *views, *rounding, torch.ops.prims.convert_element_type)}
        pure |= {aten.div.Tensor, aten.mul.Tensor, torch.ops.sidestream.add_adapters.default}
        pure |= {torch.ops.sidestream.invariant_linear.default}
        for node in graph.find_nodes(op="call_function", target=aten.topk.default):
            _replace_topk(node)
        for node in graph.find_nodes(op="call_function", target=torch.ops.sidestream.mix.default):
            _add_in_mixture(graph, node, {view.default for view in views})
        first: dict[tuple[Any, ...], torch.fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in pure:
                continue
            same = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
        few_rows.use_own_products(graph)

    def uuid(self) -> Any:
        """Key of this pass in the cache of compiled graphs."""
        return get_hash_for_files((__file__, few_rows.__file__))


def _replace_topk(node: torch.fx.Node) -> None:
    scores, count, *others = node.args
    meta = scores.meta["val"]  # type: ignore[union-attr]
    last, largest = (*others, -1, True)[:2] if others else (-1, True)
    if (
        not node.kwargs
        and meta.is_cuda
        and meta.is_floating_point()
        and last in (-1, meta.dim() - 1)
        and largest is True
        and isinstance(meta.shape[-1], int)
        and meta.shape[-1] <= MOST_SCORES
        and isinstance(count, int)
        and count <= MOST_LARGEST
    ):
        node.target, node.args, node.kwargs = torch.ops.sidestream.largest_of_rows.default, (scores, count), {}


def _add_in_mixture(graph: torch.fx.Graph, node: torch.fx.Node, views: Set[Any]) -> None:
    """Let the mixture of experts `node` add what is added to its output, which views may reshape."""
    *arguments, nothing = node.args
    chain = [node]
    while len(chain[-1].users) == 1 and (user := next(iter(chain[-1].users))).target in views:
        chain.append(user)
    if len(chain[-1].users) != 1 or nothing is not None:
        return
    total = next(iter(chain[-1].users))
    added = next((given for given in total.args if given is not chain[-1]), None)
    if total.target is not torch.ops.aten.add.Tensor or total.kwargs or not isinstance(added, torch.fx.Node):
        return
    sizes = {str(whole.meta["val"].shape) for whole in (total, added)}
    types = {whole.meta["val"].dtype for whole in (total, added, node)}
    if len(sizes) == len(types) == 1:
        with graph.inserting_before(total):
            mixture = graph.call_function(torch.ops.sidestream.mix.default, (*arguments, added))
        mixture.meta = total.meta
        total.replace_all_uses_with(mixture)
        for done in (total, *reversed(chain)):
            graph.erase_node(done)


# All compilations share one instance, because its identity is part of the key of the compile cache.
_MERGE_PRODUCTS = _MergeProducts()
