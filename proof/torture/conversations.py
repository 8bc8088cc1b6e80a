"""The prompts and the right answers of the torture test of ranks: conversations with a tiny model.

Transformers computes them on the CPU in float32, without Sidestream's engine, KV pool or kernels. A user's turn has
random tokens, an answer has the likeliest tokens. So each prefix of a conversation that ends inside an answer is a
prompt, and the rest of that answer is its right continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from sidestream.models.loader import quiet_transformers

TURNS = ((112, 24), (40, 24), (56, 24))
"""Tokens of the user and of the answer, in each turn."""
LENGTH = sum(user + answer for user, answer in TURNS)
"""Tokens of a conversation."""
# So many neighbouring conversations share the tokens of the first turn, of the second turn, and so on.
_SHARING = (4, 2, 1)
_USER_TOKENS = 256  # byte tokens; the special tokens follow


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation.

    logprobs   log-probability of each token; of the first token, 0
    ends       by position: end of the answer's tokens that follow from here. It is the position itself if its token is
               a user's, or if a second token is nearly as likely
    starts     positions whose `ends` are higher: lengths of prompts with a certain next token
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ends: tuple[int, ...]
    starts: tuple[int, ...]


def hold_conversations(model: Path, count: int, *, seed: int, margin: float) -> list[Conversation]:
    """Compute `count` conversations. Neighbours share their first turns.

    model    a directory of transformers; its weights are read in float32
    margin   smallest distance of the two largest log-probabilities of a token that counts as certain. Rounding
             differences below half of it cannot change such a token
    """
    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    with torch.inference_mode():
        tokens = _talk(module, count, torch.Generator().manual_seed(seed))
        logprobs = module(tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)  # of the tokens from 1 on
    likeliest, ids = logprobs.topk(2, -1)
    answered = torch.tensor([turn > 0 for user, answer in TURNS for turn in (0,) * user + (1,) * answer])
    certain = (
        answered[1:] & (ids[..., 0] == tokens[:, 1:]) & (likeliest[..., 0] - likeliest[..., 1] >= margin)
    ).tolist()
    return [
        _conversation(row, [0.0, *values], [False, *known])
        for row, values, known in zip(tokens.tolist(), likeliest[..., 0].tolist(), certain, strict=True)
    ]


def _talk(module: torch.nn.Module, count: int, generator: torch.Generator) -> Tensor:
    """The tokens of all conversations, `[count, LENGTH]`."""
    cache, turns = DynamicCache(), []
    for (num_user, num_answer), sharing in zip(TURNS, _SHARING, strict=True):
        drawn = torch.randint(_USER_TOKENS, (-(-count // sharing), num_user), generator=generator)
        given = drawn.repeat_interleave(sharing, 0)[:count]
        turns.append(given)
        for _ in range(num_answer):
            logits = module(given, past_key_values=cache, use_cache=True).logits[:, -1]
            given = logits.argmax(-1, keepdim=True)
            turns.append(given)
        module(given, past_key_values=cache, use_cache=True)
    return torch.cat(turns, 1)


def _conversation(tokens: Sequence[int], logprobs: Sequence[float], certain: Sequence[bool]) -> Conversation:
    ends = list(range(len(tokens)))
    for at in reversed(range(len(tokens))):
        if certain[at]:
            ends[at] = ends[at + 1] if at + 1 < len(tokens) else at + 1
            ends[at] = max(ends[at], at + 1)
    starts = tuple(at for at, end in enumerate(ends) if end > at)
    return Conversation(tuple(tokens), tuple(logprobs), tuple(ends), starts)
