"""Which layers leave their head norms and rotary embedding to attention, and that nothing comes out otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_rig import one_row

from proof.tiny_models import tiny_model_dir
from sidestream.models import PagedModel, load_model
from sidestream.models.adapter import PAGED
from sidestream.models.rotary import RotatingAttention, rotate_in_attention


def loaded(directory: Path, family: str = "qwen3", **changes: Any) -> PagedModel:
    return load_model(str(tiny_model_dir(family, directory, 1, **changes)), block_tokens=16, dtype="float32")


def logits(model: PagedModel) -> torch.Tensor:
    tokens = torch.arange(21)
    return model.forward(tokens * 7 % 200, tokens, one_row(torch.zeros(model.layout.shape(4)), 21), tokens)


def changed(model: PagedModel) -> int:
    rotate_in_attention(model.module, model.module)
    return sum(isinstance(part, RotatingAttention) for part in model.module.modules())


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 3),
        ("mistral", 3),
        ("qwen2", 3),
        ("qwen3", 3),
        ("qwen3_moe", 3),
        ("gemma2", 4),  # caps its scores, and two layers have a window
        ("granite_swa", 4),  # attention sinks
        ("gpt_oss", 4),  # the same, and embeddings of half the size
        ("gemma3", 0),  # norms that add one to their weights, and embeddings by kinds of layers
        ("glm4_moe", 0),  # rotates a part of each head
        ("olmo2", 0),  # norms over all heads
        ("minicpm3", 3),  # latents
        ("deepseek_v3", 3),
        ("glm4_moe_lite", 3),
        ("longcat_flash", 0),  # scales queries and latents
        ("deepseek_v2", 0),  # embeddings are complex numbers
        ("gpt_neo", 0),  # no rotary embedding
        ("llama4_text", 0),  # rotates pairs of neighbours
        ("gemma4_shared", 0),  # heads of two sizes
    ],
)
def test_layers_of_the_common_kind_are_changed_and_give_the_same(family: str, count: int, tmp_path: Path) -> None:
    model = loaded(tmp_path, family)
    expected = logits(model)
    assert changed(model) == count
    assert torch.equal(logits(model), expected)


def scaled_late(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor, **named: Any) -> Any:
        scaled = hidden_states * (1 + (position_ids[..., None] > 900))
        return own(self, scaled, position_ids=position_ids, **named)

    return forward


def gated(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, **named: (own(self, **named)[0] * 0.5, None)


def failing(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, **named: Any) -> Any:
        if self.config._attn_implementation != PAGED:
            raise TypeError("injected: no such argument")
        return own(self, **named)

    return forward


@pytest.mark.parametrize("wrap", [scaled_late, gated, failing])
def test_a_layer_with_anything_more_stays_as_it_is(
    wrap: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path)
    kind = type(model.module.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", wrap(kind.forward))
    expected = logits(model)
    assert changed(model) == 0
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("name", ["rotate_half", "apply_rotary_pos_emb"])
def test_a_model_that_rotates_otherwise_is_not_changed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path)
    names = vars(sys.modules[type(model.module).__module__])
    own = names[name]
    wrong = {
        "rotate_half": lambda states: torch.stack((-states[..., 1::2], states[..., ::2]), -1).flatten(-2),
        "apply_rotary_pos_emb": lambda query, key, *angles: (query, own(query, key, *angles)[1]),
    }
    monkeypatch.setitem(names, name, wrong[name])
    assert changed(model) == 0


def test_embeddings_of_unequal_halves_change_no_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(tmp_path)
    embed = model.module.model.rotary_emb
    own, factors = embed.forward, torch.linspace(1, 2, model.layout.head_dim)
    monkeypatch.setattr(embed, "forward", lambda *given: tuple(values * factors for values in own(*given)))
    assert changed(model) == 0


def test_another_epsilon_of_the_keys_is_noticed_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(tmp_path)
    model.module.model.layers[1].self_attn.k_norm.variance_epsilon *= 2
    with caplog.at_level("INFO"):
        assert changed(model) == 2
    assert "2 of 3 attention layers leave the rotary embedding to their attention" in caplog.text
