"""A draft model in the engine proposes its own greedy tokens, from whichever tier its KV is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_rig import GREEDY, PROMPTS, Seen, check_drafts_from_every_source
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, OffloadConfig, SpeculativeConfig
from sidestream.errors import ConfigError, ModelError
from sidestream.models import load_model
from sidestream.models.draft import attach_draft

pytestmark = pytest.mark.slow

DRAFTS = 3
# Other heads, other layers, and five numbers where the model has some power of two.
SMALLER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 10}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("model"), 3)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("draft"), 4, **SMALLER)


def engine(model: Path, draft: Path, **options: Any) -> LLM:
    speculative = SpeculativeConfig("draft", DRAFTS, adaptive=False, model=draft)
    defaults = {"dtype": "float32", "kv_memory": "1MiB", "max_running": 4, "compute_threads": 1, "check_order": True}
    return LLM(model, **{**defaults, "speculative": speculative, **options})


def plain_tokens(model: Path) -> list[tuple[int, ...]]:
    with LLM(model, dtype="float32", compute_threads=1) as plain:
        return [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]


class Alone:
    """The draft model by itself, over whole sequences, without a cache."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def goes_on(self, tokens: tuple[int, ...]) -> list[int]:
        given = torch.tensor([tokens])
        for _ in range(DRAFTS):
            given = torch.cat([given, self._model(given, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        drafts: list[int] = given[0, len(tokens) :].tolist()
        return drafts


@pytest.mark.parametrize("asynchronous", [True, False])
def test_drafts_equal_the_draft_models_own_tokens_from_every_tier(
    model: Path, draft: Path, asynchronous: bool, seen: Seen
) -> None:
    expected, alone = plain_tokens(model), Alone(draft)
    with engine(model, draft, asynchronous=asynchronous, chunk_tokens=32, offload=OffloadConfig(host="4MiB")) as llm:
        check_drafts_from_every_source(llm, expected, seen, alone.goes_on)


def test_all_drafts_of_a_model_for_itself_are_accepted(model: Path) -> None:
    expected = plain_tokens(model)
    with engine(model, model) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        drafted = llm.metrics.value("draft_tokens_total", "draft")
        assert llm.metrics.value("accepted_tokens_total", "draft") == drafted > 0


@pytest.mark.parametrize("length", [51, 56])
def test_no_draft_is_made_beyond_the_draft_models_last_position(length: int, tmp_path: Path) -> None:
    """A model with learned positions has none behind its last; a row at its end shares steps with one that drafts as
    much as may be.
    """
    path = tiny_model_dir("llama", tmp_path, 3)  # for its tokenizer
    config = GPT2Config(
        vocab_size=259, n_positions=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=256, bos_token_id=None
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    with engine(
        path, path, max_model_len=64, speculative=SpeculativeConfig("draft", 4, adaptive=False, model=path)
    ) as llm:
        prompts = [list(range(10, 10 + length)), [5, 6, 7]]
        params = [dataclasses.replace(GREEDY, max_tokens=64 - len(prompt)) for prompt in prompts]
        assert [len(output.token_ids) for output in llm.generate(prompts, params)] == [
            64 - len(prompt) for prompt in prompts
        ]


def test_blocks_stored_with_another_draft_model_or_none_are_no_hits(model: Path, draft: Path, tmp_path: Path) -> None:
    other = tiny_model_dir("llama", tmp_path / "other", 5, **SMALLER)
    loaded = [load_model(str(model), block_tokens=16) for _ in range(3)]
    for served, drafting in zip(loaded[1:], (draft, other), strict=True):
        attach_draft(served, load_model(str(drafting), block_tokens=16), max_model_len=64, num_tokens=200)
    assert len({served.fingerprint for served in loaded}) == 3


# ---------------------------------------------------------------------- refusals


def test_a_draft_model_that_does_not_fit_is_refused_with_both_values(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"supports 64 tokens, a request may have \d+: lower max_model_len"):
        engine(model, tiny_model_dir("llama", tmp_path / "short", 4, max_position_embeddings=64))
    with pytest.raises(
        ModelError,
        match=r"the draft model narrow has a vocabulary of 100 tokens, the tokenizer \d+: choose a draft model",
    ):
        engine(model, tiny_model_dir("llama", tmp_path / "narrow", 4, vocab_size=100))
    with pytest.raises(ModelError, match=r"the draft model: model .*nowhere: there is no such directory"):
        engine(model, tmp_path / "nowhere")
    stranger = tiny_model_dir("llama", tmp_path / "stranger", 4)
    tokenizer = AutoTokenizer.from_pretrained(stranger)
    tokenizer.add_tokens(["zymurgy"])
    other = tiny_model_dir("llama", tmp_path / "other", 3)
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match=r"has another tokenizer: 'zymurgy' is no token there, \d+ here"):
        engine(other, stranger)


def test_incomplete_draft_model_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="but model is not given: give a smaller model"):
        SpeculativeConfig("draft")
    with pytest.raises(
        ConfigError, match="the draft model is x, but the proposer is ngram: only the proposer draft has a draft model"
    ):
        SpeculativeConfig(model="x")
    assert dataclasses.replace(SpeculativeConfig("draft", model="x"), max_drafts=2).model == "x"
