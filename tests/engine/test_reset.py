"""After a reset no block of before is found, in any tier; what runs goes on (H8)."""

from pathlib import Path

from engine_rig import Rig

PROMPT = list(range(1, 24))


def test_nothing_of_before_is_found_after_a_reset(tmp_path: Path) -> None:
    rig = Rig(slots=24, disk=tmp_path)
    try:
        rig.ask(PROMPT)
        assert rig.ask(PROMPT).cached.total > 0
        rig.engine.flush(timeout_s=20)
        rig.engine.reset_cache()
        assert rig.ask(PROMPT).cached.total == 0
        assert rig.ask(PROMPT).cached.device > 0
    finally:
        rig.close()


def test_request_that_runs_during_a_reset_gets_its_tokens(tmp_path: Path) -> None:
    rig = Rig(slots=24, disk=tmp_path)
    try:
        reply = rig.submit(PROMPT, max_tokens=40)
        reply.wait_for_tokens(3)
        rig.engine.reset_cache()
        assert reply.wait().token_ids() == rig.model.expected(PROMPT, 40)
    finally:
        rig.close()
