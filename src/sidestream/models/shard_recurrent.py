"""How layers with recurrent state are divided over ranks: by heads, or by channels, and each rank has their state.
Transformers' plans leave these layers whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sidestream.errors import ModelError
from sidestream.models.divided import Segments


@dataclass(frozen=True, slots=True)
class RecurrentDivision:
    """How one module with recurrent state is divided.

    heads    numbers that the ranks must divide, by the name of the module's attribute
    groups   numbers of groups of heads, which ranks divide or share
    rows     segments of a dimension of weights, by name; Linears and convolutions: of their outputs
    columns  Linears whose inputs are divided, and whose outputs are summed
    sizes    segments of what an attribute of the module counts
    norm     a norm over all heads, or empty
    """

    heads: Mapping[str, int]
    rows: Mapping[str, Segments]
    columns: tuple[str, ...]
    groups: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, Segments] = field(default_factory=dict)
    norm: str = ""


def recurrent_division(part: Any) -> RecurrentDivision:
    """How a module with recurrent state is divided. Raises ModelError for a kind that is not known."""
    names = {name for name, _ in part.named_modules()} | {name for name, _ in part.named_parameters()}
    for needed, how in _KINDS:
        if names.issuperset(needed.split()):
            return how(part, names)
    raise ModelError(
        f"its {type(part).__name__} keeps recurrent state of a kind that is not divided over ranks: run it on one rank"
    )


def _mamba_2(part: Any, names: set[str]) -> RecurrentDivision:
    """Mamba 2: heads of `intermediate_size`, which share the inputs B and C of their group."""
    inner, heads = (part.intermediate_size, part.num_heads), (part.num_heads, part.num_heads)
    group = (part.n_groups * part.ssm_state_size, part.n_groups)
    whole = (inner, inner, group, group, heads)
    weight = getattr(getattr(part, "norm", None), "weight", None)
    return RecurrentDivision(
        heads={"num_heads": part.num_heads},
        groups={"n_groups": part.n_groups},
        rows={
            "in_proj": whole,
            "mup_vector": whole,
            "conv1d": (inner, group, group),
            **dict.fromkeys(("dt_bias", "A_log", "D"), (heads,)),
        },
        columns=("out_proj",),
        sizes={
            "num_heads": (heads,),
            "intermediate_size": (inner,),
            "n_groups": ((part.n_groups, part.n_groups),),
            "groups_time_state_size": (group,),
            "conv_dim": (inner, group, group),
        },
        norm="norm" if weight is not None and len(weight) == part.intermediate_size else "",
    )


def _mamba_1(part: Any, names: set[str]) -> RecurrentDivision:
    """Mamba 1: channels. What they share is the sum of all of them."""
    inner = (part.intermediate_size, part.intermediate_size)
    return RecurrentDivision(
        heads={"intermediate_size": part.intermediate_size},
        rows={"in_proj": (inner, inner), **dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), (inner,))},
        columns=("x_proj", "out_proj"),
        sizes={"intermediate_size": (inner,)},
    )


def _gated_delta(part: Any, names: set[str]) -> RecurrentDivision:
    """The gated delta rule of Qwen and OLMo: heads of keys, each with as many heads of values."""
    key, value = (part.key_dim, part.num_k_heads), (part.value_dim, part.num_v_heads)
    heads = (part.num_v_heads, part.num_v_heads)
    return RecurrentDivision(
        heads={"num_k_heads": part.num_k_heads},
        rows={
            "in_proj_qkvz": ((2 * part.key_dim + 2 * part.value_dim, part.num_k_heads),),
            "in_proj_ba": ((2 * part.num_v_heads, part.num_k_heads),),
            **dict.fromkeys(("in_proj_qkv", "conv1d"), (key, key, value)),
            **dict.fromkeys(("q_proj", "k_proj"), (key,)),
            **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (value,)),
            **dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj", "dt_bias", "A_log"), (heads,)),
        },
        columns=("out_proj",) if "out_proj" in names else ("o_proj",),
        sizes={
            "num_k_heads": ((part.num_k_heads, part.num_k_heads),),
            "num_v_heads": (heads,),
            "key_dim": (key,),
            "value_dim": (value,),
            "conv_dim": (key, key, value),
        },
    )


def _kimi_delta(part: Any, names: set[str]) -> RecurrentDivision:
    """Kimi's delta rule: heads, whose decay has a value for each channel."""
    inner, heads = (part.qkv_dim, part.num_heads), (part.num_heads, part.num_heads)
    return RecurrentDivision(
        heads={"num_heads": part.num_heads},
        rows={
            "conv1d": (inner, inner, inner),
            **dict.fromkeys(
                ("q_proj", "k_proj", "v_proj", "g_b_proj", "forget_gate.f_b_proj", "forget_gate.dt_bias"), (inner,)
            ),
            **dict.fromkeys(("b_proj", "forget_gate.A_log"), (heads,)),
        },
        columns=("o_proj",),
        sizes={"num_heads": (heads,), "qkv_dim": (inner,), "conv_dim": (inner, inner, inner)},
    )


def _short_convolution(part: Any, names: set[str]) -> RecurrentDivision:
    """LFM2's convolution: channels, between two gates of their own."""
    channels = part.conv.out_channels
    return RecurrentDivision(
        heads={"conv.out_channels": channels},
        rows={"in_proj": ((channels, channels),) * 3, "conv": ((channels, channels),)},
        columns=("out_proj",),
    )


# The modules and weights by which a kind is recognised.
_KINDS = (
    ("in_proj conv1d x_proj dt_proj out_proj A_log D", _mamba_1),
    ("in_proj conv1d out_proj A_log D dt_bias", _mamba_2),
    ("conv1d forget_gate.f_b_proj g_b_proj b_proj o_proj", _kimi_delta),
    ("conv1d in_proj_qkvz in_proj_ba out_proj A_log dt_bias", _gated_delta),
    ("conv1d in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj A_log dt_bias", _gated_delta),
    ("conv1d q_proj k_proj v_proj a_proj b_proj g_proj o_proj A_log dt_bias", _gated_delta),
    ("in_proj conv out_proj", _short_convolution),
)
