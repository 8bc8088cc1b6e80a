"""The reference for a schedule: the output of each request, and the KV of its tokens.

The output of greedy requests is computed by the toy model's formula and the definition of the penalties, without an
engine. Requests with a temperature also depend on random numbers: they run on a second engine, one step at a time,
without cache, tiers, preemption or aborts. The reference is computed once for each workload.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from proof.tokenizer import ToyTokenizer
from proof.torture.script import Script, ScriptedDevice, ScriptedModel
from proof.torture.workload import VOCAB, Asked, Workload, blocks_for
from proof.toy import StatefulToyModel, ToyModel
from proof.toy_grammar import ToyGrammars, toy_grammar
from sidestream.attention.paged import PagedBatch
from sidestream.client.front_end import OutputProcessor
from sidestream.config import EngineConfig, SamplingParams, StructuredOutputs
from sidestream.engine import Engine, build_engine
from sidestream.engine.build_plan import all_layers_bytes
from sidestream.types import Delta
from sidestream_kv.kv.state_layout import RESERVED_STATES, blocks_per_state
from sidestream_order.sim import make_policy

SALT = "torture"
"""Cache salt of the engine under test."""

_MAX_STEPS = 5000


@dataclass(slots=True)
class Sample:
    """The output of one sample, as its client received it."""

    tokens: list[int]
    text: str = ""
    logprobs: tuple[float, ...] = ()
    reason: str | None = None
    error: str | None = None

    def take(self, delta: Delta) -> None:
        """Append a delta."""
        self.tokens.extend(delta.token_ids)
        self.text += delta.text
        self.logprobs += tuple(one.logprob for one in delta.logprobs)
        self.reason = delta.finish_reason
        self.error = delta.error


@dataclass(frozen=True, slots=True)
class Computed:
    """The cache content that a sample leaves. All of its tokens are computed, except the last.

    weights   version of the weights
    salt      cache salt of its request
    tokens    the computed tokens
    blocks    the KV bytes of each complete block; equal in every tier
    states    the recurrent state at the end of each block; empty: the model has none
    """

    weights: int
    salt: str
    tokens: tuple[int, ...]
    blocks: tuple[bytes, ...]
    states: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """The expected output and the expected KV bytes.

    samples    by request number and sample number, for each version of the weights
    computed   the cache contents of all samples, without duplicates
    """

    samples: tuple[dict[tuple[int, int], Sample], ...]
    computed: tuple[Computed, ...]


def params_of(number: int, asked: Asked, *, vocab: int) -> SamplingParams:
    """The sampling parameters of request `number`. With its temperature, the model's best token and all others together
    are about equally likely.
    """
    repetition, presence, frequency = asked.penalties or (1.0, 0.0, 0.0)
    return SamplingParams(
        temperature=(20.0 if vocab == VOCAB else 100.0 / math.log(1.5 * vocab)) if asked.hot else 0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=dict(asked.bias),
        min_tokens=asked.min_tokens,
        seed=number,
        max_tokens=asked.max_tokens,
        logprobs=asked.logprobs,
        n=asked.n,
        structured_outputs=StructuredOutputs(regex=asked.grammar) if asked.grammar else None,
    )


def toy_of(workload: Workload) -> ToyModel:
    """The toy model that the workload uses. Two layers have blocks of their own, if their window is even; otherwise one
    layer has a window, which lies in the blocks of all layers.
    """
    kind: Callable[..., ToyModel] = StatefulToyModel if workload.states else ToyModel
    if workload.window % 2 and not workload.states:
        kind = functools.partial(ToyModel, windowed=(1,))
    return kind(
        vocab_size=workload.vocab,
        eos_every=workload.eos_every,
        leaves_hidden=workload.leaves_hidden,
        window=workload.window,
    )


def reference_of(workload: Workload) -> Reference:
    """Compute the reference of a workload. Raises any error of the second engine."""
    versions = 2 if any(event.kind == "weights" for event in workload.events) else 1
    samples, computed = [], dict[tuple[int, str, tuple[int, ...]], Computed]()
    for weights in range(versions):
        model = ScriptedModel(toy_of(workload))
        model.weights = weights
        received: dict[tuple[int, int], Sample] = {}
        for number, asked in enumerate(workload.requests):
            if not asked.hot:
                answer = greedy_answer(model, asked)
                received.update({(number, index): answer for index in range(asked.n)})
        received.update(run_alone(workload, model, [at for at, asked in enumerate(workload.requests) if asked.hot]))
        samples.append(received)
        for (number, _), sample in received.items():
            asked = workload.requests[number]
            tokens = (*asked.prompt, *sample.tokens)[:-1]
            if (weights, asked.salt, tokens) not in computed:
                size = model.layout.block_tokens
                ends = range(size, len(tokens) + 1, size) if workload.states else ()
                computed[weights, asked.salt, tokens] = Computed(
                    weights,
                    asked.salt,
                    tokens,
                    _blocks_of(model, tokens, hidden=workload.leaves_hidden),
                    tuple(model.state_after(tokens[:end]) for end in ends),
                )
    return Reference(tuple(samples), tuple(computed.values()))


def greedy_answer(model: ScriptedModel, asked: Asked) -> Sample:
    """The answer to a greedy request, computed without engine, sampler or KV pool. See `runner.sampler` for the order
    of bias and penalties.
    """
    answer, counts = Sample([]), np.zeros(model.vocab_size, np.float32)
    in_prompt = np.isin(np.arange(model.vocab_size), asked.prompt)
    repetition, presence, frequency = (np.float32(value) for value in asked.penalties or (1.0, 0.0, 0.0))
    eos_ids = list(model.eos_token_ids)
    grammar = toy_grammar(asked.grammar, model.vocab_size) if asked.grammar else None
    while answer.reason is None:
        raw = np.zeros(model.vocab_size, np.float32)
        raw[model.next_token((*asked.prompt, *answer.tokens))] = 100.0
        logits = raw.copy()
        for token, bias in asked.bias:
            logits[token] += np.float32(bias)
        seen = in_prompt | (counts > 0)
        logits = np.where(seen, np.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits -= counts * frequency
        logits -= (counts > 0) * presence
        if len(answer.tokens) < asked.min_tokens:
            logits[eos_ids] = -np.inf
        if grammar is not None:
            logits[~grammar.allowed(answer.tokens)[: model.vocab_size]] = -np.inf
        token = int(logits.argmax())
        counts[token] += 1
        answer.tokens.append(token)
        if asked.logprobs is not None:
            answer.logprobs += (float(raw[token]) - float(np.log(np.exp(raw.astype(np.float64)).sum())),)
        if token in eos_ids:
            answer.reason = "stop"
        elif len(answer.tokens) == asked.max_tokens:
            answer.reason = "length"
        elif grammar is not None and len(answer.tokens) >= grammar.length:
            answer.reason = "stop"
    answer.text = ToyTokenizer().decode([token for token in answer.tokens if token not in eos_ids])
    return answer


def run_alone(workload: Workload, model: ScriptedModel, numbers: Sequence[int]) -> dict[tuple[int, int], Sample]:
    """The answers to the requests with these numbers, from an engine that runs only these requests."""
    if not numbers:
        return {}
    needed = sum(blocks_for(asked) * asked.n for asked in workload.requests) + len(workload.requests) + 8
    size = model.layout.block_tokens
    rows = max(4, *(asked.n for asked in workload.requests))
    config = EngineConfig(
        kv_memory=needed * all_layers_bytes(model) + state_bytes(model, rows),
        state_memory=state_bytes(model, rows) or None,
        block_tokens=size,
        chunk_tokens=workload.chunk_tokens,
        token_budget=workload.chunk_tokens + rows,
        max_running=rows,
        prefix_cache=False,
        asynchronous=False,
    )
    device = ScriptedDevice(make_policy("early", random.Random(0)), Script(Workload(0, ())), tracer=None)
    grammars = ToyGrammars(workload.vocab)
    engine: Engine = build_engine(model, config, device=device, threaded=False, grammars=grammars)
    received: dict[tuple[int, int], Sample] = {}
    for number in numbers:
        asked = workload.requests[number]
        for index in range(asked.n):
            received[number, index] = Sample([])
        params = params_of(number, asked, vocab=workload.vocab)
        output = OutputProcessor(ToyTokenizer(), params)

        def take(delta: Delta, number: int = number, output: OutputProcessor = output) -> None:
            if (read := output.read(delta)) is not None:
                received[number, read.index].take(read)

        engine.submit(asked.prompt, params, take)
    try:
        for _ in range(_MAX_STEPS):
            if not engine.unfinished:
                break
            engine.step()
        engine.close()
    finally:
        device.kill()  # ends all threads, also after an interrupt
    return received


def state_bytes(model: ScriptedModel, num_states: int) -> int:
    """Bytes of device memory for `num_states` recurrent states; 0 if the model has none."""
    layout = model.state_layout
    if layout is None:
        return 0
    size = model.layout.block_bytes
    return (num_states + RESERVED_STATES) * blocks_per_state(layout, size) * size


def _blocks_of(model: ScriptedModel, tokens: Sequence[int], *, hidden: bool) -> tuple[bytes, ...]:
    """The KV bytes of each complete block of `tokens`, computed by one forward pass in a memory of its own."""
    layout = model.layout
    computed = len(tokens)
    count = layout.num_blocks_for(computed)
    kv = torch.zeros(layout.shape(count))
    everything = torch.arange(computed)
    batch = PagedBatch(
        kv=kv,
        slot_mapping=everything,
        block_tables=torch.arange(count)[None],
        cu_seqlens_q=(0, computed),
        kv_lens=(computed,),
        num_decode=0,
        before_layer=lambda layer: None,
    )
    model.forward(torch.tensor(tokens), everything, batch, torch.empty(0, dtype=torch.int64))
    if hidden:
        for end in range(layout.block_tokens, computed + 1, layout.block_tokens):
            kv[end // layout.block_tokens - 1, -1] = model.hidden_after(tokens[:end])
        for position in range(computed):
            kv[position // layout.block_tokens, -2, :, position % layout.block_tokens] = model.hidden_after(
                tokens[:position]
            )
    return tuple(kv[index].numpy().tobytes() for index in range(computed // layout.block_tokens))
