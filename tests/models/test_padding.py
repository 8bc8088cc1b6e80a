"""Forward passes are padded to few lengths, and padding changes no result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batch_rig import one_row

from proof.tiny_models import tiny_model_dir
from sidestream.models import PagedModel, load_model
from sidestream.models.adapter import padded_length

BLOCK_TOKENS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    directory: Path = tmp_path_factory.mktemp("models")
    return load_model(tiny_model_dir("llama", directory, 1), dtype="float32", block_tokens=BLOCK_TOKENS)


def test_a_step_up_to_two_chunks_and_16_rows_has_one_of_few_lengths() -> None:
    fine = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    coarse = [32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 272, 320, 384, 448, 512, 528]
    assert sorted({padded_length(count) for count in range(1, 529)}) == fine + coarse


def test_padding_adds_a_quarter_at_most_or_up_to_a_multiple_of_16() -> None:
    for count in range(1, 3000):
        assert count <= padded_length(count) <= max(count * 5 / 4, (count + 15) // 16 * 16)
        assert padded_length(padded_length(count)) == padded_length(count)


def test_whole_chunks_and_single_tokens_are_not_padded() -> None:
    assert [padded_length(count) for count in (0, 1, 256, 512, 768, 4096)] == [0, 1, 256, 512, 768, 4096]


def test_decode_rows_beside_whole_chunks_add_16_tokens() -> None:
    assert {padded_length(256 + rows) for rows in range(1, 17)} == {272}
    assert {padded_length(768 + rows) for rows in range(1, 17)} == {784}


@pytest.mark.parametrize("count", [8, 9, 16, 17, 31, 32, 33])
def test_the_module_sees_padded_lengths_and_the_pool_only_real_tokens(model: PagedModel, count: int) -> None:
    seen: list[int] = []
    handle = model.module.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: seen.append(inputs[0].shape[-1])
    )
    pool = torch.full(model.layout.shape(12), 7.0)
    batch = one_row(pool, count)
    try:
        logits = model.forward(torch.arange(1, count + 1), torch.arange(count), batch, torch.tensor([count - 1]))
    finally:
        handle.remove()
    assert seen == [padded_length(count)]
    assert logits.shape == (1, model.vocab_size)
    by_token = pool.transpose(1, 3).reshape(12 * BLOCK_TOKENS, -1)
    assert bool((by_token[count:] == 7.0).all()), "padding reached the pool"
    assert not bool((by_token[:count] == 7.0).all(-1).any())


def test_logits_do_not_depend_on_the_padding(model: PagedModel) -> None:
    def last(count: int) -> torch.Tensor:
        batch = one_row(torch.zeros(model.layout.shape(12)), count)
        return model.forward(torch.arange(1, count + 1), torch.arange(count), batch, torch.arange(17))

    torch.testing.assert_close(last(17), last(32), atol=1e-5, rtol=1e-5)
