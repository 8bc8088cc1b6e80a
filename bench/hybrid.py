"""Models with recurrent state on a CPU: whether tokens are equal with KV from each tier, and the share of a
conversation's prompt tokens that come from the cache.

The models are tiny and have random weights in float32, one model for each kind of recurrent layer. The prompts share
prefixes of random length. First, an engine without a prefix cache answers each prompt. Then engines answer it with KV
from the device, from host memory, from disk (in a new engine), and in a pool so small that requests are preempted; each
of these also with drafts. A case is one of these later answers; a difference is an answer whose tokens differ from the
first answer's.

Log-probabilities are compared with those of transformers in float32 (the largest distance), and both with those of
transformers in float64 (the root mean square of the errors).
"""

from __future__ import annotations

import contextlib
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proof.report import Figure, at_least, at_most
from sidestream_kv.device.kinds import CPU

if TYPE_CHECKING:  # importing torch takes seconds
    from sidestream.llm import LLM, RequestOutput
    from sidestream_kv.kv.pool import Lease

_SEED = 1
_WAVE = 20
_VOCAB = 250
_SHARED = 64
_OUTPUTS = 12
_DRAFTS = 3
_WAYS = 8  # answers to each prompt that are compared with the first answer
# Tokens of the conversations: two users with the same system prompt take turns.
_SYSTEM = 6000
_TURNS = 30
_TURN = 40
_ANSWER = 24
# Conversations that share host memory: it has room for their KV and for two states of each.
_TALKS = 8
_SHORT_TURNS = 12
_SHORT = 12
_SMALL_BLOCK = 4


def measure(
    families: Sequence[str], *, num_prompts: int, turns: int, system_tokens: int, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Numbers of cases and differences of all `families`, and the share of cached prompt tokens in a conversation of
    `turns` turns.
    """
    from proof.tiny_models import tiny_model_dir

    cases = differences = 0
    wrong_bytes = 0
    found: dict[str, int] = {}
    distance, errors = 0.0, list[tuple[float, float]]()
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        for family in families:
            model = tiny_model_dir(family, Path(scratch) / family, _SEED)
            rng = random.Random(_SEED)
            trunk = _tokens(rng, _SHARED)
            for wave in range(0, num_prompts, _WAVE):
                on_progress(f"{family}: prompt {wave} of {num_prompts}")
                count = min(_WAVE, num_prompts - wave)
                prompts = _prompts(rng, trunk, count)
                expected = _cold(model, prompts)
                for drafts in (0, _DRAFTS):
                    for where, answers in _again(model, prompts, Path(scratch) / f"{family}-{wave}-{drafts}", drafts):
                        cases += len(answers)
                        differences += sum(
                            answer.token_ids != right for answer, right in zip(answers, expected, strict=True)
                        )
                        reused = sum(answer.cached.by_tier.get(where, 0) for answer in answers)
                        found[where] = found.get(where, 0) + reused
            wrong_bytes += _state_bytes_error(model)
            drawn, own, exact = logprobs(model, _prompts(random.Random(_SEED), trunk, _WAVE))
            distance = max(distance, _largest(drawn, own))
            errors.append((_root_mean_square(drawn, exact), _root_mean_square(own, exact)))
        on_progress(f"{turns} turns")
        shares = [
            _reused(
                tiny_model_dir(family, Path(scratch) / f"talk-{family}", _SEED, max_position_embeddings=32768),
                turns,
                system_tokens,
            )
            for family in (families[0], "qwen3")
        ]
        on_progress("little memory")
        kept = _reused_in_little_memory(tiny_model_dir(families[0], Path(scratch) / families[0], _SEED))
    return [
        Figure("hybrid_cases", cases, "answers", at_least(200 * _WAYS * len(families)) if num_prompts >= 200 else None),
        Figure("hybrid_differences", differences, "answers", at_most(0)),
        *(Figure(f"hybrid_found_{where}", tokens, "tokens") for where, tokens in sorted(found.items())),
        Figure("hybrid_reused_share", shares[0] / shares[1], "ratio", at_least(0.95)),
        Figure("hybrid_reused_of_prompts", shares[0], "share"),
        Figure("attention_reused_of_prompts", shares[1], "share"),
        Figure("hybrid_reused_in_little_memory", kept, "ratio", at_least(0.9)),
        Figure("hybrid_logprob_distance", 1e6 * distance, "micronats", at_most(10)),
        Figure("hybrid_logprob_error", 1e6 * max(ours for ours, _ in errors), "micronats"),
        Figure("transformers_logprob_error", 1e6 * max(theirs for _, theirs in errors), "micronats"),
        Figure(
            "hybrid_logprob_error_over_transformers",
            max(ours / theirs for ours, theirs in errors),
            "ratio",
            at_most(1.25) if num_prompts >= 200 else None,
        ),
        Figure("state_bytes_error", wrong_bytes, "bytes", at_most(0)),
    ]


def _prompts(rng: random.Random, trunk: Sequence[int], count: int) -> list[list[int]]:
    return [[*trunk[: rng.randrange(_SHARED + 1)], *_tokens(rng, rng.randrange(1, 60))] for _ in range(count)]


def _open(model: Path, **options: Any) -> LLM:
    from sidestream.llm import LLM

    return LLM(
        model, device=CPU, **{"dtype": "float32", "kv_memory": "32MiB", "max_running": 4, "chunk_tokens": 64, **options}
    )


def _answer(llm: LLM, prompts: Sequence[Sequence[int]], outputs: int = _OUTPUTS) -> list[RequestOutput]:
    from sidestream.config import SamplingParams

    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True))


def _cold(model: Path, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    with _open(model, prefix_cache=False) as llm:
        return [answer.token_ids for answer in _answer(llm, prompts)]


def _again(
    model: Path, prompts: Sequence[Sequence[int]], directory: Path, drafts: int
) -> list[tuple[str, list[RequestOutput]]]:
    """The answers with KV from each tier, and with preemptions. `drafts`: number of drafts in each step."""
    from sidestream.config import SpeculativeConfig
    from sidestream_kv.config import OffloadConfig

    offload = OffloadConfig(host="64MiB", disk=directory, disk_capacity="256MiB")
    drafting = {"speculative": SpeculativeConfig(max_drafts=drafts, adaptive=False) if drafts else None}
    answers: list[tuple[str, list[RequestOutput]]] = []
    with _open(model, offload=offload, **drafting) as llm:
        _answer(llm, prompts)
        answers.append(("device", _answer(llm, prompts)))
        parts = llm.engine.parts
        costs = parts.costs
        assert costs is not None
        costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # a tiny model computes faster than it loads
        _settle(llm)
        llm.engine.call(parts.scheduler.forget_all)
        answers.append(("host", _answer(llm, prompts)))
    with _open(model, offload=offload, **drafting) as llm:
        costs = llm.engine.parts.costs
        assert costs is not None
        costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]
        answers.append(("disk", _answer(llm, prompts)))
    with _open(model, **drafting) as llm:
        blocks = llm.engine.parts.blocks
        held: list[Lease] = []
        llm.engine.call(lambda: held.append(blocks.take(blocks.size - 16)))  # two requests fit
        answers.append(("preempted", _answer(llm, prompts)))
    return answers


def _settle(llm: LLM) -> None:
    """Wait until no transfer is in flight."""
    transfers, busy = llm.engine.parts.transfers, [True]
    while transfers is not None and busy[-1]:
        llm.engine.call(lambda: busy.append(transfers.has_work))


def _reused(model: Path, turns: int, system_tokens: int) -> float:
    """Share of prompt tokens that came from the cache, in conversations of two users who take turns."""
    rng = random.Random(_SEED)
    talks = [_tokens(rng, system_tokens)] * 2
    cached = asked = 0
    with _open(model, kv_memory="256MiB") as llm:
        for turn in range(turns):
            prompt = [*talks[turn % 2], *_tokens(rng, _TURN)]
            (answer,) = _answer(llm, [prompt], _ANSWER)
            talks[turn % 2] = [*prompt, *answer.token_ids]
            cached += answer.cached.total
            asked += len(prompt)
    return cached / asked


def _reused_in_little_memory(model: Path) -> float:
    """Tokens from the cache in conversations that take turns, with a host tier that has room for their KV and two
    states of each, over those with a large host tier.
    """
    from sidestream.models.loader import cache_parts
    from sidestream_kv.config import OffloadConfig
    from sidestream_kv.kv.state_layout import blocks_per_state

    parts = cache_parts(str(model), block_tokens=_SMALL_BLOCK, dtype="float32")
    assert parts.state is not None
    block_bytes, length = parts.kv.block_bytes, _SHORT_TURNS * 2 * _SHORT
    state_bytes = blocks_per_state(parts.state, block_bytes) * block_bytes
    talk_bytes = length * parts.kv.token_bytes + 2 * state_bytes
    tokens = []
    for host_bytes in (_TALKS * talk_bytes, 8 * _TALKS * talk_bytes):
        rng = random.Random(_SEED)
        talks = [_tokens(rng, _SHORT) for _ in range(_TALKS)]
        cached = 0
        options = {"kv_memory": 4 * talk_bytes, "block_tokens": _SMALL_BLOCK}
        with _open(model, offload=OffloadConfig(host=host_bytes), **options) as llm:
            for _ in range(_SHORT_TURNS):
                for number in rng.sample(range(_TALKS), _TALKS):
                    prompt = [*talks[number], *_tokens(rng, _SHORT)]
                    (answer,) = _answer(llm, [prompt], _SHORT)
                    _settle(llm)
                    talks[number] = [*prompt, *answer.token_ids]
                    cached += answer.cached.total
        tokens.append(cached)
    return tokens[0] / tokens[1]


def logprobs(model: Path, prompts: Sequence[Sequence[int]]) -> tuple[list[float], list[float], list[float]]:
    """Log-probabilities of the tokens of our greedy answers, one after another: ours, in float32; transformers', in
    float32; and the exact ones, by transformers in float64, also where its code asks for float32.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers import AutoModelForCausalLM

    from sidestream.config import SamplingParams
    from sidestream.models.recurrent import unbind_time_steps

    with _open(model, prefix_cache=False) as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=_OUTPUTS, ignore_eos=True, logprobs=0))
    drawn = [logprob.logprob for answer in answers for logprob in answer.completions[0].logprobs or ()]

    class Exact(TorchFunctionMode):
        """Computes in float64 what asks for float32."""

        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None
        ) -> Any:
            if function is torch.Tensor.float:
                return args[0].double()
            given = [torch.float64 if value is torch.float32 else value for value in args]
            named = {name: torch.float64 if value is torch.float32 else value for name, value in (named or {}).items()}
            return function(*given, **named)

    found = []
    for dtype, mode in ((torch.float32, contextlib.nullcontext()), (torch.float64, Exact())):
        module = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, experts_implementation="eager", trust_remote_code=False
        ).eval()
        unbind_time_steps(module)
        values: list[float] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = torch.tensor(answer.token_ids)
            with torch.inference_mode(), mode:
                logits = module(input_ids=torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False).logits[0]
            behind = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
            values += behind.gather(1, tokens[:, None])[:, 0].tolist()
        found.append(values)
    return drawn, found[0], found[1]


def _root_mean_square(some: Sequence[float], others: Sequence[float]) -> float:
    return math.sqrt(sum((one - other) ** 2 for one, other in zip(some, others, strict=True)) / len(some))


def _largest(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def _state_bytes_error(model: Path) -> int:
    """Bytes of KV memory that were allocated, minus the sum of its parts in the metrics."""
    with _open(model) as llm:
        allocated = llm.engine.parts.executor._kv.untyped_storage().nbytes()
        parts = ("blocks", "states", "reserved")
        return allocated - sum(int(llm.metrics.value("kv_memory_bytes", part)) for part in parts)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCAB) for _ in range(count)]
