"""New weights under a running engine: nothing of the old ones is served afterwards (H8, H14)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from engine_rig import PATIENCE_S, prompts, serving

from proof.toy import ToyModel

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
