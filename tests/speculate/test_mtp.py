"""A head drafts through the engine what it drafts without pools, rows, steps and tiers, whatever became of earlier
drafts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_rig import GREEDY, PROMPTS, Seen, check_drafts_from_every_source
from transformers import AutoModelForCausalLM

from proof.tiny_models import carry_head, save_head, tiny_model_dir
from sidestream import LLM, OffloadConfig, SpeculativeConfig
from sidestream.errors import ConfigError, ModelError
from sidestream.models.loader import weights_digest
from sidestream.models.mtp import MtpHead, load_head, write_head

pytestmark = pytest.mark.slow

DRAFTS = 3
ALWAYS = SpeculativeConfig("mtp", DRAFTS, adaptive=False)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = getattr(request, "param", "llama")
    return tiny_model_dir(family, tmp_path_factory.mktemp(family), 3)


@pytest.fixture(scope="module")
def head(model: Path) -> Path:
    return save_head(model, model.parent / "head.safetensors", seed=5)


class Reference:
    """transformers' model and the head over whole sequences, without a cache."""

    def __init__(self, model: Path, head: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.head: MtpHead = load_head(self.model, head)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def drafts(self, tokens: tuple[int, ...]) -> list[int]:
        """What is drafted behind `tokens`."""
        if tokens not in self._known:
            self._known[tokens] = self._drafts(tokens, DRAFTS)
        return self._known[tokens]

    @torch.inference_mode()
    def _drafts(self, tokens: tuple[int, ...], count: int) -> list[int]:
        given = torch.tensor([tokens])
        hidden = self.model.base_model(given, use_cache=False).last_hidden_state
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        for _ in range(count):
            length = given.shape[1]
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            predicts, feeds = self.head(given, before, torch.arange(length)[None], attention_mask=mask)
            given = torch.cat([given, self.head.logits(predicts[:, -1:]).argmax(-1)], dim=1)
            before = torch.cat([before, feeds[:, -1:]], dim=1)
        return given[0, len(tokens) :].tolist()


def engine(model: Path, head: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "kv_memory": "1MiB", "max_running": 4, "compute_threads": 1, "check_order": True}
    return LLM(model, **{**defaults, "speculative": dataclasses.replace(ALWAYS, head=head), **options})


@pytest.mark.parametrize(
    ("model", "asynchronous"),
    [("llama", True), ("llama", False), ("gemma2", True), ("gemma3", True), ("glm4_moe", True)],
    indirect=["model"],
)
def test_drafts_equal_those_of_the_head_alone_from_every_tier(
    model: Path, head: Path, asynchronous: bool, seen: Seen
) -> None:
    with LLM(model, dtype="float32", compute_threads=1) as plain:
        expected = [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]
    reference = Reference(model, head)
    with engine(model, head, asynchronous=asynchronous, chunk_tokens=32, offload=OffloadConfig(host="4MiB")) as llm:
        check_drafts_from_every_source(llm, expected, seen, reference.drafts)


def test_a_row_without_drafts_keeps_its_head_state_for_later_drafts(model: Path, head: Path, seen: Seen) -> None:
    reference = Reference(model, head)
    with engine(model, head) as llm:
        first = llm.generate(PROMPTS[:1], dataclasses.replace(GREEDY, max_drafts=0, max_tokens=20))[0]
        assert llm.metrics.value("draft_tokens_total", "mtp") == 0
        assert not seen
        llm.generate([[*PROMPTS[0], *first.token_ids]], GREEDY)
        assert len(seen) > 4
        for tokens, every in seen.items():
            assert every == [reference.drafts(tokens)[: len(row)] for row in every]


# ---------------------------------------------------------------------- files


def test_a_head_that_does_not_fit_is_refused_with_both_values(model: Path, head: Path, tmp_path: Path) -> None:
    wider = tiny_model_dir("llama", tmp_path / "wider", 3, hidden_size=96)
    with pytest.raises(ModelError, match=r"made for (model_type|hidden_size) \w+, but the model has \w+"):
        engine(model, save_head(wider, tmp_path / "wide.safetensors", seed=0))
    for other, fact in (
        ({"vocab_size": 300}, "vocab_size 300"),
        ({"hidden_size": 96}, "hidden_size 96"),
        ({"num_hidden_layers": 5}, "num_hidden_layers 5"),
    ):
        directory = tiny_model_dir("llama", tmp_path / fact, 3, **other)
        carry_head(directory, save_head(directory, tmp_path / f"{fact}.safetensors", seed=0), names="deepseek")
        with pytest.raises(ModelError, match=f"the head: .* was made for {fact}, but the model has"):
            engine(model, directory)
    with pytest.raises(ModelError, match="was made for vocab_size 300, but the model has"):
        engine(model, tmp_path / "vocab_size 300.safetensors")
    with pytest.raises(ModelError, match=r"contains no head: it has no tensors named mtp\.\*"):
        LLM(model, speculative=SpeculativeConfig("mtp"))
    with pytest.raises(ModelError, match="is no readable safetensors file"):
        (tmp_path / "torn.safetensors").write_bytes(head.read_bytes()[:100])
        engine(model, tmp_path / "torn.safetensors")
    with pytest.raises(ModelError, match="the head: there is no directory"):
        engine(model, Path("/nowhere/at/all"))
    with pytest.raises(ModelError, match=r"the head: there is no file nope\.safetensors: check the path"):
        engine(model, Path("nope.safetensors"))
    with pytest.raises(ConfigError, match="head is x, but the proposer is ngram: only mtp has a head"):
        SpeculativeConfig(head="x")


def test_a_head_trained_on_other_weights_is_used_with_a_warning(
    model: Path, head: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tiny_model_dir("llama", tmp_path / "other", 4)
    ours, theirs = weights_digest(str(model)), weights_digest(str(other))
    taught = load_head(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), head)
    write_head(taught, tmp_path / "taught.safetensors", record={"weights": ours})

    engine(other, tmp_path / "taught.safetensors").close()
    (warning,) = caplog.records
    assert (warning.levelname, warning.name) == ("WARNING", "sidestream.models.mtp")
    assert f"trained for weights {ours}, but the model in {other} has {theirs}" in warning.getMessage()

    caplog.clear()
    engine(
        model, tmp_path / "taught.safetensors", dtype="bfloat16"
    ).close()  # loaded in another dtype, they are the same
    engine(other, head).close()  # says nothing of whose it is
    assert not caplog.records
    with pytest.raises(ModelError, match="was made for hidden_size 64, but the model has 96"):
        engine(tiny_model_dir("llama", tmp_path / "wider", 3, hidden_size=96), tmp_path / "taught.safetensors")


def test_kv_stored_with_another_head_or_none_has_another_fingerprint(
    model: Path, head: Path, tmp_path: Path
) -> None:  # H14, H15
    other = save_head(model, tmp_path / "other.safetensors", seed=8)
    fingerprints = set()
    for options in (
        {},
        {"speculative": dataclasses.replace(ALWAYS, head=head)},
        {"speculative": dataclasses.replace(ALWAYS, head=other)},
    ):
        with LLM(model, dtype="float32", kv_memory="1MiB", compute_threads=1, **options) as llm:
            fingerprints.add(llm.engine.parts.executor._model.fingerprint)
    assert len(fingerprints) == 3


@pytest.mark.parametrize("names", ["qwen", "deepseek"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_head_in_a_checkpoint_is_found_by_its_familys_tensor_names(family: str, names: Any, tmp_path: Path) -> None:
    directory = tiny_model_dir(family, tmp_path / "model", 3)
    file = save_head(directory, tmp_path / "head.safetensors", seed=7)
    carry_head(directory, file, names=names)
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours, theirs = load_head(module, file), load_head(module, directory)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in ours.state_dict().items())
    assert theirs.feeds_normed == (names == "qwen")
    with LLM(
        directory, dtype="float32", compute_threads=1, speculative=SpeculativeConfig("mtp", 2, adaptive=False)
    ) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
        assert llm.metrics.value("draft_tokens_total", "mtp") > 0
