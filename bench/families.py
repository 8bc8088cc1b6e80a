"""Every kind of causal language model in the installed transformers: a tiny model of it with random weights is served,
or refused with a reason. What is served is compared with transformers' own log-probabilities.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from proof.report import Figure, at_least, at_most
from proof.tiny_kinds import KINDS, VOCAB, fill_zeros, tiny_kind
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import build_engine
from sidestream.errors import ModelError
from sidestream.models import load_model
from sidestream.models.config_checks import check_servable, counted_token
from sidestream.models.loader import quiet_transformers
from sidestream.models.recurrent import unbind_time_steps
from sidestream.models.text_part import text_config, text_module, whole_class
from sidestream.types import Delta

_MOST_PARAMETERS = 40_000_000
_PROMPTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 3, 37, 12
_ALLOWED = 1e-4  # of a log-probability, in nats


@dataclass(frozen=True, slots=True)
class Found:
    """One kind. `outcome`: `identical`, `wrong`, `refused`, `unclear` (it is not served, and the reason does not say
    what it has) or `untried` (there is no tiny model). `logprob_error`: largest difference of a log-probability.
    """

    kind: str
    outcome: str
    reason: str = ""
    logprob_error: float = 0.0


def measure(*, table: Path | None, on_progress: Callable[[str], None]) -> list[Figure]:
    """Try all kinds, one after another, in float32 on the CPU. `table`: a file for the outcome of each, as JSON."""
    found = [_try_kind(kind, on_progress) for kind in KINDS]
    if table is not None:
        rows = [{"kind": one.kind, "outcome": one.outcome, "reason": one.reason} for one in found]
        table.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    counts = Counter(one.outcome for one in found)
    errors = [one.logprob_error for one in found if one.outcome == "identical"]
    return [
        Figure("families_tried", len(found), "kinds"),
        Figure("families_identical", counts["identical"], "kinds", at_least(130)),
        Figure("families_refused", counts["refused"], "kinds"),
        Figure("families_untried", counts["untried"], "kinds", at_most(0)),
        Figure("families_unclear", counts["unclear"], "kinds", at_most(0)),
        Figure("families_wrong", counts["wrong"], "kinds", at_most(0)),
        Figure("families_logprob_error", max(errors, default=0.0), "nats", at_most(_ALLOWED)),
    ]


def _try_kind(kind: str, on_progress: Callable[[str], None]) -> Found:
    with _quiet(), tempfile.TemporaryDirectory() as directory:
        try:
            found = _serve(kind, Path(directory))
        except ModelError as refusal:
            reason = str(refusal).removeprefix(f"model {Path(directory).name}: ")
            named = reason.startswith((kind, kind.replace("-", "_"), "layer ", "its "))
            found = Found(kind, "refused" if named else "unclear", reason)
        except Exception as error:  # transformers cannot make the tiny model
            found = Found(kind, "untried", f"{type(error).__name__}: {error}".splitlines()[0])
    on_progress(f"{kind}: {found.outcome} {found.reason}".rstrip())
    return found


def _serve(kind: str, directory: Path) -> Found:
    try:
        config = tiny_kind(kind)
    except Exception:  # whatever transformers raises: there is no tiny model, but perhaps a reason
        try:
            default = CONFIG_MAPPING[kind]()
        except Exception as error:
            return Found(kind, "refused", f"{kind} has no default config ({type(error).__name__})")
        check_servable(default)
        raise
    check_servable(config)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"the tiny {kind} has {size} parameters: proof/tiny_kinds.py does not shrink it")
    torch.manual_seed(0)
    module: Any = whole_class(config)(config) if text_config(config) is not config else None
    module = AutoModelForCausalLM.from_config(config) if module is None else module
    fill_zeros(module)
    if (padding := counted_token(config)) is not None:  # no trained model generates it
        module.get_output_embeddings().weight.data[padding] = 0
    module.eval().save_pretrained(directory)
    served = _served_answers(directory)
    module.set_attn_implementation("eager")  # others leave soft caps out
    with contextlib.suppress(AttributeError, ValueError):
        module.set_experts_implementation("eager")  # others have no product in float64
    reference = (text_module(module) if text_config(config) is not config else module).double()
    unbind_time_steps(reference)  # as `load_model` does
    with _float64():
        errors = [_difference(reference, prompt, *answer) for prompt, answer in zip(_prompts(), served, strict=True)]
    largest = max(errors)
    if largest > _ALLOWED:
        return Found(kind, "wrong", f"a log-probability differs by {largest:.2g}", largest)
    return Found(kind, "identical", "", largest)


def _prompts() -> list[list[int]]:
    """Prompts of different lengths. The last one begins as the first, so that it reuses KV."""
    draw = random.Random(3)
    prompts = [[draw.randrange(3, VOCAB - 2) for _ in range(_PROMPT_TOKENS - 9 * index)] for index in range(_PROMPTS)]
    return [*prompts, [*prompts[0], 5, 6, 7]]


def _served_answers(directory: Path) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities, from chunks of 8 tokens and blocks of 4 in mixed batches."""
    model = load_model(str(directory), dtype="float32", block_tokens=4)
    blocks = 200 * model.layout.block_bytes + (0 if model.state_layout is None else 64 * model.state_layout.state_bytes)
    config = EngineConfig(
        kv_memory=2 * blocks, block_tokens=4, chunk_tokens=8, token_budget=24, max_running=4, compute_threads=1
    )
    engine = build_engine(model, config)
    try:
        params = SamplingParams(temperature=0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True, logprobs=0)
        told: list[queue.SimpleQueue[Delta]] = [queue.SimpleQueue() for _ in _prompts()]
        answers = []
        for prompt, deltas in list(zip(_prompts(), told, strict=True))[:-1]:
            engine.submit(prompt, params, deltas.put)
        for deltas in told[:-1]:
            answers.append(_read(deltas))
        engine.submit(_prompts()[-1], params, told[-1].put)
        return [*answers, _read(told[-1])]
    finally:
        engine.close()


def _read(deltas: queue.SimpleQueue[Delta]) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    while True:
        delta = deltas.get(timeout=120)
        tokens += delta.token_ids
        logprobs += [one.logprob for one in delta.logprobs]
        if delta.finish_reason is not None:
            if delta.finish_reason != "length":
                raise ModelError(f"the engine ended an answer by {delta.finish_reason}: {delta.error}")
            return tokens, logprobs


@contextlib.contextmanager
def _float64() -> Any:
    """Float64 for tensors that transformers makes without a dtype, too."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def _difference(module: Any, prompt: Sequence[int], tokens: list[int], logprobs: list[float]) -> float:
    """Largest difference from transformers' log-probabilities of these tokens, in float64, whose rounding does not
    count; infinite if another token is likelier by more than the bound.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    expected = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    if bool(((expected.amax(-1) - own) > _ALLOWED).any()):
        return float("inf")
    return float((own - torch.tensor(logprobs)).abs().max())


@contextlib.contextmanager
def _quiet() -> Any:
    """Without transformers' warnings, of which there are a few for each kind."""
    logging.getLogger("sidestream").setLevel(logging.ERROR)
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.getLogger("sidestream").setLevel(logging.NOTSET)
