"""Engines whose host tier is the memory of one cache process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_rig import Reply, prompts, serving
from shared_rig import engines_of, running, wait_until

from proof.torture.events import EventReplay
from proof.toy import ToyModel
from sidestream.config import EngineConfig, KVEventsConfig
from sidestream.engine import Engine, build_engine
from sidestream_kv.config import OffloadConfig

PROMPT = prompts(21, 1, longest=1)[0] + list(range(1, 30))  # 30 tokens: 7 blocks that a cache may supply
REUSABLE = 28


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with running(tmp_path / "cache"):
        yield tmp_path / "cache"


def host_tokens(reply: Reply) -> int:
    return dict(reply.cached.by_tier).get("host", 0)


def test_the_first_request_of_a_restarted_engine_finds_its_blocks(memory: Path) -> None:
    with serving(slots=24, shared_memory=memory) as rig:
        reply = rig.ask(PROMPT)
        rig.settle()
    with serving(slots=24, shared_memory=memory) as rig:
        again = rig.ask(PROMPT)
        assert host_tokens(again) == REUSABLE
        assert again.token_ids() == reply.token_ids()
    wait_until(lambda: not engines_of(memory))


def test_kv_events_of_a_restarted_engine_tell_of_the_blocks_that_it_finds(memory: Path) -> None:
    with serving(slots=24, shared_memory=memory) as rig:
        rig.ask(PROMPT)
        rig.settle()
    model = ToyModel()
    size = model.layout.block_bytes
    offload = OffloadConfig(24 * size, shared_memory=memory)
    config = EngineConfig(kv_memory=24 * size, block_tokens=4, offload=offload, kv_events=KVEventsConfig())
    engine: Engine = build_engine(model, config, threaded=False)
    replay = EventReplay(engine)
    assert engine.parts.kv_events is not None
    engine.parts.kv_events.flush()
    assert len(replay.held["CPU"]) >= REUSABLE // 4
    engine.close()


def test_running_engines_find_each_others_blocks(memory: Path) -> None:
    with serving(slots=24, shared_memory=memory) as one, serving(slots=24, shared_memory=memory) as other:
        one.ask(PROMPT)
        one.settle()
        tiers = other.engine.parts.tiers
        assert tiers is not None
        wait_until(lambda: tiers.host.pool.num_keys >= REUSABLE // 4)
        found = other.ask(PROMPT)
        assert host_tokens(found) == REUSABLE


def test_a_request_finds_what_another_engine_stored_a_moment_ago(memory: Path) -> None:
    with serving(slots=24, shared_memory=memory) as one, serving(slots=24, shared_memory=memory) as other:
        other.ask(PROMPT[:3])  # has looked at the memory, and looks again by itself in 0.2 s
        one.ask(PROMPT)
        one.settle()
        assert host_tokens(other.ask(PROMPT)) == REUSABLE


def test_engines_that_evict_each_others_blocks_answer_as_without(memory: Path) -> None:
    asked = prompts(7, 24, longest=40, shared=24)
    with (
        serving(slots=12, blocks=16, shared_memory=memory) as one,
        serving(slots=12, blocks=16, shared_memory=memory) as other,
    ):
        replies = [((one, other)[number % 2], prompt) for number, prompt in enumerate(asked * 2)]
        pending = [(rig, prompt, rig.submit(prompt)) for rig, prompt in replies]
        for rig, prompt, reply in pending:
            rig.expect(reply, prompt)
        one.settle()
        other.settle()
    assert one.counted("transfers_total", "store", "failed") == other.counted("transfers_total", "load", "failed") == 0


def test_blocks_pass_through_a_shared_memory_to_the_disk_and_back(memory: Path, tmp_path: Path) -> None:
    with serving(slots=24, shared_memory=memory, disk=tmp_path / "disk") as rig:
        reply = rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        rig.forget_host()
        again = rig.ask(PROMPT)
        assert dict(again.cached.by_tier).get("disk", 0) == REUSABLE
        assert again.token_ids() == reply.token_ids()
