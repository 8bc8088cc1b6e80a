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
from sidestream.models.recurrent import skeleton
from sidestream.models.self_check import REPLAY_BOUNDS
from sidestream_kv.device.group import Group

logger = logging.getLogger(__name__)

# Styles of transformers' plans that divide the outputs of a Linear (True: the outputs of all ranks are gathered), and
# styles that divide its inputs (True: the input is whole, and each rank takes its range).
_OUTPUTS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True, "packed_colwise": False}
_INPUTS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True, "packed_rowwise": False}
# Styles that change gradients only, and styles of parts that stay whole on every rank.
_WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj"}
_SUMMED = {"moe_tp_experts", "all_reduce"}
_STYLES = (*_OUTPUTS, *_INPUTS, *sorted(_WHOLE | _SUMMED))
# Names of attributes in which attention modules keep their numbers of heads.
_QUERY_COUNTS, _KV_COUNTS = ("num_heads", "num_attention_heads"), ("num_key_value_heads", "num_kv_heads")
_CHECKED_TOKENS = 25


@dataclass(frozen=True, slots=True)
class Share:
    """Heads in the attention of one rank.

    num_heads      query heads
    num_kv_heads   heads of keys and values; all heads of the model if its plan does not divide attention
    """

    num_heads: int
    num_kv_heads: int


def share_of(config: PreTrainedConfig, *, size: int) -> Share:
    """The attention heads of each of `size` ranks; reads no weights.

    Raises ModelError when transformers has no plan for the model, when the plan has a style that is not supported, or
    when `size` does not divide its heads and features.
    """
    module: Any = skeleton(config, "float32")
    plan = _plan(module)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    divided = _divides_heads(module, plan)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads} if divided else {}
    for name, part, style in _planned(module, plan):
        sizes.setdefault(f"the size of {_generic(name)}", _divided_size(name, part, style))
    if (head := _head_name(module)) is not None:
        sizes.pop(f"the size of {head}", None)  # the output matrix stays whole if it cannot be divided
    for name, number in sizes.items():
        if number % size:
            most = gcd(*sizes.values())
            allowed = ", ".join(str(count) for count in range(1, most + 1) if most % count == 0)
            raise ModelError(f"its {name} is {number}, which {size} ranks cannot divide: choose one of {allowed} ranks")
    return Share(heads // size, kv_heads // size) if divided else Share(heads, kv_heads)


@torch.no_grad()
def shard(module: Any, group: Group, *, device: torch.device) -> None:
    """Replace the divided weights of a transformers model in place by this rank's share, on `device`. Other weights
    stay where they are.

    The module's forward then has the same result on all ranks, which must call it together. Linears stay plain Linears
    with fewer rows or columns. A tied output matrix is a view of the embedding's rows; after the module moves to
    another device, call `retie`. Each whole weight is released before the next weight is divided. Raises ModelError as
    `share_of`.
    """
    share = share_of(module.config, size=group.size)
    plan = _plan(module)
    split = _Split(group.rank, group.size, device)
    embedding, head = module.get_input_embeddings(), _head_name(module)
    for name, part, style in list(_planned(module, plan)):
        if name == head and part.out_features % group.size:
            logger.info("the output matrix has %d rows, which %d ranks cannot divide", part.out_features, group.size)
        elif isinstance(part, nn.Linear):
            tied = embedding is not None and part.weight is embedding.weight
            changed = _divide_linear(part, style, split, group, tied=embedding if tied else None)
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, changed)
        else:
            parent, _, last = name.rpartition(".")
            sliced = (split.rows if style in _OUTPUTS else split.columns)(part, packed=style.startswith("packed"))
            setattr(module.get_submodule(parent), last, nn.Parameter(sliced, requires_grad=False))
    for name, part in module.named_modules():
        if plan.get(_generic(name)) in _SUMMED:
            part.register_forward_hook(partial(_sum_output, group))
    if share.num_heads != module.config.num_attention_heads:
        _set_head_counts(module, share)


def retie(module: Any) -> None:
    """Make a tied output matrix a view of the embedding's rows again, after a sharded module moved to a device."""
    for part in module.modules():
        if isinstance(part, _Gathered) and part.tied:
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


def _plan(module: Any) -> Mapping[str, str]:
    """The styles of the model's parts by generic name. Raises ModelError."""
    kind = module.config.model_type
    plan = {name: style for name, style in (module.tp_plan or {}).items() if style not in _WHOLE}
    if not any("layers.*." in name for name in plan):
        raise ModelError(
            f"transformers has no tensor-parallel plan for the layers of {kind}: run this model on one rank"
        )
    names = {_generic(name) for name, _ in (*module.named_modules(), *module.named_parameters())}
    for name, style in plan.items():
        if name in names and style not in _STYLES:
            raise ModelError(
                f"transformers' tensor-parallel plan for {kind} has the style {style} for {name}, and only "
                f"{', '.join(_STYLES)} are supported: run this model on one rank"
            )
    return plan


def _planned(module: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Every Linear and every parameter of experts that the plan divides, with its name and style."""
    for name, part in module.named_modules():
        style = plan.get(_generic(name))
        if style is not None and style not in _SUMMED:
            if type(part) is not nn.Linear:
                raise ModelError(f"its {name} is a {type(part).__name__}, and only plain Linears can be divided")
            yield name, part, style
        for own, parameter in part.named_parameters(recurse=False):
            whole = f"{name}.{own}"
            if (style := plan.get(_generic(whole))) is None:
                continue
            if parameter.dim() < 2 or plan.get(_generic(name)) not in _SUMMED:
                raise ModelError(f"its plan divides {whole} {tuple(parameter.shape)}, but does not sum its outputs")
            yield whole, parameter, style


def _divided_size(name: str, part: Any, style: str) -> int:
    """Number of rows or columns that the style divides among the ranks."""
    rows, columns = part.weight.shape if isinstance(part, nn.Linear) else part.shape[-2:]
    size = int(rows if style in _OUTPUTS else columns)
    if style.startswith("packed"):
        if size % 2:
            raise ModelError(f"its plan divides {name} as two matrices, but its size is {size}")
        return size // 2
    return size


def _generic(name: str) -> str:
    """A name as plans have it: `model.layers.*.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _attention(module: Any) -> list[tuple[str, Any]]:
    return [
        (name, part)
        for name, part in module.named_modules()
        if hasattr(part, "layer_idx") and hasattr(part, "is_causal")
    ]


def _divides_heads(module: Any, plan: Mapping[str, str]) -> bool:
    """Whether the plan divides attention heads over ranks; otherwise, each rank computes all heads. Raises ModelError
    if layers differ.
    """
    found = set()
    for name, part in _attention(module):
        styles = {plan.get(_generic(f"{name}.{own}")) for own, _ in part.named_children()}
        found.add("colwise" in styles and "rowwise" in styles)
    if len(found) != 1:
        raise ModelError(f"its plan divides the heads of {'some' if found else 'no known'} layers: run it on one rank")
    return found.pop()


def _head_name(module: Any) -> str | None:
    """Name of the output matrix."""
    head = module.get_output_embeddings()
    return next((name for name, part in module.named_modules() if part is head), None)


def _set_head_counts(module: Any, share: Share) -> None:
    for _, part in _attention(module):
        for names, count in ((_QUERY_COUNTS, share.num_heads), (_KV_COUNTS, share.num_kv_heads)):
            for name in names:
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, count)


@dataclass(frozen=True, slots=True)
class _Split:
    """This rank's part of whole tensors, as new tensors on the device."""

    rank: int
    size: int
    device: torch.device

    def range_of(self, whole: int) -> slice:
        part = whole // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def rows(self, whole: Tensor, *, packed: bool = False) -> Tensor:
        """This rank's part of the rows: the last dimension but one, or the only dimension of a bias. `packed`: the
        tensor is two matrices, and this rank takes a part of each.
        """
        return self._part(whole, max(whole.dim() - 2, 0), packed)

    def columns(self, whole: Tensor, *, packed: bool = False) -> Tensor:
        """This rank's part of the columns, the last dimension. `packed`: as in `rows`."""
        return self._part(whole, whole.dim() - 1, packed)

    def _part(self, whole: Tensor, dim: int, packed: bool) -> Tensor:
        halves = whole.detach().chunk(2, dim) if packed else (whole.detach(),)
        parts = []
        for half in halves:
            own = self.range_of(half.shape[dim])
            parts.append(half.narrow(dim, own.start, own.stop - own.start))
        return torch.cat(parts, dim).to(self.device)  # cat copies, so the whole can be released


def _divide_linear(linear: Any, style: str, split: _Split, group: Group, *, tied: nn.Module | None) -> nn.Module:
    """The module that replaces `linear`; `linear` itself is changed. `tied`: the embedding with the same weight."""
    packed = style.startswith("packed")
    if style in _OUTPUTS:
        rows = split.range_of(linear.out_features)
        weight = split.rows(linear.weight, packed=packed) if tied is None else linear.weight.detach()[rows]
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if linear.bias is not None:
            linear.bias = nn.Parameter(split.rows(linear.bias, packed=packed), requires_grad=False)
        linear.out_features = weight.shape[0]
        return _Gathered(linear, group, rows, tied) if _OUTPUTS[style] else linear
    columns = split.range_of(linear.in_features) if _INPUTS[style] else None
    bias, linear.bias = linear.bias, None
    linear.weight = nn.Parameter(split.columns(linear.weight, packed=packed), requires_grad=False)
    linear.in_features = linear.weight.shape[1]
    return _Reduced(linear, bias, group, columns)


class _Reduced(nn.Module):
    """A projection whose columns are divided; the products of all ranks are summed.

    columns   this rank's range of a whole input; None: the input is only this rank's part
    """

    def __init__(self, linear: nn.Linear, bias: nn.Parameter | None, group: Group, columns: slice | None) -> None:
        super().__init__()
        self.linear, self.bias = linear, bias
        self._group, self._columns = group, columns

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product: Tensor = self.linear(states if self._columns is None else states[..., self._columns])
        _all_reduce(self._group, product)
        return product if self.bias is None else product + self.bias


class _Gathered(nn.Module):
    """A projection whose rows are divided; the outputs of all ranks are gathered.

    rows   this rank's range of rows
    tied   the embedding, if this weight is a view of its weight; in a tuple, so that torch does not see a submodule
    """

    def __init__(self, linear: nn.Linear, group: Group, rows: slice, tied: nn.Module | None) -> None:
        super().__init__()
        self.linear = linear
        self.rows = rows
        self.tied: tuple[Any, ...] = () if tied is None else (tied,)
        self._group = group

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]` of all ranks."""
        gathered: Tensor = _all_gather(self._group, self.linear(states))
        return gathered


def _sum_output(group: Group, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    output = output.contiguous()
    _all_reduce(group, output)
    return output


# Excluded from compilation: the compiler does not know that all ranks must make these calls together.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _all_reduce(group: Group, values: Tensor) -> None:
    group.all_reduce(values)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _all_gather(group: Group, values: Tensor) -> Tensor:
    return group.all_gather(values)


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
