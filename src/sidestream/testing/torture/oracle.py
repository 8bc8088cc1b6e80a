"""The reference for a schedule: the same requests, one step at a time, without cache, tiers, preemption or aborts.

Computed once for each workload. Knows the engine's public interface and the model, and nothing of the tortured run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sidestream.attention.paged import PagedBatch
from sidestream.client.output import OutputProcessor
from sidestream.config import EngineConfig, SamplingParams
from sidestream.device.sim import make_policy
from sidestream.engine import Engine, build_engine
from sidestream.kv.keys import BlockKeys
from sidestream.kv.state_layout import RESERVED_STATES, blocks_per_state
from sidestream.schedule.states import part_keys
from sidestream.testing.tokenizer import ToyTokenizer
from sidestream.testing.torture.script import Script, ScriptedDevice, ScriptedModel
from sidestream.testing.torture.workload import Asked, Workload, blocks_for
from sidestream.testing.toy import STATE_WIDTH, StatefulToyModel, ToyModel
from sidestream.types import Delta, Key

SALT = "torture"
"""Salt of the tortured engine; the reference uses it too, so that keys are equal."""

_MAX_STEPS = 5000


@dataclass(slots=True)
class Sample:
    """The output of one sample that its client received."""

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
class Reference:
    """The expected output and the expected KV bytes.

    samples   by request number and sample number, for each version of the weights
    blocks    the content of each key, the same in every tier
    states    the recurrent state at the end of each key's block; empty: the model has none
    parts     parts of checkpoints in tiers, by key: for each compared range, its first byte and its content; other
              bytes of a part are undefined
    """

    samples: tuple[dict[tuple[int, int], Sample], ...]
    blocks: dict[Key, bytes]
    states: dict[Key, int]
    parts: dict[Key, tuple[tuple[int, bytes], ...]]


def params_of(number: int, asked: Asked) -> SamplingParams:
    """The sampling parameters of request `number`."""
    repetition, presence, frequency = asked.penalties or (1.0, 0.0, 0.0)
    return SamplingParams(
        temperature=20.0 if asked.hot else 0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=dict(asked.bias),
        min_tokens=asked.min_tokens,
        seed=number,
        max_tokens=asked.max_tokens,
        logprobs=asked.logprobs,
        n=asked.n,
    )


def toy_of(workload: Workload) -> ToyModel:
    """The model that the workload runs on."""
    if workload.states:
        return StatefulToyModel(eos_every=workload.eos_every, leaves_hidden=workload.leaves_hidden)
    return ToyModel(eos_every=workload.eos_every, leaves_hidden=workload.leaves_hidden)


def reference_of(workload: Workload) -> Reference:
    """Run the requests one after another on an engine. Raises any error of that engine."""
    versions = 2 if any(event.kind == "weights" for event in workload.events) else 1
    samples, blocks, states = [], {}, dict[Key, int]()
    parts: dict[Key, tuple[tuple[int, bytes], ...]] = {}
    for weights in range(versions):
        model = ScriptedModel(toy_of(workload))
        model.weights = weights
        received = _run(workload, model)
        samples.append(received)
        for (number, _), sample in received.items():
            tokens = (*workload.requests[number].prompt, *sample.tokens)
            blocks.update(_blocks_of(model, tokens, hidden=workload.leaves_hidden))
            if workload.states:
                found = _states_of(model, tokens)
                states.update(found)
                parts.update(_parts_of(model, found))
    return Reference(tuple(samples), blocks, states, parts)


def _run(workload: Workload, model: ScriptedModel) -> dict[tuple[int, int], Sample]:
    needed = sum(blocks_for(asked) * asked.n for asked in workload.requests) + len(workload.requests) + 8
    size = model.layout.block_tokens
    rows = max(4, *(asked.n for asked in workload.requests))
    config = EngineConfig(
        kv_memory=needed * model.layout.block_bytes + state_bytes(model, rows),
        state_memory=state_bytes(model, rows) or None,
        block_tokens=size,
        chunk_tokens=workload.chunk_tokens,
        token_budget=workload.chunk_tokens + rows,
        max_running=rows,
        prefix_cache=False,
        asynchronous=False,
    )
    device = ScriptedDevice(make_policy("early", random.Random(0)), Script(Workload(0, ())), tracer=None)
    engine: Engine = build_engine(model, config, device=device, threaded=False)
    received: dict[tuple[int, int], Sample] = {}
    for number, asked in enumerate(workload.requests):
        for index in range(asked.n):
            received[number, index] = Sample([])
        params = params_of(number, asked)
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
        device.kill()  # after an interrupt too, end all threads
    return received


def state_bytes(model: ScriptedModel, num_states: int) -> int:
    """Bytes of device memory for `num_states` recurrent states; 0 if the model has none."""
    layout = model.state_layout
    if layout is None:
        return 0
    size = model.layout.block_bytes
    return (num_states + RESERVED_STATES) * blocks_per_state(layout, size) * size


def _states_of(model: ScriptedModel, tokens: Sequence[int]) -> dict[Key, int]:
    """The recurrent state at the end of each complete block whose tokens were all computed."""
    size, keys = model.layout.block_tokens, list[Key]()
    BlockKeys(fingerprint=model.fingerprint, layout=model.layout, salt=SALT, states=model.state_layout).extend(
        keys, tokens[: len(tokens) - 1]
    )
    return {key: model.state_after(tokens[: (index + 1) * size]) for index, key in enumerate(keys)}


def _parts_of(model: ScriptedModel, states: dict[Key, int]) -> dict[Key, tuple[tuple[int, bytes], ...]]:
    """The parts of the checkpoints of one request, whose states are in the order of its blocks."""
    layout, size = model.state_layout, model.layout.block_bytes
    assert layout is not None
    parts: dict[Key, tuple[tuple[int, bytes], ...]] = {}
    for index, (key, state) in enumerate(states.items()):
        covered = (index + 1) * model.layout.block_tokens
        number_at = 4 * (STATE_WIDTH - 1)
        meaningful = ((number_at, np.float32(state).tobytes()), (layout.covered_offset, np.int64(covered).tobytes()))
        for number, part in enumerate(part_keys(key, blocks_per_state(layout, size))):
            parts[part] = tuple((at - number * size, data) for at, data in meaningful if at // size == number)
    return parts


def _blocks_of(model: ScriptedModel, tokens: Sequence[int], *, hidden: bool) -> dict[Key, bytes]:
    """The KV of each complete block whose tokens were all computed; recomputed by one forward pass in other memory."""
    layout = model.layout
    computed = len(tokens) - 1
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
    model.forward(torch.tensor(tokens[:computed]), everything, batch, torch.empty(0, dtype=torch.int64))
    if hidden:
        for end in range(layout.block_tokens, computed + 1, layout.block_tokens):
            kv[end // layout.block_tokens - 1, -1] = model.hidden_after(tokens[:end])
        for position in range(computed):
            kv[position // layout.block_tokens, -2, :, position % layout.block_tokens] = model.hidden_after(
                tokens[:position]
            )
    keys: list[Key] = []
    BlockKeys(fingerprint=model.fingerprint, layout=layout, salt=SALT, states=model.state_layout).extend(
        keys, tokens[:computed]
    )
    return {key: kv[index].numpy().tobytes() for index, key in enumerate(keys)}
