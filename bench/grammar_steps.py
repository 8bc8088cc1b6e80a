"""The cost of structured output: time of a step in which half of the rows have a grammar, divided by the time of a step
without grammars. One engine runs both kinds of rounds in turn, with the same number of rows and of tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, product
from statistics import median

import numpy as np

from bench.requests import Answer, ask, random_prompts
from proof.random_models import random_model
from proof.report import Figure, at_most
from sidestream.config import EngineConfig, StructuredOutputs
from sidestream.engine import Engine, build_engine
from sidestream.errors import SidestreamError
from sidestream.grammar import GrammarCompiler
from sidestream.processes.garbage import freeze_gc_heap
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.kinds import CUDA

_PROMPT_TOKENS = 64
_SCHEMA = {
    "type": "array",
    "minItems": 1000,  # so that no answer is complete before the last step
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 24},
            "kind": {"enum": ["person", "place", "organization"]},
            "score": {"type": "number", "minimum": 0, "maximum": 100},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3,9}$"}, "maxItems": 4},
            "parent": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["name", "kind", "score", "tags", "parent"],
        "additionalProperties": False,
    },
}


def measure(
    *,
    device: str,
    model: str,
    shape: str,
    requests: int,
    output_tokens: int,
    rounds: int,
    on_progress: Callable[[str], None],
) -> list[Figure]:
    """Rounds without grammars and rounds with grammars in half of the rows alternate, with the same prompts."""
    plain, mixed, free, cpu = list[float](), list[float](), list[float](), list[float]()
    random, on_gpu = np.random.default_rng(0), device == CUDA
    on_progress("starting the engine")
    with _engine(device, model, shape, requests, output_tokens) as (engine, vocab_size):
        for number in range(rounds + 1):
            prompts = random_prompts(random, vocab_size, count=requests, tokens=_PROMPT_TOKENS)
            seconds, cpu_s = dict[bool, list[float]](), dict[bool, float]()
            for structured in (False, True) if number % 2 else (True, False):
                on_progress(f"round {number} of {rounds}, {'with' if structured else 'without'} grammars")
                begin = time.process_time()
                answers = _answers(engine, prompts, output_tokens, structured=structured)
                cpu_s[structured] = time.process_time() - begin
                seconds[structured] = [_step_s(answer, output_tokens) for answer in answers]
            if number:  # round 0 warms up
                plain.append(median(seconds[False]))
                mixed.append(median(seconds[True]))
                cpu.append(cpu_s[True] / cpu_s[False])
                free.append(median(seconds[True][1::2]) / median(seconds[False][1::2]))
    ratio = median(with_them / without for with_them, without in zip(mixed, plain, strict=True))
    return [
        Figure("grammar_step_over_plain", ratio, "ratio", at_most(1.05 if on_gpu else 1.1)),
        Figure("grammar_free_row_over_plain", median(free), "ratio", at_most(1.02) if on_gpu else None),
        Figure("grammar_cpu_time_over_plain", median(cpu), "ratio"),  # of the process; other programs change it less
        Figure("plain_step_ms", 1e3 * median(plain), "ms"),
        Figure("grammar_step_ms", 1e3 * median(mixed), "ms"),
        Figure("grammar_step_over_plain_min", min(a / b for a, b in zip(mixed, plain, strict=True)), "ratio"),
        Figure("grammar_step_over_plain_max", max(a / b for a, b in zip(mixed, plain, strict=True)), "ratio"),
    ]


def _answers(engine: Engine, prompts: Sequence[list[int]], outputs: int, *, structured: bool) -> list[Answer]:
    """Answers of requests that start in the same step; every second one is free in any case."""
    form = {"structured_outputs": StructuredOutputs(json=json.dumps(_SCHEMA))} if structured else {}
    answers = list[Answer]()

    def ask_all() -> None:
        for number, prompt in enumerate(prompts):
            answers.append(ask(engine, prompt, outputs, **({} if number % 2 else form)))

    engine.call(ask_all)
    return [answer.wait() for answer in answers]


def _step_s(answer: Answer, outputs: int) -> float:
    """Median seconds between two tokens of an answer. The first ones, beside the prefill of others, do not count."""
    if len(answer.tokens) != outputs:
        raise SidestreamError(f"an answer has {len(answer.tokens)} of {outputs} tokens: its grammar was complete")
    return float(np.median(np.diff(answer.times[outputs // 8 :])))


@contextmanager
def _engine(device: str, model: str, shape: str, requests: int, outputs: int) -> Iterator[tuple[Engine, int]]:
    """An engine and its vocabulary size: of the model on a CPU, of a shape with random weights on a GPU."""
    if device != CUDA:
        from sidestream.llm import LLM

        with LLM(model, device=device, kv_memory="256MiB", prefix_cache=False, max_running=requests) as llm:
            yield llm.engine, llm.tokenizer.vocab_size
        return
    made = random_model(shape, device=torch_device(device))
    blocks = (made.layout.num_blocks_for(_PROMPT_TOKENS + outputs) + 1) * requests
    config = EngineConfig(
        device=device,
        kv_memory=blocks * made.layout.block_bytes,
        max_running=requests,
        max_model_len=2 * (_PROMPT_TOKENS + outputs),
        prefix_cache=False,
    )
    grammars = GrammarCompiler(_tokenizer(made.vocab_size), vocab_size=made.vocab_size, eos_ids=(0,))
    engine, unfreeze = build_engine(made, config, grammars=grammars), freeze_gc_heap()
    try:
        yield engine, made.vocab_size
    finally:
        engine.close()
        unfreeze()


def _tokenizer(vocab_size: int) -> str:
    """A tokenizer with as many tokens as the model: bytes, and words of two to four letters."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel as Bytes

    words = ("".join(word) for size in (2, 3, 4) for word in product(["", "Ġ"], *["etaoinshrdlcumwfgypbvk"] * size))
    texts = ["<eos>", *sorted(Bytes.alphabet()), *islice(words, vocab_size - 257)]
    made = Tokenizer(BPE(vocab={text: at for at, text in enumerate(texts)}, merges=[]))
    made.add_special_tokens(["<eos>"])
    made.decoder = ByteLevel()
    return str(made.to_str())
