"""Which parts of a model are divided over ranks, and how: transformers' own plan (`tp_plan`), and the same for parts
that it leaves out although their kind is known. Plans are by generic name: `model.layers.*.mlp.down_proj`.

A wrong plan cannot serve: `ShardCheck` compares the divided model with the whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from sidestream.errors import ModelError
from sidestream.models.recurrent import stateful_modules
from sidestream.models.traced import TRACED

# Styles of transformers' plans that divide the outputs of a Linear (True: the outputs of all ranks are gathered), and
# styles that divide its inputs (True: the input is whole, and each rank takes its range).
OUTPUTS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True, "packed_colwise": False}
INPUTS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True, "packed_rowwise": False}
# Styles that change gradients only, and styles of parts that stay whole on every rank.
_WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj"}
ON_ONE_RANK = "on_one_rank"
"""Style of what only one rank adds to a sum."""
SUMMED = {"moe_tp_experts", "all_reduce"}
_STYLES = (*OUTPUTS, *INPUTS, *sorted(_WHOLE | SUMMED))
# Experts that pass their input on: every rank would add it.
_IDENTITY = "moe_identity_expert"
# Projections whose outputs are divided, and the projection behind them, whose inputs are.
_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    (("q_b_proj", "kv_b_proj"), ("o_proj",)),
    (("q_proj", "kv_b_proj"), ("o_proj",)),
)
_FEED_FORWARD = (
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("w1", "w3"), ("w2",)),
    (("up_proj",), ("down_proj",)),
    (("input_linear",), ("output_linear",)),
    (("fc1",), ("fc2",)),
)
_GATES = frozenset({"gate_proj", "g_proj"})
_SINKS = "sinks"
# gpt-oss': weights are [experts, in, out], and the columns of gate and up alternate.
_TRANSPOSED = {
    "gate_up_proj": "rowwise",
    "gate_up_proj_bias": "rowwise",
    "down_proj": "colwise",
    "down_proj_bias": ON_ONE_RANK,
}
_TWO_IN_ONE = frozenset({"input_linear", "gate_up_proj"})


def plan_of(module: Any) -> Mapping[str, str]:
    """The styles of the model's parts by generic name, without those inside layers with recurrent state. Raises
    ModelError.
    """
    kind, names = module.config.model_type, dict(module.named_modules())
    stateful = [*map(id, stateful_modules(module).values())]
    recurrent = tuple(f"{generic(name)}." for name, part in names.items() if id(part) in stateful)
    plan = {name: style for name, style in (module.tp_plan or {}).items() if style not in _WHOLE}
    whole = [name.rpartition(".")[0] for name, style in plan.items() if style == _IDENTITY]
    plan = {
        name: style
        for name, style in plan.items()
        if not name.startswith(recurrent) and not any(name.startswith(experts) for experts in whole)
    }
    generic_names = {generic(name) for name, _ in (*names.items(), *module.named_parameters())}
    for name, style in plan.items():
        if name in generic_names and style not in _STYLES:
            raise ModelError(
                f"transformers' tensor-parallel plan for {kind} has the style {style} for {name}, and only "
                f"{', '.join(_STYLES)} are supported: run this model on one rank"
            )
    attention = {name for name, _ in attention_of(module)} if kind not in TRACED else set()
    for name, part in names.items():
        where = generic(name)
        if id(part) not in stateful and not where.startswith((*recurrent, *whole)):
            pairs = _ATTENTION if name in attention else _FEED_FORWARD
            plan |= {place: style for place, style in _found(where, part, pairs) if place not in plan}
    if not stateful and not any("layers.*." in name for name in plan):
        raise ModelError(
            f"transformers has no tensor-parallel plan for the layers of {kind}, and they have other projections than "
            "those that are known: run this model on one rank"
        )
    return plan


def generic(name: str) -> str:
    """A name as plans have it: `model.layers.*.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def attention_of(module: Any) -> list[tuple[str, Any]]:
    """The attention modules, with their names."""
    return [
        (name, part)
        for name, part in module.named_modules()
        if hasattr(part, "layer_idx") and hasattr(part, "is_causal")
    ]


def _found(where: str, part: Any, pairs: Any) -> Iterator[tuple[str, str]]:
    """Names and styles of the projections of one module; nothing if it has none of the known pairs, or if it is one of
    many experts.
    """
    kinds = {own: type(child) for own, child in part.named_children()}
    stacked = {own: tuple(weight.shape) for own, weight in part.named_parameters(recurse=False)}
    for outputs, ends in pairs:
        inputs = next((name for name in ends if kinds.get(name) is nn.Linear), None)
        known = inputs is not None and all(kinds.get(name) is nn.Linear for name in outputs)
        if known and ".experts." not in where and _may_divide(part, outputs):
            for name in (*outputs, *_gates(part, outputs)):
                yield f"{where}.{name}", "packed_colwise" if name in _TWO_IN_ONE else "colwise"
            yield f"{where}.{inputs}", "rowwise"
            if _SINKS in stacked:
                yield f"{where}.{_SINKS}", "colwise"
            return
    yield from ((f"{where}{name}", style) for name, style in _experts(stacked))


def _experts(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    """The styles of stacked experts, by the shapes of their weights, and of the module itself."""
    down, up = shapes.get("down_proj", ()), next((name for name in ("gate_up_proj", "up_proj") if name in shapes), "")
    if len(down) != 3 or not up:
        return
    experts, hidden, features = down
    if len(shapes) == 2 and shapes[up] == (experts, (2 if up in _TWO_IN_ONE else 1) * features, hidden):
        yield from ((f".{up}", "packed_colwise" if up in _TWO_IN_ONE else "colwise"), (".down_proj", "rowwise"))
    elif shapes.keys() == _TRANSPOSED.keys() and shapes[up] == (experts, features, 2 * hidden):
        yield from ((f".{name}", style) for name, style in _TRANSPOSED.items())  # here, down is [experts, in, out]
    else:
        return
    yield "", "moe_tp_experts"


def _may_divide(part: Any, outputs: Sequence[str]) -> bool:
    """Whether a module computes each of its outputs, or each head, alone: it has no norm over them, and no values but
    sinks.
    """
    widths = {getattr(part, name).out_features for name in outputs} - {getattr(part, "head_dim", 0)}
    return {name for name, _ in part.named_parameters(recurse=False)} <= {_SINKS} and not any(
        isinstance(child, nn.ModuleList) or any(weight.numel() in widths for weight in child.parameters())
        for child in part.children()
        if not isinstance(child, nn.Linear)
    )


def _gates(part: Any, outputs: Sequence[str]) -> list[str]:
    """The projection that gates what comes before the last projection, as in AFMoE's attention."""
    width = getattr(part, outputs[0]).out_features
    return [name for name in _GATES - {*outputs} if getattr(getattr(part, name, None), "out_features", 0) == width]
