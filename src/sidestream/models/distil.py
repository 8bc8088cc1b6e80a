"""Teach a head what its own model would say next: the model's distribution at each position is the target, one further
token a step.

Taught as it will draft: what it attends to is, of all but the tokens that it drafted itself, made of the model's own
hidden states (as Li et al. 2025 unroll it). On one device, on the calling thread. Knows nothing of engines, texts or
files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from sidestream.config import MOST_DRAFTS
from sidestream.device.kinds import on_gpu
from sidestream.errors import ConfigError
from sidestream.models.directory import check_config
from sidestream.models.loader import local_directory, naming_model, read_config, read_module
from sidestream.models.mtp import MtpHead
from sidestream.models.weights import check_files

# Positions whose logits are there at a time: a row of them is as wide as the vocabulary.
_PIECE = 2048
_WARM_UP = 0.05


@dataclass(frozen=True, slots=True)
class Lesson:
    """How a head is taught.

    steps          in all
    batch          sequences of a step
    drafts         tokens that it learns to draft one after another, each by its own hidden state of the one before
    fading         weight of each further one over the one before
    learning_rate  at its highest: it rises over the first 5 % of the steps and falls to nothing by the last, as a
                   cosine does
    seed           of the order of sequences, in 32 bits
    """

    steps: int
    batch: int = 16
    drafts: int = 4
    fading: float = 0.8
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "drafts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.drafts > MOST_DRAFTS:
            raise ConfigError(f"drafts is {self.drafts}: at most {MOST_DRAFTS} tokens are verified at once; lower it")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate is {self.learning_rate:g}: it must be more than 0, and finite")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed is {self.seed}: it must be in [0, {(1 << 32) - 1}]")


class Distillation:
    """A head being taught; `done` steps of the lesson are behind it.

    model    a transformers causal model, which stays as it is · head: its head, in float32
    tokens   int32 `[sequences, length]`, on the host
    """

    def __init__(self, model: Any, head: MtpHead, tokens: Tensor, lesson: Lesson) -> None:
        """Raises ConfigError when there are fewer sequences than a step takes."""
        if len(tokens) < lesson.batch:
            raise ConfigError(
                f"there are {len(tokens)} sequences, a step takes {lesson.batch}: give more text, or a smaller batch"
            )
        self.done = 0
        self._model = model.requires_grad_(False)
        self._head = head.train()
        self._tokens = tokens
        self._lesson = lesson
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=lesson.learning_rate, weight_decay=0.01)
        head.layer.self_attn.config._attn_implementation = _AS_IT_DRAFTS

    def step(self) -> float:
        """Learn from one batch; what it lacks of the model's own distributions, in nats a token."""
        lesson, device = self._lesson, self._head.join.weight.device
        for group in self._optimizer.param_groups:
            group["lr"] = lesson.learning_rate * self._share()
        tokens = self._tokens[self._chosen()].to(device, torch.int64)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu(device)):
            loss = self._loss(tokens)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        self.done += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """All that goes on from here needs, but model, tokens and lesson."""
        return {"done": self.done, "head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.done = state["done"]
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _share(self) -> float:
        """Of the highest learning rate."""
        warm = max(1, int(self._lesson.steps * _WARM_UP))
        if self.done < warm:
            return (self.done + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (self.done - warm) / max(1, self._lesson.steps - warm)))

    def _chosen(self) -> Tensor:
        """This step's sequences: each pass over all of them has an order of its own."""
        per_pass = len(self._tokens) // self._lesson.batch
        number, at = divmod(self.done, per_pass)
        order = torch.randperm(
            len(self._tokens), generator=torch.Generator().manual_seed(self._lesson.seed * 1_000_003 + number)
        )
        return order[at * self._lesson.batch : (at + 1) * self._lesson.batch]

    def _loss(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self._model.base_model(tokens, use_cache=False).last_hidden_state
        weight, weights = 1.0, 0.0
        total: Tensor = hidden.new_zeros((), dtype=torch.float32)
        for number, predicts in enumerate(unroll_drafts(self._head, tokens, hidden, self._lesson.drafts)):
            # The first positions of a further draft have nothing before them that was drafted.
            total = total + weight * self._distance(
                predicts[:, number:].flatten(0, 1), hidden[:, number:].flatten(0, 1)
            )
            weights += weight
            weight *= self._lesson.fading
        return total / weights

    def _distance(self, predicts: Tensor, hidden: Tensor) -> Tensor:
        """What the head's distributions lack of the model's, in the mean."""
        total: Tensor = Divergence.apply(predicts, hidden, self._model.get_output_embeddings())  # type: ignore[no-untyped-call]
        return total / len(predicts)


class Divergence(torch.autograd.Function):
    """The sum over positions of what one distribution lacks of another (Kullback and Leibler 1951), and its gradient,
    made piece by piece with it: so logits are computed once and kept for a piece at a time.
    """

    @staticmethod
    def forward(ctx: Any, predicts: Tensor, hidden: Tensor, matrix: nn.Linear) -> Tensor:
        """`predicts` and `hidden`, both `[N, hidden_size]`: what the one and the other is made of, by `matrix`. A
        number, float32.
        """
        gradient = torch.empty_like(predicts)
        total = predicts.new_zeros((), dtype=torch.float32)
        for part, left, into in zip(
            *(torch.split(tensor, _PIECE) for tensor in (predicts, hidden, gradient)), strict=True
        ):
            wanted: Tensor = matrix(left).float().log_softmax(-1)
            given: Tensor = matrix(part).float().log_softmax(-1)
            chances = wanted.exp()
            total += (chances * (wanted - given)).sum()
            into.copy_((given.exp() - chances).to(matrix.weight.dtype) @ matrix.weight)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *of: Tensor) -> tuple[Tensor, None, None]:
        """For `predicts` alone."""
        (gradient,) = ctx.saved_tensors
        return of[0] * gradient, None, None


def unroll_drafts(head: MtpHead, tokens: Tensor, hidden: Tensor, drafts: int) -> Iterator[Tensor]:
    """What predicts the token behind each position, `[N, T, hidden_size]`, if the last 0, 1, … `drafts - 1` tokens up
    to it were drafted, and right.

    tokens int64 `[N, T]` · hidden `[N, T, hidden_size]`: what the model's last layer left. In the n-th, the first n
    positions mean nothing.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    before, drafted = hidden, _Drafted()
    for _ in range(drafts):
        before = torch.cat([torch.zeros_like(before[:, :1]), before[:, :-1]], dim=1)
        predicts, before = head(tokens, before, positions, attention_mask=None, drafted=drafted)
        yield predicts


@dataclass(slots=True)
class _Drafted:
    """Keys and values, `[N, kv_heads, T, head_dim]` each, by how many tokens up to a position were drafted."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    drafted: _Drafted,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a head that drafts. At the n-th pass a position sees what is n and more before it as the model left
    it, and of those between the first as drafted once, the next as drafted twice, up to itself, drafted n times.
    """
    drafted.keys.append(key)
    drafted.values.append(value)
    number, length = len(drafted.keys) - 1, key.shape[2]
    grouped = query.view(len(query), key.shape[1], -1, *query.shape[2:])  # [N, kv_heads, heads of a group, T, head_dim]
    place = torch.arange(length, device=query.device)
    scores = [grouped @ drafted.keys[0][:, :, None].transpose(-1, -2)]
    visible = [place <= place[:, None] - number]
    for depth in range(1, number + 1):
        scores.append((grouped * _behind(drafted.keys[depth], number - depth)[:, :, None]).sum(-1, keepdim=True))
        visible.append(place[:, None] >= number - depth)
    joined = torch.cat(scores, dim=-1).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        joined = softcap * (joined / softcap).tanh()
    weights = joined.masked_fill(~torch.cat(visible, dim=-1), -torch.inf).softmax(-1).to(value.dtype)
    seen = weights[..., :length] @ drafted.values[0][:, :, None]
    for depth in range(1, number + 1):
        seen = (
            seen + weights[..., length + depth - 1, None] * _behind(drafted.values[depth], number - depth)[:, :, None]
        )
    return seen.flatten(1, 2).transpose(1, 2), None


def _behind(states: Tensor, count: int) -> Tensor:
    """`[N, kv_heads, T, head_dim]` with what was `count` positions before; zeros before the first."""
    return pad(states, (0, 0, count, 0))[:, :, : states.shape[2]] if count else states


_AS_IT_DRAFTS = "sidestream_as_it_drafts"
AttentionInterface.register(_AS_IT_DRAFTS, _attend)


def load_teacher(path_or_hub_id: str, *, device: torch.device) -> Any:
    """A transformers causal model to learn from: in its own dtype on a GPU, in float32 on a CPU. Raises ModelError."""
    directory = local_directory(path_or_hub_id)
    with naming_model(directory.name):
        check_config(directory)
        stored = check_files(directory)
        dtype = "auto" if on_gpu(device) else torch.float32
        config = read_config(directory)
        # torch's SDPA caps no scores, which transformers before 5.23 did not refuse.
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        return read_module(directory, config, stored, dtype=dtype, attention="eager" if capped else "sdpa").to(device)
