"""Trains a draft head (one decoder layer that predicts further tokens of a model) by distillation. At each position,
the target is the model's own distribution of the next token. A step has several passes, and each pass drafts one more
token.

Training matches drafting: the head attends to KV made from the model's hidden states, except at the positions of tokens
that the head has drafted (unrolled as in Li et al. 2025). Runs on one device, on the calling thread. Knows nothing
about engines, texts or files.
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
from sidestream.errors import ConfigError
from sidestream.models.directory import check_config, local_directory, name_of
from sidestream.models.loader import naming_model, read_config, read_module
from sidestream.models.mtp import MtpHead
from sidestream.models.weights import check_files
from sidestream_kv.device.kinds import on_gpu

# Number of positions whose logits are computed at once. It bounds memory: a position has a logit for every token.
_PIECE = 2048
_WARM_UP = 0.05


@dataclass(frozen=True, slots=True)
class Lesson:
    """The settings of a training run.

    steps          total number of steps
    batch          sequences per step
    drafts         number of consecutive tokens that the head learns to draft. For all except the first, the input is
                   the head's own hidden state for the previous token
    fading         loss weight of each draft relative to the previous draft
    learning_rate  peak of the learning rate: linear rise over the first 5 % of the steps, then cosine decay to zero
    seed           seed for the order of sequences, 32 bits
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
    """The training of a head; `done` is the number of completed steps.

    model    a transformers causal model, frozen
    head     the model's head, in float32
    tokens   int32 `[sequences, length]`, on the host
    """

    def __init__(self, model: Any, head: MtpHead, tokens: Tensor, lesson: Lesson) -> None:
        """Raises ConfigError if there are fewer sequences than a batch needs."""
        if len(tokens) < lesson.batch:
            raise ConfigError(
                f"there are {len(tokens)} sequences, but a step needs {lesson.batch}: give more text or a smaller batch"
            )
        self.done = 0
        self._model = model.requires_grad_(False)
        self._head = head.train()
        self._tokens = tokens
        self._lesson = lesson
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=lesson.learning_rate, weight_decay=0.01)
        head.layer.self_attn.config._attn_implementation = _AS_IT_DRAFTS

    def step(self) -> float:
        """Train on one batch; returns the mean KL divergence from the model's distributions, in nats per token."""
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
        """The state from which training can be resumed, without model, tokens and lesson."""
        return {"done": self.done, "head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`."""
        self.done = state["done"]
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _share(self) -> float:
        """The learning rate of this step as a fraction of the peak."""
        warm = max(1, int(self._lesson.steps * _WARM_UP))
        if self.done < warm:
            return (self.done + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (self.done - warm) / max(1, self._lesson.steps - warm)))

    def _chosen(self) -> Tensor:
        """This step's sequences; each pass over the data has a different order."""
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
            # The first `number` positions have too few tokens before them, so their predictions are meaningless.
            total = total + weight * self._distance(
                predicts[:, number:].flatten(0, 1), hidden[:, number:].flatten(0, 1)
            )
            weights += weight
            weight *= self._lesson.fading
        return total / weights

    def _distance(self, predicts: Tensor, hidden: Tensor) -> Tensor:
        """Mean KL divergence of the head's distributions from the model's."""
        total: Tensor = Divergence.apply(predicts, hidden, self._model.get_output_embeddings())  # type: ignore[no-untyped-call]
        return total / len(predicts)


class Divergence(torch.autograd.Function):
    """The sum over positions of the KL divergence (Kullback and Leibler 1951), and its gradient. Both are computed
    together for `_PIECE` positions at a time. So logits are computed only once, and never exist for all positions.
    """

    @staticmethod
    def forward(ctx: Any, predicts: Tensor, hidden: Tensor, matrix: nn.Linear) -> Tensor:
        """`predicts` and `hidden`, both `[N, hidden_size]`: hidden states of the head and of the model; `matrix` turns
        both into logits. Returns a float32 scalar.
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
        """The gradient with respect to `predicts` only."""
        (gradient,) = ctx.saved_tensors
        return of[0] * gradient, None, None


def unroll_drafts(head: MtpHead, tokens: Tensor, hidden: Tensor, drafts: int) -> Iterator[Tensor]:
    """For n = 0, 1, … `drafts - 1`: the hidden states `[N, T, hidden_size]` that predict the token after each position
    if the last n tokens up to the position were drafted correctly.

    tokens int64 `[N, T]` · hidden `[N, T, hidden_size]`: output of the model's last layer. In the n-th result, the
    first n positions are meaningless.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    before, drafted = hidden, _Drafted()
    for _ in range(drafts):
        before = torch.cat([torch.zeros_like(before[:, :1]), before[:, :-1]], dim=1)
        predicts, before = head(tokens, before, positions, attention_mask=None, drafted=drafted)
        yield predicts


@dataclass(slots=True)
class _Drafted:
    """Keys and values of all passes so far: entry n is from pass n, `[N, kv_heads, T, head_dim]`."""

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
    """Attention of a head in training. In pass n, a query reads the KV of pass 0, made from the model's hidden states,
    at positions that are n or more before it. At the nearer position n - d before it, it reads the KV of pass d. So it
    reads the KV of pass n at its own position.
    """
    drafted.keys.append(key)
    drafted.values.append(value)
    number, length = len(drafted.keys) - 1, key.shape[2]
    grouped = query.view(len(query), key.shape[1], -1, *query.shape[2:])  # [N, kv_heads, heads per group, T, head_dim]
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
    """`states` `[N, kv_heads, T, head_dim]`, shifted to later positions by `count`; the first positions are zeros."""
    return pad(states, (0, 0, count, 0))[:, :, : states.shape[2]] if count else states


_AS_IT_DRAFTS = "sidestream_as_it_drafts"
AttentionInterface.register(_AS_IT_DRAFTS, _attend)


def load_teacher(path_or_hub_id: str, *, device: torch.device) -> Any:
    """A transformers causal model as the teacher: in its own dtype on a GPU, in float32 on a CPU. Raises ModelError."""
    with naming_model(name_of(path_or_hub_id)):
        directory = local_directory(path_or_hub_id)
        check_config(directory)
        config = read_config(directory)
        stored = check_files(directory, getattr(config, "quantization_config", None))
        dtype = "auto" if on_gpu(device) else torch.float32
        # torch's SDPA cannot cap scores, and transformers before 5.23 did not refuse SDPA for models with a cap.
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        return read_module(directory, config, stored, dtype=dtype, attention="eager" if capped else "sdpa").to(device)
