"""The self-check refuses a paged path with an error, in any dtype, and accepts rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaModel

from proof.tiny_models import tiny_model_dir
from sidestream.attention import paged
from sidestream.errors import ModelError
from sidestream.models import PagedModel, load_model
from sidestream.models.self_check import check_paged, reference

pytestmark = pytest.mark.slow

DTYPES = ("float32", "float16", "bfloat16")
_OWN = paged.paged_attention


def loaded(family: str, directory: Path, dtype: str, seed: int = 1, **changes: Any) -> PagedModel:
    return load_model(str(tiny_model_dir(family, directory, seed, **changes)), dtype=dtype, block_tokens=16)


def sharper(*args: Any, scale: float, **how: Any) -> torch.Tensor:
    return _OWN(*args, scale=scale * 1.05, **how)


def windowed(by: int) -> Callable[..., torch.Tensor]:
    def attend(*args: Any, sliding_window: int | None, **how: Any) -> torch.Tensor:
        return _OWN(*args, sliding_window=sliding_window and sliding_window + by, **how)

    return attend


def uncapped(*args: Any, softcap: float | None, **how: Any) -> torch.Tensor:
    return _OWN(*args, **how)


def swapped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
    return _OWN(query, key.flip(1), value.flip(1), *args, **how)


def forgetful(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, batch: Any, **how: Any
) -> torch.Tensor:
    """Wrong in decode rows alone."""
    return _OWN(query, key, value, layer, batch, **how) * (0.9 if batch.num_decode else 1)


ERRORS = {
    "scale": sharper,
    "window one longer": windowed(1),
    "window one shorter": windowed(-1),
    "no soft cap": uncapped,
    "KV heads swapped": swapped,
    "decodes": forgetful,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("error", ERRORS)
def test_the_self_check_refuses_wrong_attention(
    error: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "paged_attention", ERRORS[error])
    with pytest.raises(ModelError, match="paged attention and transformers' own give different values"):
        loaded("gemma2", tmp_path, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_refuses_positions_that_restart_in_chunks(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = PagedModel.forward

    def anew(self: PagedModel, tokens: torch.Tensor, positions: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return own(self, tokens, positions - positions[0], *args, **named)

    monkeypatch.setattr(PagedModel, "forward", anew)
    with pytest.raises(ModelError, match="the paged path computes the attention of layer 0 differently"):
        loaded("llama", tmp_path, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_check_refuses_state_outside_of_attention(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last norm that mixes in the token before, which a decode does not see."""
    own = LlamaModel.forward

    def mixing(self: LlamaModel, *args: Any, **named: Any) -> Any:
        out = own(self, *args, **named)
        out.last_hidden_state[:, 1:] += out.last_hidden_state[:, :-1].clone()
        return out

    monkeypatch.setattr(LlamaModel, "forward", mixing)
    with pytest.raises(ModelError, match="the paged path computes the logits differently"):
        loaded("llama", tmp_path, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["olmoe", "mixtral", "jetmoe"])
def test_the_self_check_accepts_experts_changed_by_rounding(family: str, dtype: str, tmp_path: Path) -> None:
    """Compared as a whole, logits of some seeds differ by 0.3 of their spread: one token of the first layer
    suffices.
    """
    for seed in (11, 14, 21, 33):
        assert loaded(family, tmp_path / str(seed), dtype, seed, num_hidden_layers=6).layout.dtype == dtype


def test_windows_equal_those_that_layers_pass_to_attention(tmp_path: Path) -> None:
    assert loaded("gemma3", tmp_path / "some", "float32").layout.windows == (12, 12, 12, 12, 12, 0)
    assert loaded("mistral", tmp_path / "all", "float32").layout.windows == (12,) * 3
    assert (
        loaded("mistral", tmp_path / "wide", "float32", sliding_window=1024).layout.windows == ()
    )  # no text is longer
    assert loaded("llama", tmp_path / "none", "float32").layout.windows == ()


def test_a_layer_that_later_attends_beyond_its_checked_window_raises(tmp_path: Path) -> None:
    """Loads leave out KV before a layer's window, so it must not be read."""
    model = loaded("gemma3", tmp_path, "float32")
    expected = reference(model)
    for window, said in ((13, "a sliding window of 13 tokens"), (None, "no sliding window")):
        model.module.model.layers[1].self_attn.sliding_window = window
        with pytest.raises(ModelError, match=f"layer 1 attends with {said}"):
            check_paged(model, expected)


def test_a_window_not_passed_to_attention_is_refused_if_contexts_exceed_it(tmp_path: Path) -> None:
    """PhiMoE masks by its window and does not pass it to attention; published models have one as long as their
    context.
    """
    assert loaded("phimoe", tmp_path / "wide", "float32", sliding_window=1024).max_model_len == 1024
    with pytest.raises(ModelError, match="layer 0 does not have the mask of causal attention with no sliding window"):
        loaded("phimoe", tmp_path / "narrow", "float32", sliding_window=12)
