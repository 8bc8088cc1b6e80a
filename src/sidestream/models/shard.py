"""Shards a model over the ranks of tensor parallelism, by transformers' own plan for the model (`tp_plan`).

Each rank calls this while it loads the model. Attention heads, the inner features of MLPs and experts, and the rows of
the output matrix are divided; embeddings, norms and routers are whole on every rank. This file uses a communication
group, and does not know how the ranks' processes are started. Error messages say "its" for the model, because
`loader.naming_model` puts the model's name in front.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedConfig

from sidestream.errors import ModelError
from sidestream.models.config_checks import attends
from sidestream.models.divided import (
    Division,
    Gathered,
    GatheredNorm,
    Reduced,
    Segments,
    Split,
    sum_output,
)
from sidestream.models.fp8 import ONE_BLOCK, Fp8Linear
from sidestream.models.recurrent import skeleton, state_layout_of, stateful_modules
from sidestream.models.self_check import REPLAY_BOUNDS
from sidestream.models.shard_plan import INPUTS, ON_ONE_RANK, OUTPUTS, SUMMED, attention_of, generic, plan_of
from sidestream.models.shard_recurrent import recurrent_division
from sidestream_kv.device.group import Group
from sidestream_kv.kv.state_layout import StateLayout

logger = logging.getLogger(__name__)

# Names of attributes in which attention modules keep their numbers of heads.
_QUERY_COUNTS, _KV_COUNTS = ("num_heads", "num_attention_heads"), ("num_key_value_heads", "num_kv_heads")
_CHECKED_TOKENS = 25


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of the model.

    num_heads      query heads; None: the model does not attend
    num_kv_heads   heads of keys and values; all heads of the model if its plan does not divide attention
    state_layout   layout of the recurrent states of its heads; None: the model has no recurrent state
    """

    num_heads: int | None
    num_kv_heads: int
    state_layout: StateLayout | None = None


def share_of(config: PreTrainedConfig, *, size: int, dtype: str = "float32") -> Share:
    """The share of each of `size` ranks in a model of this dtype; reads no weights.

    Raises ModelError when no plan is known for the model, when transformers' plan has a style that is not supported, or
    when `size` does not divide its heads and features.
    """
    module: Any = skeleton(config, dtype)
    plan = plan_of(module)
    heads = kv_heads = 1
    if attends(config):
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    divided = _divides_heads(module, plan)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads} if divided else {}
    for name, part, style in _planned(module, plan):
        if style != ON_ONE_RANK:
            sizes.setdefault(f"the size of {generic(name)}", _divided_size(name, part, style))
    if (head := _head_name(module)) is not None:
        sizes.pop(f"the size of {head}", None)  # the output matrix stays whole if it cannot be divided
    stateful, groups = stateful_modules(module), dict[str, int]()
    for part in stateful.values():
        how, kind = recurrent_division(part), type(part).__name__
        sizes |= {f"{kind}.{name}": number for name, number in how.heads.items()}
        groups |= {f"{kind}.{name}": number for name, number in how.groups.items()}
    _check_divisible(sizes, groups, size)
    layout = None
    if stateful and size > 1:
        _divide_recurrent(module, Split(0, size, torch.device("meta")), _NoRanks(size))
        layout = state_layout_of(module, config)
    if not attends(config):
        return Share(None, 1, layout)
    return Share(heads // size, kv_heads // size, layout) if divided else Share(heads, kv_heads, layout)


def check_units(config: PreTrainedConfig, units: Mapping[str, int], *, size: int) -> None:
    """Raise ModelError if `size` ranks would tear apart what belongs together in weights that stay in 8-bit floats.

    units   by the names of these weights: rows and columns that belong together
    """
    if size == 1 or not units:
        return
    module: Any = skeleton(config, "float32")
    inner = {_in_layers(name.removesuffix(".weight")): unit for name, unit in units.items()}

    def torn(count: int) -> Iterator[str]:
        for name, segments, dim in _divided_linears(module):
            if (unit := inner.get(_in_layers(name))) is None:
                continue
            division = Split(count - 1, count, torch.device("meta")).division(dim, segments)
            if unit == ONE_BLOCK:
                wrong = [part for at in division.ranges for part in at if part % unit]
            else:
                wrong = [division.size] if division.size % unit else []
            if wrong:
                what = "columns" if dim else "rows"
                yield (
                    f"its {name} is stored in 8-bit floats, whose {what} belong together by {unit}, but of its "
                    f"{division.whole} {what}, each of {count} ranks would get {division.size}"
                )

    reason = next(torn(size), None)
    if reason is not None:
        allowed = ", ".join(str(count) for count in range(1, size) if size % count == 0 and not [*torn(count)])
        raise ModelError(f"{reason}: choose one of {allowed} ranks")


def _divided_linears(module: Any) -> Iterator[tuple[str, Segments, int]]:
    """Names of the Linears that ranks divide, with the segments of the dimension that they divide."""
    plan = plan_of(module)
    for name, part, style in _planned(module, plan):
        if isinstance(part, nn.Linear):
            dim = int(style not in OUTPUTS)
            yield name, _segments((part.out_features, part.in_features)[dim], style), dim
    names = {id(part): name for name, part in module.named_modules()}
    for part in stateful_modules(module).values():
        how = recurrent_division(part)
        for name, segments in how.rows.items():
            yield f"{names[id(part)]}.{name}", segments, 0
        for name in how.columns:
            linear: Any = getattr(part, name)
            yield f"{names[id(part)]}.{name}", ((linear.in_features, linear.in_features),), 1


def _segments(size: int, style: str) -> Segments:
    return ((size // 2, size // 2),) * 2 if style.startswith("packed") else ((size, size),)


def _in_layers(name: str) -> str:
    """A name without what checkpoints of other classes may have in front."""
    return name[max(name.find("layers."), 0) :]


def _check_divisible(sizes: Mapping[str, int], groups: Mapping[str, int], size: int) -> None:
    """Raise ModelError unless `size` ranks divide all numbers. Ranks may share a group: they divide its members."""

    def fits(number: int, count: int) -> bool:
        return number % count == 0 or count % number == 0

    wrong = [*((name, number) for name, number in sizes.items() if number % size)]
    wrong += [(name, number) for name, number in groups.items() if not fits(number, size)]
    for name, number in wrong:
        most = gcd(*sizes.values())
        counts = (count for count in range(1, most + 1) if most % count == 0)
        allowed = ", ".join(str(count) for count in counts if all(fits(group, count) for group in groups.values()))
        raise ModelError(f"its {name} is {number}, which {size} ranks cannot divide: choose one of {allowed} ranks")


@torch.no_grad()
def shard(module: Any, group: Group, *, device: torch.device) -> Mapping[str, Division]:
    """Replace the divided weights of a transformers model in place by this rank's share, on `device`. Other weights
    stay where they are. Returns how Linears were divided, by name.

    The module's forward then has the same result on all ranks, which must call it together. Linears stay plain Linears
    with fewer rows or columns. A tied output matrix is a view of the embedding's rows; after the module moves to
    another device, call `retie`. Each whole weight is released before the next weight is divided. Raises ModelError as
    `share_of`.
    """
    share = share_of(module.config, size=group.size)
    plan = plan_of(module)
    split = Split(group.rank, group.size, device)
    embedding, head = module.get_input_embeddings(), _head_name(module)
    divisions: dict[str, Division] = {}
    for name, part, style in list(_planned(module, plan)):
        if name == head and part.out_features % group.size:
            logger.info("the output matrix has %d rows, which %d ranks cannot divide", part.out_features, group.size)
            continue
        parent, _, last = name.rpartition(".")
        if style == ON_ONE_RANK:
            if group.rank:
                setattr(module.get_submodule(parent), last, nn.Parameter(torch.zeros_like(part), requires_grad=False))
            continue
        dim = int(style not in OUTPUTS)
        if hasattr(part, "weight"):
            size = (part.out_features, part.in_features)[dim]
            divisions[name] = division = split.division(dim, _segments(size, style))
            tied = embedding is not None and part.weight is embedding.weight
            changed = _divide_linear(part, style, split, division, group, tied=embedding if tied else None)
            setattr(module.get_submodule(parent), last, changed)
        else:
            dim = max(dim + part.dim() - 2, 0)
            size = part.shape[dim]
            division = split.division(dim, _segments(size, style))
            setattr(module.get_submodule(parent), last, split.part(part, division))
    divisions |= _divide_recurrent(module, split, group)
    for name, part in module.named_modules():
        if plan.get(generic(name)) in SUMMED:
            part.register_forward_hook(partial(sum_output, group))
    if share.num_heads is not None and share.num_heads != module.config.num_attention_heads:
        _set_head_counts(module, share)
    return divisions


def retie(module: Any) -> None:
    """Make a tied output matrix a view of the embedding's rows again, after a sharded module moved to a device."""
    for part in module.modules():
        if isinstance(part, Gathered) and part.tied:
            part.linear.weight = nn.Parameter(part.tied[0].weight.detach()[part.rows], requires_grad=False)


def rank_fingerprint(fingerprint: str, rank: int, size: int) -> str:
    """Fingerprint of one rank's share of the model with `fingerprint`. A rank's KV depends on `rank` and `size`, so
    both are hashed. If there is only one rank, its fingerprint is the model's.
    """
    if size == 1:
        return fingerprint
    return xxhash.xxh3_128(f"{fingerprint} tensor parallel {rank} of {size}".encode()).hexdigest()


def check_same(group: Group, fingerprint: str, device: torch.device) -> None:
    """Raise ModelError unless all ranks call this with the same fingerprint, 128 bits in hex."""
    own = torch.tensor([[int(fingerprint[at : at + 8], 16)] for at in range(0, 32, 8)], device=device)
    all_ranks = group.all_gather(own)
    others = [rank for rank in range(group.size) if not bool((all_ranks[:, rank] == all_ranks[:, 0]).all())]
    if others:
        raise ModelError(
            f"ranks {others} of {group.size} read other weights than rank 0, or another config: give all ranks the "
            "same model, dtype and max_model_len"
        )


class ShardCheck:
    """Compares a model's results before and after sharding. To save time, it runs only so many first layers that every
    kind of layer is included.

    The comparison is needed because transformers' plans are written for training. For example, a plan that divides the
    features of a norm would change results silently.
    """

    def __init__(self, module: Any) -> None:
        """Compute the logits of the whole model's first layers. The module must have transformers' eager attention."""
        self._count = _layers_of_all_kinds(module)
        self._whole = _first_logits(module, self._count)

    def check(self, module: Any) -> None:
        """Raise ModelError unless the sharded module computes the same logits up to rounding. All ranks call this
        together.
        """
        whole = self._whole
        difference = (_first_logits(module, self._count) - whole).square().mean(-1).sqrt()
        # The median, because rounding may send single tokens to different experts.
        error = (difference / (whole - whole.mean(-1, keepdim=True)).square().mean().sqrt()).median()
        bound = REPLAY_BOUNDS[str(module.dtype).removeprefix("torch.")]
        if not error <= bound:
            raise ModelError(
                f"transformers' tensor-parallel plan for {module.config.model_type} gives other logits than one rank: "
                f"most tokens differ by {error:.2g} of their spread or more, and rounding explains at most {bound}. "
                "Run this model on one rank"
            )


def _planned(module: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Every Linear and every parameter of experts that the plan divides, with its name and style. Layers with recurrent
    state are divided in another way, and may have the generic names of others.
    """
    recurrent = {id(inner) for part in stateful_modules(module).values() for inner in part.modules()}
    for name, part in module.named_modules():
        if id(part) in recurrent:
            continue
        style = plan.get(generic(name))
        if style is not None and style not in SUMMED:
            if type(part) not in (nn.Linear, Fp8Linear):
                raise ModelError(f"its {name} is a {type(part).__name__}, and only plain Linears can be divided")
            yield name, part, style
        for own, parameter in part.named_parameters(recurse=False):
            whole = f"{name}.{own}"
            if (style := plan.get(generic(whole))) is None:
                continue
            sinks = parameter.dim() == 1 and hasattr(part, "layer_idx")  # a value for each head
            if not sinks and (parameter.dim() < 2 or plan.get(generic(name)) not in SUMMED):
                raise ModelError(f"its plan divides {whole} {tuple(parameter.shape)}, but does not sum its outputs")
            yield whole, parameter, style


def _divided_size(name: str, part: Any, style: str) -> int:
    """Number of rows or columns that the style divides among the ranks."""
    shape = part.weight.shape if hasattr(part, "weight") else part.shape[-2:]
    size = int(shape[0] if style in OUTPUTS else shape[-1])
    if style.startswith("packed"):
        if size % 2:
            raise ModelError(f"its plan divides {name} as two matrices, but its size is {size}")
        return size // 2
    return size


def _divides_heads(module: Any, plan: Mapping[str, str]) -> bool:
    """Whether the plan divides attention heads over ranks; otherwise, each rank computes all heads. Raises ModelError
    if layers differ.
    """
    found = set()
    for name, part in attention_of(module):
        styles = {plan.get(generic(f"{name}.{own}")) for own, _ in part.named_children()}
        found.add("colwise" in styles and "rowwise" in styles)
    if not found and not attends(module.config):
        return False
    if len(found) != 1:
        raise ModelError(f"its plan divides the heads of {'some' if found else 'no known'} layers: run it on one rank")
    return found.pop()


def _head_name(module: Any) -> str | None:
    """Name of the output matrix."""
    head = module.get_output_embeddings()
    return next((name for name, part in module.named_modules() if part is head), None)


def _set_head_counts(module: Any, share: Share) -> None:
    for _, part in attention_of(module):
        for names, count in ((_QUERY_COUNTS, share.num_heads), (_KV_COUNTS, share.num_kv_heads)):
            for name in names:
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, count)


def _divide_linear(
    linear: Any, style: str, split: Split, division: Division, group: Group, *, tied: nn.Module | None
) -> nn.Module:
    """The module that replaces `linear`; `linear` itself is changed. `tied`: the embedding with the same weight."""
    if division.dim == 0:
        ((first, count),) = division.ranges[:1]
        rows = slice(first, first + count)
        _take_rows(linear, split, division, weight=None if tied is None else linear.weight.detach()[rows])
        return Gathered(linear, group, rows, tied) if OUTPUTS[style] else linear
    columns = division.ranges[0] if INPUTS[style] else None
    bias, linear.bias = linear.bias, None
    if isinstance(linear, Fp8Linear):
        linear.keep_only(division, split.device)
    else:
        linear.weight = split.part(linear.weight, division)
        linear.in_features = division.size
    return Reduced(linear, bias, group, None if columns is None else slice(columns[0], sum(columns)))


def _take_rows(linear: Any, split: Split, division: Division, *, weight: Tensor | None = None) -> None:
    """Reduce a Linear, or a convolution of single channels, to this rank's outputs. `weight`: use it as the weight."""
    if linear.bias is not None:
        linear.bias = split.part(linear.bias, division)
    if isinstance(linear, Fp8Linear):
        linear.keep_only(division, split.device)
        return
    linear.weight = split.part(linear.weight, division) if weight is None else nn.Parameter(weight, requires_grad=False)
    if isinstance(linear, nn.Linear):
        linear.out_features = division.size
    else:
        linear.in_channels = linear.out_channels = linear.groups = division.size


def _divide_recurrent(module: Any, split: Split, group: Group) -> dict[str, Division]:
    """Reduce the layers with recurrent state to this rank's heads. Returns how their Linears were divided."""
    divisions: dict[str, Division] = {}
    names = {id(part): name for name, part in module.named_modules()}
    for part in stateful_modules(module).values():
        how = recurrent_division(part)
        found: dict[str, Any] = {
            **dict(part.named_modules()),
            **dict(part.named_parameters()),
            **dict(part.named_buffers()),
        }
        for name, segments in how.rows.items():
            if (own := found.get(name)) is None:
                continue  # only some modules of the kind have it
            holder, last = part.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            weight: Any = own.weight if isinstance(own, nn.Module) else own
            division = split.division([*weight.shape].index(sum(size for size, _ in segments)), segments)
            if isinstance(own, nn.Module):
                _take_rows(own, split, division)
                divisions[f"{names[id(part)]}.{name}"] = division
            else:
                part_of_it = split.part(own, division)
                setattr(holder, last, part_of_it if isinstance(own, nn.Parameter) else part_of_it.data)
        for name in how.columns:
            linear: Any = getattr(part, name)
            size = linear.in_features
            divisions[f"{names[id(part)]}.{name}"] = division = split.division(1, ((size, size),))
            setattr(part, name, _divide_linear(linear, "rowwise", split, division, group, tied=None))
        for name, segments in how.sizes.items():
            if hasattr(part, name):
                setattr(part, name, split.division(0, segments).size)
        if how.norm:
            setattr(part, how.norm, GatheredNorm(getattr(part, how.norm), group))
    return divisions


class _NoRanks:
    """Stands for a group in a model without weights: its sums and gathered values have no meaning."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, values: Tensor) -> None:
        pass

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat([values] * self.size, dim=-1)

    def broadcast(self, values: Tensor) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def _layers_of_all_kinds(module: Any) -> int | None:
    """Smallest number of first layers that includes every kind of layer. None: all layers, because the model does not
    keep them in `base_model.layers`.
    """
    layers = getattr(module.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return None
    types = getattr(module.config, "layer_types", None) or [""] * len(layers)
    kinds = [(of_type, *map(type, layer.modules())) for of_type, layer in zip(types, layers, strict=True)]
    return 1 + max(kinds.index(kind) for kind in set(kinds))


@torch.inference_mode()
def _first_logits(module: Any, count: int | None) -> Tensor:
    """Logits after the first `count` layers, float32 `[25, vocab]` on the host; the same tokens in every process."""
    vocab = int(module.config.vocab_size)
    tokens = torch.randint(vocab, (_CHECKED_TOKENS,), generator=torch.Generator().manual_seed(0))
    layers: Any = getattr(module.base_model, "layers", None)
    try:
        if count is not None:
            module.base_model.layers = layers[:count]
        logits: Tensor = module(input_ids=tokens[None].to(module.device), use_cache=False).logits[0]
    finally:
        if count is not None:
            module.base_model.layers = layers
    return logits.float().cpu()
