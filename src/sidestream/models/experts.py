"""Mixtures of experts on a GPU: the choice of experts, their products, and the expert that all tokens share.

Routers and mixtures of transformers are changed only if their own code was seen to do the same with a few tokens.
Called while an engine is built, on every rank; knows nothing of batches.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from sidestream.models.joined import JoinedPart
from sidestream.ops import experts as ops
from sidestream_kv.device.kinds import on_gpu

logger = logging.getLogger(__name__)

EXPERTS = "sidestream"
"""Name under which transformers finds `experts_forward`."""
_GATE = "sidestream_gate"
_TOKENS = 64


def experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    shared: Sequence[Tensor] = (),
) -> Tensor:
    """What a module of experts in transformers computes, `[T, hidden]`; see `grouped_mm_experts_forward` there.

    shared   first and second weight of an expert that all tokens have, as those of one expert
    """
    if not (on_gpu(hidden_states.device) and vars(experts).get(_GATE)):
        elsewhere: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return elsewhere
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    weights = [getattr(experts, name) for name in names]
    biases = [getattr(experts, f"{name}_bias") for name in names] if experts.has_bias else []
    added: Tensor = mix(
        hidden_states.to(weights[0].dtype), top_k_index, top_k_weights, weights, biases, shared,
        vars(experts)[_GATE], not experts.is_concatenated, experts.is_transposed, None,
    )  # fmt: skip
    return added.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


@torch.library.custom_op("sidestream::mix", mutates_args=())
def mix(
    states: Tensor, chosen: Tensor, chosen_weights: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor],
    shared: Sequence[Tensor], gate: str, alternate: bool, transposed: bool, added: Tensor | None,
) -> Tensor:  # fmt: skip
    """The output of a mixture, `[T, hidden]`, or in the shape of `added`, plus that.

    weights   two of `[experts, outputs, inputs]`, or if they are transposed `[experts, inputs, outputs]`
    biases    two of `[experts, outputs]`, or none
    shared    two weights of an expert that all tokens have, or none
    """
    (first, second), (common, common_second) = (
        [weight if transposed else weight.mT for weight in given] if given else [None, None]
        for given in (weights, shared)
    )
    assert first is not None and second is not None
    first_bias, second_bias = biases or (None, None)
    by = ops.sort_by_expert(chosen.reshape(-1), len(first))
    inner = ops.multiply_by_expert(states, first, first_bias, common, by, chosen.shape[1], gate, alternate)
    products = ops.multiply_by_expert(inner, second, second_bias, common_second, by, 0)
    return ops.add_by_token(products, chosen_weights, by, added)


@mix.register_fake
def _(
    states: Tensor, chosen: Tensor, chosen_weights: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor],
    shared: Sequence[Tensor], gate: str, alternate: bool, transposed: bool, added: Tensor | None,
) -> Tensor:  # fmt: skip
    return torch.empty_like(states if added is None else added, memory_format=torch.contiguous_format)


@torch.library.custom_op("sidestream::largest_of_rows", mutates_args=())
def largest_of_rows(
    scores: Tensor, count: int, score: str = "", correction: Tensor | None = None, normalised: bool = False,
    scale: float = 1.0, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `sidestream.ops.experts.largest_of_rows`."""
    return ops.largest_of_rows(scores, count, score, correction, normalised, scale, dtype)


@largest_of_rows.register_fake
def _(
    scores: Tensor, count: int, score: str = "", correction: Tensor | None = None, normalised: bool = False,
    scale: float = 1.0, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (*scores.shape[:-1], count)
    return scores.new_empty(shape, dtype=dtype or scores.dtype), scores.new_empty(shape, dtype=torch.int64)


class ChoosingRouter(nn.Module):
    """A router of transformers whose scores, choice and weights are one kernel.

    how   arguments of `largest_of_rows` after the number of experts
    """

    how: tuple[Any, ...]

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, weights and numbers of the experts of each token."""
        part: Any = self
        states = hidden_states.reshape(-1, part.weight.shape[1]).to(part.weight.dtype)
        logits = linear(states, part.weight, getattr(part, "bias", None))
        return logits, *largest_of_rows(logits, part.top_k, *self.how)


class SharingMixture(nn.Module):
    """A mixture of transformers with an expert that all tokens have, which our kernels multiply with the others."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[1, T, hidden]` to the same."""
        part: Any = self
        _, weights, chosen = part.gate(hidden_states)
        shared = (part.shared_experts.gate_proj.weight, part.shared_experts.down_proj.weight)
        states = hidden_states.view(-1, hidden_states.shape[-1])
        return experts_forward(part.experts, states, chosen, weights, shared).view(hidden_states.shape)


@torch.no_grad()
def use_own_experts(module: nn.Module, dtype: torch.dtype) -> None:
    """Let the routers, the experts and the mixtures in `module`, a part of a model in `dtype`, use our kernels, where
    these compute the same. On a CPU, only experts change, and they use transformers' function.
    """
    parts: list[Any] = [*module.modules()]
    for part in parts:
        if hasattr(part, "_apply_gate") and hasattr(part, "is_transposed"):
            vars(part)[_GATE] = _gate_of(part)
            part.config._experts_implementation = EXPERTS
    routers = [part for part in parts if hasattr(part, "top_k") and isinstance(getattr(part, "weight", None), Tensor)]
    mixtures = [part for part in parts if hasattr(part, "experts") and hasattr(part, "shared_experts")]
    chosen, shared = (
        sum(change(part, dtype) for part in found) for change, found in ((_choose, routers), (_share, mixtures))
    )
    if routers:
        logger.info(
            "%d of %d routers are one kernel; %d of %d shared experts are multiplied with the others",
            *(chosen, len(routers), shared, len(mixtures)),
        )


def _gate_of(experts: Any) -> str:
    """The activation of `experts`; empty: our kernels do not have it."""
    products = torch.randn(_TOKENS, 8, generator=torch.Generator().manual_seed(0)) * 10
    alternating = products[:, ::2], products[:, 1::2]
    inputs = products.chunk(2, -1) if experts.is_concatenated else alternating
    try:
        expected = experts._apply_gate(products) if experts.has_gate else experts.act_fn(products)
    except Exception:  # the code of a kind of experts may need anything else, and raise anything
        return ""
    for name, gate in ops.GATES.items():
        found = gate(*inputs) if experts.has_gate else gate(products, products)
        if experts.has_gate == (name != "relu2") and torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            return name
    return ""


def _random(part: Any, dtype: torch.dtype, *shape: int) -> Tensor:
    draws = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return draws.to(next(part.parameters()).device, dtype)


def _choose(part: Any, dtype: torch.dtype) -> bool:
    """Let `part` be a `ChoosingRouter`, if that chooses the same; returns whether it does."""
    weight = part.weight
    # Few tokens may not show that some groups of experts are left out.
    grouped = getattr(part, "num_group", None) not in (None, 1)
    if grouped or weight.dim() != 2 or not on_gpu(weight.device) or isinstance(part, ChoosingRouter):
        return False
    hidden = _random(part, dtype, _TOKENS, weight.shape[1])
    try:
        logits, weights, chosen = part(hidden)
        bias, top_k = getattr(part, "bias", None), chosen.shape[1]
        states, own = hidden.to(logits.dtype), weight.to(logits.dtype)
        same = chosen.dtype == torch.int64 and top_k == part.top_k and torch.equal(linear(states, own, bias), logits)
        if not same or len(weight) > ops.MOST_SCORES or top_k > ops.MOST_LARGEST:
            return False
        correction, scale = (getattr(part, name, None) for name in ("e_score_correction_bias", "routed_scaling_factor"))
        for how in product(("softmax", "sigmoid"), (correction,), (False, True), (scale or 1.0,), (weights.dtype,)):
            if _alike(largest_of_rows(logits, top_k, *how), (weights, chosen), logits):
                part.__class__, part.how = _changed(ChoosingRouter, part.__class__), how
                part.weight.data = own  # else it would be converted in each step
                return True
    except Exception:  # as above
        pass
    return False


def _alike(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], logits: Tensor) -> bool:
    """Whether two choices are the same but for their order and equal logits."""
    (weights, logits_of), (expected_weights, expected_logits) = (
        (values.float().sort(-1).values, logits.gather(-1, chosen).sort(-1).values)
        for values, chosen in (found, expected)
    )
    close = torch.allclose(weights, expected_weights, rtol=max(1e-5, 1.5 * torch.finfo(found[0].dtype).eps), atol=0)
    return close and torch.equal(logits_of, expected_logits)


def _share(part: Any, dtype: torch.dtype) -> bool:
    """Let `part` be a `SharingMixture`, if that computes the same; returns whether it does."""
    experts, shared = part.experts, part.shared_experts
    gate = vars(experts).get(_GATE)
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in part.modules())
    if not gate or hooked or isinstance(part, SharingMixture) or not _fits(shared, experts):
        return False
    hidden = _random(part, dtype, 1, _TOKENS, experts.down_proj.shape[1])
    answer, common = (_random(part, dtype, _TOKENS, hidden.shape[2] + more)[:, more:] for more in (0, 1))
    calls: dict[type, tuple[Tensor, ...]] = {}
    try:
        separate = shared.down_proj(ops.GATES[gate](shared.gate_proj(hidden), shared.up_proj(hidden)))
        same = torch.equal(separate, shared(hidden))
        _, weights, chosen = part.gate(hidden)
        with _answering(experts, answer, calls), _answering(shared, common[None], calls):
            same = same and torch.equal(part(hidden), (answer + common)[None])
        expected = (hidden[0], chosen, weights, hidden)
        same = same and all(map(torch.equal, (*calls[type(experts)], *calls[type(shared)]), expected))
    except Exception:  # as above
        return False
    if same:
        part.__class__ = _changed(SharingMixture, part.__class__)
    return same


def _fits(shared: Any, experts: Any) -> bool:
    """Whether the weights of `shared` are laid out as those of one of the `experts`."""
    gate, up, down = (getattr(shared, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (type(gate) is type(up) is JoinedPart and type(down) is nn.Linear and gate.weight is up.weight):
        return False
    pairs = ((gate.weight, experts.gate_up_proj), (down.weight, experts.down_proj))
    plain = experts.is_concatenated and not experts.has_bias and not experts.is_transposed
    alike = all(
        (own.shape, own.stride(), own.dtype, own.device) == (one.shape, one.stride(), one.dtype, one.device)
        for own, one in ((own, weights[0]) for own, weights in pairs)
    )
    return plain and gate.bias is None and down.bias is None and alike and on_gpu(down.weight.device)


@contextmanager
def _answering(part: Any, answer: Tensor, calls: dict[type, tuple[Tensor, ...]]) -> Iterator[None]:
    """Lets `part` return `answer` and keep its arguments in `calls`."""

    def forward(*given: Tensor) -> Tensor:
        calls[type(part)] = given
        return answer

    part.forward = forward
    try:
        yield
    finally:
        del part.forward


@functools.cache
def _changed(new: type, own: type) -> type:
    return type(f"{new.__name__}{own.__name__}", (new, own), {"__module__": own.__module__})
