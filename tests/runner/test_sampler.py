"""A step draws and advances its slots as each row would alone, eager or captured, in every mode that is high enough;
and padding changes no slot of a request.
"""

from __future__ import annotations

import random

import pytest
import torch

from sidestream.config import SamplingParams
from sidestream.ops import Ops
from sidestream.runner.forward import ForwardOutput, Proposed
from sidestream.runner.sampler import Sampler, SamplingMode, draw_tokens
from sidestream.runner.state import DecodeState
from sidestream.runner.step_inputs import GraphKey, InputSizes, StepInputs, pack
from sidestream.types import BatchPlan, RowPlan, RowStart, SamplingSpec

SLOTS, VOCAB, MAX_LEN, HIDDEN = 12, 40, 64, 5


def asking(asked: dict[str, object], *, seed: int = 0) -> SamplingSpec:
    return SamplingParams(**{"temperature": 0.0, **asked}).spec(seed=seed, eos_ids=())  # type: ignore[arg-type]


def random_batch(rng: random.Random, most: int) -> BatchPlan:
    """Rows that decode, with up to `most` drafts, then chunks, of which some sample."""
    numbers = rng.sample(range(SLOTS), rng.randint(1, 7))
    decodes = rng.randint(0, len(numbers))
    rows = []
    for at, number in enumerate(numbers):
        start, drafts = rng.randrange(1, 25), rng.randint(0, most) if at < decodes else 0
        count = 1 + drafts if at < decodes else rng.randint(1, 6)
        tokens = None if at < decodes else tuple(range(count))
        samples = at < decodes or rng.random() < 0.7
        rows.append(
            RowPlan(number, number, 0, start, start + count, tokens, tuple(range(9)), samples, 0)._replace(
                drafts=drafts
            )
        )
    rows[:decodes] = sorted(rows[:decodes], key=lambda row: row.drafts > 0)
    return BatchPlan(tuple(rows), speculates=any(row.drafts for row in rows))


# Sampling options of a step's rows, in turn, by the lowest mode that is high enough for all of them.
ASKED: dict[SamplingMode, list[dict[str, object]]] = {
    SamplingMode.ARGMAX: [{}],
    SamplingMode.RANDOM: [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.8, "min_p": 0.2},
    ],
    SamplingMode.PENALISED: [
        {},
        {"temperature": 1.0, "top_k": 9, "frequency_penalty": 0.5},
        {"temperature": 0.7, "min_p": 0.3},
        {"repetition_penalty": 1.5, "presence_penalty": 0.25},
        {"temperature": 1.3, "top_p": 0.6, "presence_penalty": -1.0},
    ],
}


def prompt_len(row: int) -> int:
    return row % 4 + 1


def begun(max_len: int, hidden_size: int, mode: SamplingMode = SamplingMode.ARGMAX) -> DecodeState:
    state, kinds = DecodeState(SLOTS, VOCAB, max_len=max_len, hidden_size=hidden_size), ASKED[mode]
    for slot in range(SLOTS):
        spec = asking(kinds[slot % len(kinds)], seed=slot)
        state.begin([(slot, RowStart(spec, (slot,) * prompt_len(slot), (1, 1, 2)))])
    return state


def forward_output(sizes: InputSizes, batch: BatchPlan, seed: int, *, hidden: bool) -> ForwardOutput:
    """Logits that are now and then not numbers, with as much padding as the sizes have."""
    draws = torch.Generator().manual_seed(seed)
    count = sum(1 + row.drafts for row in batch.rows if row.samples)
    logits = torch.randint(0, 3, (sizes.logits, VOCAB), generator=draws).float()  # many equals
    logits[torch.rand(sizes.logits, generator=draws) < 0.2, 7] = torch.nan
    logits[count:] = torch.nan
    positions = [at for row in batch.rows if row.samples for at in range(row.stop - 1 - row.drafts, row.stop)]
    proposed = None
    if sizes.draft_len and sizes.decodes:
        drafts = logits.nan_to_num().argmax(-1)[
            torch.randint(0, max(count, 1), (sizes.decodes, sizes.draft_len), generator=draws).clamp(
                max=sizes.logits - 1
            )
        ]
        proposed = Proposed(drafts, torch.zeros(3, dtype=torch.int64))
    return ForwardOutput(
        logits,
        torch.tensor(positions + [0] * (sizes.logits - count)),
        torch.randn(sizes.logits, HIDDEN, generator=draws) if hidden else None,
        proposed,
    )


def first(output: ForwardOutput, sizes: InputSizes) -> ForwardOutput:
    """The same without padding."""
    count, proposed = sizes.logits, output.proposed
    if proposed is not None:
        tokens = proposed.tokens[: sizes.decodes, : sizes.draft_len]
        proposed = Proposed(tokens, proposed.times) if sizes.draft_len else None
    hidden = None if output.hidden is None else output.hidden[:count]
    return ForwardOutput(output.logits[:count].clone(), output.positions[:count], hidden, proposed)


def sample_row_by_row(
    batch: BatchPlan, output: ForwardOutput, state: DecodeState
) -> tuple[list[int], list[bool], list[int]]:
    """Draw and advance one row at a time, one logit at a time, by plain numbers: tokens, whether they are finite, and
    the accept lengths of the rows that sample.
    """
    tokens, finite, accepted, at = list[int](), list[bool](), list[int](), 0
    for number, row in enumerate(batch.rows):
        if not row.samples:
            continue
        drafts = [] if output.proposed is None or not row.drafts else output.proposed.tokens[number].tolist()
        drafts, own, option = drafts[: row.drafts], list[int](), state.sampling_of(row.slot)
        for before in range(1 + row.drafts):
            position = int(output.positions[at + before])
            drawn = draw_tokens(
                output.logits[at + before][None].clone(),
                torch.tensor([row.slot]),
                torch.tensor([position + 1 - prompt_len(row.slot)]),
                state,
                Ops(),
                mode=SamplingMode.HOST,
                options=[option],
                drafted=torch.tensor([drafts[:before]], dtype=torch.int64) if before else None,
            )
            own.append(int(drawn.tokens))
            finite.append(bool(drawn.finite))
        length = 1
        while length <= row.drafts and drafts[length - 1] == own[length - 1]:
            length += 1
        start, slot = int(output.positions[at]), row.slot
        state.last_tokens[slot] = own[length - 1]
        if state.keeps_history:
            state.lengths[slot] = start + length
            state.history[slot, start + 1 : start + 1 + length] = torch.tensor(own[:length])
            if output.hidden is not None:
                state.hidden[slot] = output.hidden[at + length - 1]
        if option.spec.penalised:
            for token in own[:length]:
                state.seen_tables()[0][slot, token] += 1
        tokens += own
        accepted.append(length)
        at += 1 + row.drafts
    return tokens, finite, accepted


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("mode", [SamplingMode.ARGMAX, SamplingMode.RANDOM, SamplingMode.PENALISED], ids=str)
def test_a_step_samples_and_advances_each_row_as_it_would_alone_h19_h18(
    mode: SamplingMode, drafts: int, captured: bool
) -> None:
    for seed in range(40):
        rng, key = random.Random(seed), GraphKey(9, 60, drafts)
        hidden, batch = drafts > 0 and seed % 2 == 0, random_batch(rng, drafts)
        rows = [row for row in batch.rows if row.samples]
        if not rows:
            continue
        exact = InputSizes.of(batch)
        sizes = key.sizes if captured else exact
        output = forward_output(key.sizes, batch, seed, hidden=hidden)
        given = output._replace(logits=output.logits.clone()) if captured else first(output, exact)
        state = begun(MAX_LEN if drafts else 0, HIDDEN if hidden else 0, mode)
        numbers = pack(batch, sizes, padding_slot=state.padding_slot, block_tokens=4)
        inputs = StepInputs.of(torch.from_numpy(numbers), sizes, table_width=0, padded=captured)
        alone = begun(MAX_LEN if drafts else 0, HIDDEN if hidden else 0, mode)
        tokens, finite, accepted = sample_row_by_row(batch, first(output, exact), alone)

        # Penalties after drafts are not captured: then the sampler is given the rows.
        by_host = not captured or (mode is SamplingMode.PENALISED and drafts > 0)
        used = SamplingMode.HOST if not captured and seed % 3 == 0 else mode
        drawn, lengths = Sampler(state, Ops()).sample(inputs, given, used, batch if by_host else None)

        assert drawn.tokens[: len(tokens)].tolist() == tokens
        assert drawn.finite[: len(tokens)].tolist() == finite
        assert (lengths is None) is (given.proposed is None)
        if lengths is not None:
            assert lengths[: len(rows)].tolist() == accepted
        for name in ("last_tokens", "lengths", "history", "hidden"):
            mine, wanted = getattr(state, name)[:SLOTS], getattr(alone, name)[:SLOTS]
            if name == "history" and drafts:
                mine, wanted = mine[:, :-1], wanted[:, :-1]  # the last column takes writes that count for nothing
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(state.seen_tables()[0][:SLOTS], alone.seen_tables()[0][:SLOTS], rtol=0, atol=0)
        assert state.lengths[state.padding_slot] < MAX_LEN


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, SamplingMode.ARGMAX),
        ({"temperature": 1.0, "top_k": 1}, SamplingMode.ARGMAX),
        ({"min_tokens": 3}, SamplingMode.ARGMAX),
        ({"temperature": 0.5}, SamplingMode.RANDOM),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}, SamplingMode.RANDOM),
        ({"repetition_penalty": 1.1}, SamplingMode.PENALISED),
        ({"presence_penalty": 0.1}, SamplingMode.PENALISED),
        ({"temperature": 0.5, "frequency_penalty": -0.1}, SamplingMode.PENALISED),
        ({"logit_bias": {1: 1.0}}, SamplingMode.HOST),
        ({"min_tokens": 3, "stop_token_ids": (2,)}, SamplingMode.HOST),
        ({"min_tokens": 2, "stop_token_ids": (2,)}, SamplingMode.ARGMAX),
        ({"logprobs": 0, "presence_penalty": 0.1}, SamplingMode.HOST),
    ],
)
def test_sampling_mode_after_two_outputs(asked: dict[str, object], expected: SamplingMode) -> None:
    assert SamplingMode.of(asking(asked), outputs=2) is expected
