"""While an engine is paused, new requests wait and begun ones continue."""

from __future__ import annotations

from engine_rig import PATIENCE_S, prompts, serving

PROMPT, OTHER = prompts(11, 2)


def test_during_a_pause_a_begun_request_continues_and_a_new_one_waits() -> None:
    with serving() as rig:
        begun = rig.submit(PROMPT, 20)
        begun.wait_for_tokens(1)
        rig.engine.operations.pause()
        waiting = rig.submit(OTHER)
        rig.expect(begun, PROMPT, 20)
        assert waiting.is_silent()
        rig.engine.operations.resume()
        rig.expect(waiting, OTHER)


def test_health_and_metrics_say_that_the_engine_is_paused() -> None:
    with serving() as rig:
        rig.engine.operations.pause()
        rig.engine.operations.pause()  # idempotent
        health = rig.engine.health()
        assert (health.status, health.paused, rig.counted("admission_paused")) == ("ok", True, 1)
        assert "until resume" in health.detail
        rig.engine.operations.resume()
        assert (rig.engine.health().paused, rig.counted("admission_paused")) == (False, 0)


def test_new_weights_do_not_end_a_pause() -> None:
    with serving() as rig:
        rig.engine.operations.pause()
        assert rig.engine.update_weights(lambda: None, fingerprint="new").wait(PATIENCE_S)
        waiting = rig.submit(PROMPT)
        assert waiting.is_silent()
        rig.engine.operations.resume()
        rig.expect(waiting, PROMPT)
