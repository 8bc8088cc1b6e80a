"""New weights under a running engine: nothing of the old ones is served afterwards (H8, H14)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from engine_rig import PATIENCE_S, prompts, serving

from proof.tiny_models import tiny_model_dir
from proof.toy import ToyModel
from sidestream import LLM, OffloadConfig, SamplingParams
from sidestream.errors import CallTimeout, DeviceLost, EngineStopped, RequestRejected

PROMPT = prompts(3, 1, longest=1, shared=0)[0] + list(range(2, 25))


class Retrained(ToyModel):
    """Draws other tokens once it was retrained."""

    trained = 0

    def next_token(self, seen: npt.NDArray[np.int64]) -> int:
        return 1 + (super().next_token(seen) + self.trained) % (self.vocab_size - 1)

    def retrain(self) -> None:
        self.trained += 1


def answers(model: Retrained, prompt: Sequence[int], trained: int, count: int = 8) -> list[int]:
    other = Retrained()
    other.trained = trained
    return other.expected(list(prompt), count)


def test_blocks_of_old_weights_are_reused_from_no_tier(tmp_path: Path) -> None:
    model = Retrained()
    with serving(model=model, blocks=24, slots=24, disk=tmp_path) as rig:
        rig.ask(PROMPT)
        rig.settle()
        assert rig.engine.update_weights(model.retrain, fingerprint="retrained").wait(PATIENCE_S)
        reply = rig.ask(PROMPT)
        assert reply.cached.total == 0
        assert reply.token_ids() == answers(model, PROMPT, 1) != answers(model, PROMPT, 0)
        rig.settle()
        rig.forget_device()
        assert rig.ask(PROMPT).cached.host > 0, "what is computed with the new weights is found"


def test_running_requests_finish_on_old_weights_and_waiting_ones_use_new_weights() -> None:
    model = Retrained()
    with serving(model=model, max_running=2) as rig:
        with rig.hold("compute"):
            begun = rig.submit(PROMPT, 8)
            rig.turn_until(lambda: rig.engine.num_steps > 0)
            waiting = rig.submit(PROMPT, 8)
            done = rig.engine.update_weights(model.retrain, fingerprint="retrained")
        assert done.wait(PATIENCE_S)
        assert begun.wait().token_ids() == answers(model, PROMPT, 0)
        assert waiting.wait().token_ids() == answers(model, PROMPT, 1)
        assert waiting.cached.total == 0


def test_a_store_running_during_a_weight_change_publishes_no_block() -> None:
    model = Retrained()
    with serving(model=model, blocks=24, slots=24) as rig:
        with rig.hold("store"):
            rig.ask(PROMPT)
            assert rig.engine.update_weights(model.retrain, fingerprint="retrained").wait(PATIENCE_S)
        rig.settle()
        assert rig.engine.parts.tiers is not None
        assert rig.engine.parts.tiers.host.pool.num_keys == 0


def test_keys_computed_before_a_weight_change_are_recomputed() -> None:
    model = Retrained()
    with serving(model=model) as rig:
        old = rig.engine.parts.scheduler.keys_of(PROMPT)
        assert rig.engine.update_weights(model.retrain, fingerprint="retrained").wait(PATIENCE_S)
        rig.ask(PROMPT)
        assert rig.engine.parts.blocks.match(old) == []
        assert len(rig.engine.parts.blocks.match(rig.engine.parts.scheduler.keys_of(PROMPT))) > 0


# ------------------------------------------------------------------ weights of a checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    wide = {"intermediate_size": 80}
    return {
        "served": tiny_model_dir("llama", root / "served", 0),
        "trained": tiny_model_dir("llama", root / "trained", 1),
        "wide": tiny_model_dir("llama", root / "wide", 2, **wide),
        "other": tiny_model_dir("qwen3", root / "other", 3),
    }


def answer(llm: LLM) -> tuple[int, ...]:
    return llm.generate("The whale sings a song of", SamplingParams(temperature=0, max_tokens=12))[0].token_ids


def test_weights_of_another_checkpoint_are_served_and_old_kv_is_not(checkpoints: dict[str, Path]) -> None:
    sizes = {"kv_memory": "4MiB", "offload": OffloadConfig("4MiB")}
    with LLM(checkpoints["trained"], **sizes) as llm:
        expected = answer(llm)
    with LLM(checkpoints["served"], **sizes) as llm:
        before = answer(llm)
        llm.update_weights(str(checkpoints["trained"]))
        assert answer(llm) == expected != before
        llm.update_weights(str(checkpoints["served"]))
        assert answer(llm) == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("wide", r"model.layers.0.mlp.gate_proj.weight has shape \[80, .* in the served model"),
        ("other", "is only in the"),
        ("missing", "the weights stay as they are"),
    ],
)
def test_weights_that_do_not_fit_are_refused(checkpoints: dict[str, Path], path: str, message: str) -> None:
    with LLM(checkpoints["served"], kv_memory="4MiB") as llm:
        before = answer(llm)
        with pytest.raises(RequestRejected, match=message):
            llm.update_weights(str(checkpoints.get(path, checkpoints["served"].parent / path)))
        assert answer(llm) == before


def test_weights_wait_for_running_requests_as_long_as_the_caller_allows() -> None:
    model = Retrained()
    with serving(model=model, read_weights=lambda path: (model.retrain, path)) as rig:
        with rig.hold("compute"):
            begun = rig.submit(PROMPT, 8)
            rig.turn_until(lambda: rig.engine.num_steps > 0)
            with pytest.raises(CallTimeout, match=r"within 0\.01 s: the new weights are read, and taken"):
                rig.engine.operations.update_weights("new", timeout_s=0.01)
        assert begun.wait().token_ids() == answers(model, PROMPT, 0)
        rig.turn_until(lambda: model.trained == 1)


def test_weights_that_fail_on_the_device_end_the_engine() -> None:
    def fail() -> None:
        raise DeviceLost("half of them are there")

    with serving(read_weights=lambda path: (fail, path)) as rig:
        with pytest.raises(EngineStopped, match="the weights were not replaced, because the engine has stopped"):
            rig.engine.operations.update_weights("new")
        assert "half of them are there" in rig.engine.health().detail


def test_an_engine_without_a_checkpoint_says_why_it_keeps_its_weights() -> None:
    with serving() as rig, pytest.raises(RequestRejected, match="because it was built without a checkpoint"):
        rig.engine.operations.update_weights("new")
