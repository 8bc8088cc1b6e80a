"""Every served family against transformers' own generate, through a block pool, odd chunks and mixed batches."""

from __future__ import annotations

import itertools
import math
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from batch_rig import one_row
from transformers import AutoModelForCausalLM

from proof.tiny_models import FAMILIES, LATENT, tiny_model_dir
from sidestream.attention.paged import PagedBatch
from sidestream.models import PagedModel, load_model

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
BLOCK_TOKENS = 4


@dataclass
class Sequence:
    """A request of these tests: its prompt is computed `chunk` tokens at a time, from step `begins` on."""

    prompt: list[int]
    chunk: int
    begins: int
    tokens: list[int] = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def share(self) -> int:
        """Tokens of the next step."""
        return min(self.chunk, len(self.tokens) - self.computed)


def run(model: PagedModel, sequences: list[Sequence]) -> None:
    """Greedy decoding of all sequences in packed steps, their blocks scattered over the pool."""
    longest = sum(-(-(len(s.prompt) + NEW_TOKENS) // BLOCK_TOKENS) for s in sequences)
    pool = torch.full(model.layout.shape(longest + 2), math.nan, dtype=getattr(torch, model.layout.dtype))
    free = random.Random(5).sample(range(longest + 2), longest + 2)
    step = 0
    while active := [s for s in sequences if s.begins <= step and len(s.logits) < NEW_TOKENS]:
        launched(model, pool, free, sorted(active, key=lambda s: s.share > 1))
        step += 1


def launched(model: PagedModel, pool: torch.Tensor, free: list[int], rows: list[Sequence]) -> None:
    tokens, positions, slots, starts, samples = [], [], [], [0], []
    for row in rows:
        stop = row.computed + row.share
        while len(row.blocks) * BLOCK_TOKENS < stop:
            row.blocks.append(free.pop())
        tokens += row.tokens[row.computed : stop]
        positions += range(row.computed, stop)
        slots += [row.blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(row.computed, stop)]
        starts.append(len(tokens))
        row.computed = stop
        if stop == len(row.tokens):
            samples.append((row, len(tokens) - 1))
    tables = torch.zeros(len(rows), max(len(row.blocks) for row in rows), dtype=torch.int64)
    for index, row in enumerate(rows):
        tables[index, : len(row.blocks)] = torch.tensor(row.blocks)
    decodes = sum(stop - start == 1 for start, stop in itertools.pairwise(starts))
    batch = PagedBatch(
        pool,
        torch.tensor(slots),
        tables,
        tuple(starts),
        tuple(row.computed for row in rows),
        decodes,
        lambda layer: None,
    )
    logits = model.forward(
        torch.tensor(tokens), torch.tensor(positions), batch, torch.tensor([at for _, at in samples], dtype=torch.int64)
    )
    assert logits.shape == (len(samples), model.vocab_size)
    assert logits.dtype == pool.dtype
    for (row, _), drawn in zip(samples, logits, strict=True):
        row.logits.append(drawn.float())
        row.tokens.append(int(drawn.argmax()))


def generate(directory: Path, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Transformers' own greedy tokens and logits `[24, vocab]`, which no end of sequence cuts short."""
    # Eager, for transformers' default attention leaves out the soft cap of Gemma 2's scores.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0].tolist(), torch.cat(out.logits)


def mixed_sequences(vocab_size: int) -> list[Sequence]:
    """A long prompt; one that comes while the first decodes; one that takes its prompt while both do."""
    draws = random.Random(11)
    return [
        Sequence([draws.randrange(vocab_size) for _ in range(length)], chunk, begins)
        for length, chunk, begins in ((41, 7, 0), (23, 11, 8), (18, 5, 12))
    ]


@pytest.fixture(scope="module", params=sorted({**FAMILIES, **LATENT}))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(request.param, tmp_path_factory.mktemp(request.param), 3)


def test_mixed_steps_give_transformers_tokens_and_logits(directory: Path) -> None:
    model = load_model(str(directory), block_tokens=BLOCK_TOKENS)
    sequences = mixed_sequences(model.vocab_size)
    run(model, sequences)

    for sequence in sequences:
        tokens, logits = generate(directory, sequence.prompt)
        assert sequence.tokens == tokens
        # Logits reach about 5. Float32 rounds sums of 64 such terms to 64 * 5 * 2**-24 = 2e-5 a layer; there are up to
        # 6 layers.
        torch.testing.assert_close(torch.stack(sequence.logits), logits, atol=2e-4, rtol=0)


def test_bfloat16_logits_are_near_the_float32_logits(directory: Path) -> None:
    """Weights that were reordered for bfloat16 are still the same weights."""
    model = load_model(str(directory), dtype="bfloat16", block_tokens=BLOCK_TOKENS)
    assert model.layout.dtype == "bfloat16"
    (sequence, *_) = mixed_sequences(model.vocab_size)
    run(model, [sequence])

    _, expected = generate(directory, sequence.prompt)
    drawn = sequence.logits[0]
    # 8 bits in each of up to 6 layers: a few percent of the logits' spread. A wrong weight or window gives all of it.
    assert (drawn - expected[0]).square().mean().sqrt() < 0.15 * expected[0].std()


def test_the_forward_pass_may_run_on_another_thread_than_loading(tmp_path: Path) -> None:
    model = load_model(str(tiny_model_dir("llama", tmp_path, 3)), block_tokens=BLOCK_TOKENS)
    here, there = mixed_sequences(model.vocab_size), mixed_sequences(model.vocab_size)
    run(model, here)

    thread = threading.Thread(target=run, args=(model, there))
    thread.start()
    thread.join()

    assert [s.tokens for s in there] == [s.tokens for s in here]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_samples_nothing_has_no_logits(tmp_path: Path, dtype: str) -> None:
    model = load_model(str(tiny_model_dir("gemma2", tmp_path, 3)), dtype=dtype, block_tokens=BLOCK_TOKENS)
    pool = torch.zeros(model.layout.shape(1), dtype=getattr(torch, dtype))
    nothing = torch.empty(0, dtype=torch.int64)
    logits = model.forward(torch.tensor([1, 2, 3]), torch.arange(3), one_row(pool, 3), nothing)

    assert logits.shape == (0, model.vocab_size)
    assert pool[0, :, :, :3].abs().sum() > 0
