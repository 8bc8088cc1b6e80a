"""The toy models: what the pool says decides the text, all of it, and the references need no pool."""

from __future__ import annotations

import pytest
import torch

from proof.toy import RecurrentToyModel, ToyDraftHead, ToyModel
from sidestream.attention.paged import PagedBatch
from sidestream.attention.triton import DeviceBatch

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)
NUM_BLOCKS = 8
MODELS = [ToyModel(), RecurrentToyModel(), RecurrentToyModel(block_tokens=3, num_layers=2)]


def named(model: ToyModel) -> str:
    return f"{model.fingerprint}-{model.layout.block_tokens}"


class Rig:
    """One pool, and one row at a time that is computed into it."""

    def __init__(self, model: ToyModel) -> None:
        self.model = model
        self.pool = torch.full(model.layout.shape(NUM_BLOCKS), 123456.0)
        self.gates: list[int] = []

    def compute(self, tokens: tuple[int, ...], start: int, stop: int, blocks: tuple[int, ...]) -> int:
        """The token drawn after positions `[start, stop)` were computed on top of what the pool holds."""
        positions, size = torch.arange(start, stop), self.model.layout.block_tokens
        table, count = torch.tensor([blocks]), stop - start
        slot_mapping = table[0][positions // size] * size + positions % size
        batch = PagedBatch(self.pool, slot_mapping, table, (0, count), (stop,), 0, self.gates.append)
        ids, last = torch.tensor(tokens[start:stop]), torch.tensor([count - 1])
        return int(self.model.forward(ids, positions, batch, last).argmax())


@pytest.mark.parametrize("model", MODELS, ids=named)
def test_chunks_of_any_length_give_the_references_token(model: ToyModel) -> None:
    for cuts in [(), (4,), (1, 2, 3), (5, 8), (8, 9, 10)]:
        rig = Rig(model)
        for start, stop in zip((0, *cuts), (*cuts, len(PROMPT)), strict=True):
            drawn = rig.compute(PROMPT, start, stop, (5, 2, 7, 0))
            assert drawn == model.expected(PROMPT[:stop], 1)[0]


@pytest.mark.parametrize("model", MODELS, ids=named)
def test_decoding_gives_the_references_tokens(model: ToyModel) -> None:
    rig, tokens = Rig(model), PROMPT
    tokens += (rig.compute(tokens, 0, len(tokens), (1, 3, 5, 7, 2, 4, 6)),)
    for _ in range(8):
        tokens += (rig.compute(tokens, len(tokens) - 1, len(tokens), (1, 3, 5, 7, 2, 4, 6)),)
    assert list(tokens[len(PROMPT) :]) == model.expected(PROMPT, 9)


def test_the_toy_model_gives_equal_tokens_on_a_gpu_and_padding_writes_no_kv() -> None:
    model = ToyModel(block_tokens=16, num_layers=2, eos_every=5)
    prompts = [
        tuple((7 * index + 3 * at) % 90 + 1 for at in range(length)) for index, length in enumerate((40, 17, 33))
    ]
    blocks = [(3, 1, 4), (5, 9), (2, 6, 8)]
    pool = torch.full(model.layout.shape(12), 123456.0)
    gates: list[int] = []
    at = [0, 0, 0]
    for take in ((32, 17, 20), (8, 0, 12), (0, 0, 1)):  # no tokens: a row of padding
        lengths = [min(count, len(prompt) - start) for count, prompt, start in zip(take, prompts, at, strict=True)]
        tokens, positions, slots = [0, 0], [0, 0], [-1, -1]  # padding comes first here, and last
        for prompt, table, start, count in zip(prompts, blocks, at, lengths, strict=True):
            tokens += prompt[start : start + count]
            positions += range(start, start + count)
            slots += [table[position // 16] * 16 + position % 16 for position in range(start, start + count)]
        starts = [2, *(2 + sum(lengths[: row + 1]) for row in range(3))]
        at = [start + count for start, count in zip(at, lengths, strict=True)]
        table = torch.zeros(3, 3, dtype=torch.int32)
        for row, held in enumerate(blocks):
            table[row, : len(held)] = torch.tensor(held)
        batch = DeviceBatch(
            pool,
            torch.tensor([*slots, -1]),
            table,
            torch.tensor(starts),
            torch.tensor([stop if count else 0 for stop, count in zip(at, lengths, strict=True)]),
            before_layer=gates.append,
        )
        sampling = [row for row in range(3) if lengths[row]]
        ends = torch.tensor([starts[row + 1] - 1 for row in sampling])
        drawn = model.forward(torch.tensor([*tokens, 0]), torch.tensor([*positions, 0]), batch, ends).argmax(1)
        assert drawn.tolist() == [model.expected(prompts[row][: at[row]], 1)[0] for row in sampling]
    assert gates == [0, 1] * 3
    untouched = [block for block in range(12) if not any(block in held for held in blocks)]
    assert (pool[untouched] == 123456.0).all()

    nothing = DeviceBatch(
        pool, torch.tensor([-1, -1]), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 0]), torch.tensor([0])
    )
    before = pool.clone()
    model.forward(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), nothing, torch.tensor([0]))
    assert torch.equal(pool, before)


@pytest.mark.parametrize("model", MODELS, ids=named)
def test_every_part_of_every_earlier_block_decides_the_next_token(model: ToyModel) -> None:
    size = model.layout.block_tokens
    last = len(PROMPT) // size * size
    for block in range(last // size):
        for layer in range(model.layout.num_layers):
            changed = 0
            for token in range(size):
                rig = Rig(model)
                rig.compute(PROMPT, 0, last, (0, 1, 2, 3))
                rig.pool[block, layer, 1, token, 0, 1] += 1
                changed += rig.compute(PROMPT, last, len(PROMPT), (0, 1, 2, 3)) != model.expected(PROMPT, 1)[0]
            assert changed >= size - 1  # one in about a hundred changes draws the same token by chance


def test_a_block_whose_state_was_left_behind_changes_the_text() -> None:
    model = RecurrentToyModel()
    rig = Rig(model)
    rig.compute(PROMPT, 0, 8, (0, 1, 2))
    keys_and_values = slice(0, model.layout.num_layers - 1)
    rig.pool[4:6, keys_and_values] = rig.pool[0:2, keys_and_values]
    assert rig.compute(PROMPT, 8, len(PROMPT), (4, 5, 6)) != model.expected(PROMPT, 1)[0]
    rig.pool[4:6] = rig.pool[0:2]
    assert rig.compute(PROMPT, 8, len(PROMPT), (4, 5, 6)) == model.expected(PROMPT, 1)[0]


def test_the_state_of_a_block_follows_from_the_states_before_it() -> None:
    model = RecurrentToyModel()
    drawn = []
    for change in (0, 1):
        rig = Rig(model)
        rig.compute(PROMPT, 0, 4, (0, 1, 2))
        rig.pool[0, -1, 0, 0, 0, 0] += change
        rig.compute(PROMPT, 4, 8, (0, 1, 2))
        drawn.append(rig.pool[1, -1].clone())
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("model", MODELS, ids=named)
def test_every_layer_is_gated_once_and_in_order(model: ToyModel) -> None:
    rig = Rig(model)
    rig.compute(PROMPT, 0, len(PROMPT), (0, 1, 2, 3))
    assert rig.gates == list(range(model.layout.num_layers))


def test_different_models_have_different_fingerprints_or_layouts() -> None:
    names = [(model.fingerprint, str(model.layout.describe())) for model in MODELS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("model", MODELS, ids=named)
def test_the_toy_draft_head_has_a_known_accept_length(model: ToyModel) -> None:
    head, context, seen = ToyDraftHead(model, width=3), list(PROMPT), set()
    for _ in range(12):
        drafts = head.drafts(context, head.hidden(context))
        assert len(drafts) == 3
        assert head.accept_length(context, drafts) == head.accepted(context)
        seen.add(head.accepted(context))
        context += head.verify(context, drafts)
    assert len(seen) > 2


def test_a_stale_hidden_value_costs_accepted_drafts_and_never_the_text() -> None:
    head = ToyDraftHead(ToyModel())
    reference = head.expected(PROMPT, 8)
    context, accept_lengths, stale = list(PROMPT), [], head.hidden(PROMPT[:-1])
    while len(context) - len(PROMPT) < len(reference.tokens):
        drafts = head.drafts(context, stale)
        stale = head.hidden(context)
        accept_lengths.append(head.accept_length(context, drafts))
        context += head.verify(context, drafts)
    assert tuple(context[len(PROMPT) :]) == reference.tokens
    assert sum(accept_lengths) == 0 < sum(reference.accept_lengths)


def test_the_reference_of_a_speculative_loop_is_the_models_own_text() -> None:
    head = ToyDraftHead(ToyModel())
    run = head.expected(PROMPT, 8)
    assert list(run.tokens) == head.model.expected(PROMPT, len(run.tokens))
    assert len(run.tokens) == sum(length + 1 for length in run.accept_lengths)


def test_drafts_after_the_end_of_the_text_are_not_accepted() -> None:
    model = ToyModel(eos_every=2)
    head = ToyDraftHead(model, width=4)
    for first in range(1, 30):
        context = [first]
        accepted = head.accept_length(context, head.drafts(context, head.hidden(context)))
        assert accepted <= len(model.expected(context, 4))
        assert head.verify(context, head.drafts(context, head.hidden(context))) == model.expected(context, accepted + 1)


def test_kv_depends_on_the_kv_of_earlier_layers_that_the_token_attends_to() -> None:
    """A layer that is read too early makes wrong KV, in a chunk that draws no token too."""
    model, written = ToyModel(), []
    for change in (0, 1):
        rig = Rig(model)
        rig.compute(PROMPT, 0, 4, (0, 1, 2))
        rig.pool[0, 0, 1, 2, 0, 1] += change
        rig.compute(PROMPT, 4, 7, (0, 1, 2))
        written.append(rig.pool[1, :, :, :3].clone())
    assert [torch.equal(written[0][layer], written[1][layer]) for layer in range(3)] == [True, False, False]


@pytest.mark.parametrize("layer", range(3))
def test_each_layer_is_read_right_after_its_gate(layer: int) -> None:
    """What arrives with a later gate is too late."""
    model, drawn = ToyModel(), []
    for gate in (layer, layer + 1):
        rig = Rig(model)
        rig.compute(PROMPT, 0, 8, (0, 1, 2))
        loaded = rig.pool[0:2, layer].clone()
        rig.pool[0:2, layer] = 7.0

        class Gates(list[int]):
            def append(self, reached: int, rig: Rig = rig, gate: int = gate, loaded: torch.Tensor = loaded) -> None:
                if reached == gate:
                    rig.pool[0:2, layer] = loaded

        rig.gates = Gates()
        drawn.append(rig.compute(PROMPT, 8, len(PROMPT), (0, 1, 2)) == model.expected(PROMPT, 1)[0])
    assert drawn == [True, False]
