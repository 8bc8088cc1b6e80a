"""Captured draws are those that the host would have launched, and leave the same behind; padding draws for nobody."""

from __future__ import annotations

import random

import pytest
import torch

from sidestream.config import SamplingParams
from sidestream.runner.drafts import Drafts
from sidestream.runner.draws import SamplingMode, draw_frame
from sidestream.runner.forward import Computed, Proposed
from sidestream.runner.frame import GraphInputs, GraphKey, pack
from sidestream.runner.sample import sample
from sidestream.runner.state import DecodeState
from sidestream.types import BatchPlan, RowPlan, RowStart, SamplingSpec

ROWS, VOCAB, MAX_LEN, HIDDEN = 12, 40, 64, 5


def asking(asked: dict[str, object], *, seed: int = 0) -> SamplingSpec:
    return SamplingParams(**{"temperature": 0.0, **asked}).spec(seed=seed, eos_ids=())  # type: ignore[arg-type]


def random_batch(rng: random.Random, most: int) -> BatchPlan:
    """Rows that decode, with up to `most` drafts, then chunks, of which some sample."""
    numbers = rng.sample(range(ROWS), rng.randint(1, 7))
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


# What rows of a step ask for, in turn, by the most that is captured for it.
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


def begun(max_len: int, hidden_size: int, draws: SamplingMode = SamplingMode.ARGMAX) -> DecodeState:
    state, kinds = DecodeState(ROWS, VOCAB, max_len=max_len, hidden_size=hidden_size), ASKED[draws]
    for row in range(ROWS):
        spec = asking(kinds[row % len(kinds)], seed=row)
        state.begin([(row, RowStart(spec, (row,) * prompt_len(row), (1, 1, 2)))])
    return state


def computed(shape: GraphKey, batch: BatchPlan, seed: int, *, hidden: bool, padded: bool) -> Computed:
    """Logits that are now and then not numbers, where the forward pass leaves them: padded, as a GPU's, or not."""
    draws = torch.Generator().manual_seed(seed)
    count = sum(1 + row.drafts for row in batch.rows if row.samples)
    places = shape.places if padded else count
    logits = torch.randint(0, 3, (places, VOCAB), generator=draws).float()  # many equals
    logits[torch.rand(places, generator=draws) < 0.2, 7] = torch.nan
    logits[count:] = torch.nan
    positions = [at for row in batch.rows if row.samples for at in range(row.stop - 1 - row.drafts, row.stop)]
    proposed = None
    decodes = shape.decodes if padded else sum(row.tokens is None for row in batch.rows)
    if shape.drafts and decodes:
        drafts = logits.nan_to_num().argmax(-1)[
            torch.randint(0, max(count, 1), (decodes, shape.drafts), generator=draws).clamp(max=places - 1)
        ]
        proposed = Proposed(drafts, torch.zeros(3, dtype=torch.int64))
    return Computed(
        logits,
        torch.tensor(positions + [0] * (places - count)),
        torch.randn(places, HIDDEN, generator=draws) if hidden else None,
        proposed,
    )


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(
    ("draws", "drafts"),
    [
        (SamplingMode.ARGMAX, 0),
        (SamplingMode.ARGMAX, 3),
        (SamplingMode.RANDOM, 0),
        (SamplingMode.RANDOM, 3),
        (SamplingMode.PENALISED, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(40))
def test_captured_draws_are_those_of_the_host_h19_h18(
    seed: int, draws: SamplingMode, drafts: int, padded: bool
) -> None:
    rng = random.Random(seed)
    hidden, shape = drafts > 0 and seed % 2 == 0, GraphKey(9, 60, drafts)
    batch = random_batch(rng, drafts)
    sampling = [row for row in batch.rows if row.samples]
    if not sampling:
        return
    theirs, ours = (begun(MAX_LEN if drafts else 0, HIDDEN if hidden else 0, draws) for _ in range(2))
    left = computed(shape, batch, seed, hidden=hidden, padded=padded)
    frame = GraphInputs.allocate(shape, torch.device("cpu"), padding_slot=ours.padding_slot)
    frame.buffer.copy_(torch.from_numpy(pack(batch, shape, padding_slot=ours.padding_slot, block_tokens=4)))

    drawn, counts = draw_frame(frame, left._replace(logits=left.logits.clone()), ours, draws)

    count = sum(1 + row.drafts for row in sampling)
    first = Computed(
        left.logits[:count].clone(), left.positions[:count], None if left.hidden is None else left.hidden[:count], None
    )
    if drafts:
        planned = Drafts.of(batch.rows, theirs)
        decodes = sum(row.tokens is None for row in batch.rows)
        if planned.most and left.proposed is not None:
            proposed = torch.zeros(len(sampling), planned.most, dtype=torch.int64)
            proposed[:decodes] = left.proposed.tokens[:decodes, : planned.most]
            first = first._replace(proposed=Proposed(proposed, left.proposed.times))
        expected, expected_counts = planned.draw(first, theirs)
        assert (counts is None) is (left.proposed is None)
        if counts is not None:
            assert counts[: len(sampling)].tolist() == expected_counts.tolist()
    else:
        rows = [row.row for row in sampling]
        expected = sample(first.logits, rows, [row.stop - prompt_len(row.row) for row in sampling], theirs)
        theirs.commit(rows, expected.tokens)
        assert counts is None
    assert drawn.tokens[:count].tolist() == expected.tokens.tolist()
    assert drawn.finite[:count].tolist() == expected.finite.tolist()
    for name in ("last", "lengths", "history", "hidden"):
        mine, wanted = getattr(ours, name)[:ROWS], getattr(theirs, name)[:ROWS]
        if name == "history" and drafts:
            mine, wanted = mine[:, :-1], wanted[:, :-1]  # the last column takes what is thrown away
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, msg=name)
    torch.testing.assert_close(ours.seen_tables()[0][:ROWS], theirs.seen_tables()[0][:ROWS], rtol=0, atol=0)
    assert ours.lengths[ours.padding_slot] < MAX_LEN


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
def test_what_draws_take_behind_two_outputs(asked: dict[str, object], expected: SamplingMode) -> None:
    assert SamplingMode.of(asking(asked), outputs=2) is expected
