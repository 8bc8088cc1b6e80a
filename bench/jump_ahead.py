"""Jump-ahead: steps and tokens per second of answers to a schema with long keys, with drafts of what the grammar forces
and without; and what these drafts cost requests without a grammar beside them. One engine runs both kinds of rounds in
turn, with the same prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from bench.requests import ask
from proof.report import Figure, at_least, at_most
from sidestream.config import GRAMMAR, SpeculativeConfig, StructuredOutputs
from sidestream.llm import LLM

_TEXT = {"type": "string", "maxLength": 16}
_KEYS = {
    "customer_first_name": _TEXT,
    "customer_last_name": _TEXT,
    "customer_account_balance": {"type": "integer", "minimum": 0, "maximum": 9999},
    "preferred_shipping_address": _TEXT,
    "is_subscribed_to_newsletter": {"type": "boolean"},
    "date_of_last_purchase": {"type": "string", "format": "date"},
}
_SCHEMA = {"type": "object", "properties": _KEYS, "required": [*_KEYS], "additionalProperties": False}
_FORM = StructuredOutputs(json=json.dumps(_SCHEMA), disable_any_whitespace=True)
_MOST_TOKENS = 160


class _Round(NamedTuple):
    """One round.

    tokens_per_s   tokens of answers with a grammar, by the time of the longest
    free_s         median time of a token of a request without a grammar; 0: there was none
    """

    steps: int
    tokens_per_s: float
    free_s: float


def measure(*, model: str, requests: int, rounds: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Rounds with drafts and rounds without (`max_drafts` 0) alternate: of one request, of `requests` requests, and of
    as many, of which half have no grammar.
    """
    on_progress("starting the engine")
    speculative = SpeculativeConfig(GRAMMAR)
    kinds = {"b1": (1, 0), f"b{requests}": (requests, 0), "mixed": (requests - requests // 2, requests // 2)}
    found: dict[tuple[str, bool], list[_Round]] = {}
    with LLM(model, kv_memory="256MiB", prefix_cache=False, max_running=requests, speculative=speculative) as llm:
        for number in range(rounds + 1):
            prompts = [llm.tokenizer.encode(f"Customer {number}.{each} as JSON:\n") for each in range(requests)]
            for kind, (formed, free) in kinds.items():
                for drafts in (False, True) if number % 2 else (True, False):
                    on_progress(f"round {number} of {rounds}, {kind}, {'with' if drafts else 'without'} drafts")
                    done = _round(llm, prompts[:formed], prompts[formed : formed + free], drafts=drafts)
                    found.setdefault((kind, drafts), []).append(done)
        drafted, accepted = (llm.metrics.value(f"{kind}_tokens_total", GRAMMAR) for kind in ("draft", "accepted"))
    figures = [Figure("jump_ahead_accepted_share", accepted / drafted, "share", at_least(0.9))]
    for kind in kinds:
        pairs = [*zip(found[kind, True], found[kind, False], strict=True)][1:]  # round 0 warms up
        steps = median(jumped.steps / plain.steps for jumped, plain in pairs)
        speeds = [jumped.tokens_per_s / plain.tokens_per_s for jumped, plain in pairs]
        if kind == "mixed":
            free_s = median(jumped.free_s / plain.free_s for jumped, plain in pairs)
            figures.append(Figure("jump_ahead_free_row_over_plain", free_s, "ratio"))
        else:
            figures.append(Figure(f"jump_ahead_steps_over_plain_{kind}", steps, "ratio", at_most(0.8)))
        figures += [
            Figure(f"jump_ahead_speedup_{kind}", median(speeds), "ratio", at_least(1.1) if kind == "b1" else None),
            Figure(f"jump_ahead_speedup_{kind}_min", min(speeds), "ratio"),
            Figure(f"jump_ahead_speedup_{kind}_max", max(speeds), "ratio"),
        ]
    return figures


def _round(llm: LLM, formed: Sequence[list[int]], free: Sequence[list[int]], *, drafts: bool) -> _Round:
    """Answers to prompts with the schema, and to prompts without it."""
    engine, more = llm.engine, {} if drafts else {"max_drafts": 0}
    steps, begin_s = engine.num_steps, time.perf_counter()
    answers = [
        ask(engine, prompt, _MOST_TOKENS, structured_outputs=_FORM, ignore_eos=False, **more) for prompt in formed
    ]
    others = [ask(engine, prompt, _MOST_TOKENS // 2, **more) for prompt in free]
    tokens, end_s = 0, begin_s
    for answer in answers:
        tokens, end_s = tokens + len(answer.wait().tokens), max(end_s, answer.times[-1])
    free_s = [float(np.median(np.diff(answer.wait().times))) for answer in others]
    return _Round(engine.num_steps - steps, tokens / (end_s - begin_s), median(free_s) if free_s else 0.0)
