"""Tokens equal the reference's despite transfers, shared blocks, preemption and aborts."""

import random
from pathlib import Path

import pytest
from engine_rig import Reply, Rig, prompts, serving

from proof import faults
from proof.toy import ToyModel
from sidestream.schedule.scheduler import Committed
from sidestream_kv.types import StorePlan


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_preemption_and_shared_prefixes_in_tiny_pools_change_no_token(
    asynchronous: bool, offload: bool, tmp_path: Path
) -> None:
    options = {"slots": 24, "disk": tmp_path} if offload else {}
    with serving(blocks=24, asynchronous=asynchronous, **options) as rig:
        for batch in range(4):
            asked = prompts(batch // 2, 8, shared=24)  # each batch comes twice: some of it is still somewhere
            replies = [rig.submit(prompt, 16) for prompt in asked]
            for reply, prompt in zip(replies, asked, strict=True):
                rig.expect(reply, prompt, 16)
        assert rig.engine.parts.scheduler.num_preemptions > 0
        assert rig.counted("cached_tokens_total", "device") > 0
        if offload:
            assert rig.counted("transfers_total", "store", "done") > 0
            assert rig.counted("cached_tokens_total", "host") + rig.counted("cached_tokens_total", "disk") > 0
        assert rig.counted("load_fallbacks_total", "load_failed") == 0


def test_loads_and_recomputation_chosen_by_cost_change_no_token(tmp_path: Path) -> None:
    with serving(blocks=20, slots=12, disk=tmp_path, disk_blocks=40, always_load=False, load_deadline_s=0.01) as rig:
        for batch in range(4):
            asked = prompts(batch // 2, 8, shared=24)
            replies = [rig.submit(prompt, 12, priority=index % 3) for index, prompt in enumerate(asked)]
            for reply, prompt in zip(replies, asked, strict=True):
                rig.expect(reply, prompt, 12)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_random_aborts_change_no_token_of_other_requests(asynchronous: bool, tmp_path: Path) -> None:
    rng = random.Random(7)
    with serving(blocks=24, slots=16, disk=tmp_path, asynchronous=asynchronous) as rig:
        for batch in range(5):
            asked = prompts(batch // 2, 10, shared=24)
            replies: list[Reply] = []
            for prompt in asked:
                replies.append(rig.submit(prompt, 16))
                if rng.random() < 0.3:
                    rig.abort(rng.choice(replies))
                if rng.random() < 0.3:
                    replies[-1].wait_for_tokens(1)
                    rig.abort(replies[-1])
            for reply, prompt in zip(replies, asked, strict=True):
                reply.wait()
                assert reply.reason in ("length", "abort")
                expected = rig.model.expected(prompt, 16)
                assert reply.token_ids() == (
                    expected if reply.reason == "length" else expected[: len(reply.token_ids())]
                )
        assert rig.counted("requests_total", "abort") > 0
        assert rig.counted("requests_total", "length") > 0


def test_two_requests_with_a_shared_prefix_compute_it_once() -> None:
    with serving(blocks=40) as rig:
        prompt = prompts(0, 1, longest=1, shared=0)[0] + [5] * 40
        first, second = rig.submit([*prompt, 1], 4), rig.submit([*prompt, 2], 4)
        rig.expect(first, [*prompt, 1], 4)
        rig.expect(second, [*prompt, 2], 4)
        assert second.cached.device == 40


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_end_of_sequence_token_ends_an_answer_despite_a_launched_next_step(asynchronous: bool) -> None:
    with serving(model=ToyModel(eos_every=6), asynchronous=asynchronous) as rig:
        ended = 0
        for prompt in prompts(3, 12):
            reply = rig.submit(prompt, 10)
            expected = rig.model.expected(prompt, 10)
            assert reply.wait().token_ids() == expected
            assert reply.reason == ("stop" if expected[-1] == 0 else "length")
            assert reply.text() == rig.tokenizer.decode(expected)
            ended += expected[-1] == 0
        assert ended >= 3


def test_the_engines_tables_do_not_grow_over_300_requests(tmp_path: Path) -> None:
    with serving(blocks=24, slots=8, disk=tmp_path, disk_blocks=16) as rig:
        asked = prompts(11, 300, longest=10, shared=12)
        streams = list(rig.device._streams)
        for start in range(0, 300, 20):
            replies = [rig.submit(prompt, 2) for prompt in asked[start : start + 20]]
            for index, (reply, prompt) in enumerate(zip(replies, asked[start : start + 20], strict=True)):
                if index % 5:
                    rig.expect(reply, prompt, 2)
                else:
                    rig.abort(reply.wait())
        rig.settle()
        rig.check_idle()
        assert set(rig.device._streams) - set(streams) <= {
            f"{kind}-{number}" for kind in ("store", "load") for number in range(8)
        }
        assert rig.engine.parts.tiers is not None
        assert rig.engine.parts.tiers.host.pool.num_keys <= 8
        assert rig.disk is not None
        assert len(rig.disk.index) <= 16
        assert len(rig.engine.parts.executor._sampler._top_logprobs) <= 4
        assert rig.engine.parts.inbox.take() is None


def test_the_engine_thread_waits_for_steps_only(tmp_path: Path) -> None:
    with serving(blocks=24, slots=16, disk=tmp_path) as rig:
        for _ in range(2):
            for prompt in prompts(5, 4, shared=24):
                rig.ask(prompt)
            rig.settle()
            rig.forget_device()
        assert rig.counted("transfers_total", "load", "done") > 0
        assert set(rig.device.host_waits()) == {"step"}


def test_a_single_wrong_bit_from_a_tier_changes_the_tokens(tmp_path: Path) -> None:
    prompt = prompts(2, 1, longest=20, shared=20)[0] + [1] * 20
    rig = Rig(slots=16, disk=tmp_path)
    try:
        rig.ask(prompt)
        rig.settle()
        rig.forget_device()
        rig.forget_host()
        assert rig.disk is not None
        rig.disk.on_read = faults.lying
        reply = rig.submit(prompt)
        assert reply.wait().token_ids() != rig.model.expected(prompt, 8)
        assert reply.cached.disk > 0
    finally:
        rig.close()


def test_outputs_are_sent_before_blocks_are_published_and_ends_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing a thousand blocks that came back takes half a millisecond, which is others' time between tokens."""
    happened: list[str] = []
    with serving(blocks=64) as rig:
        scheduler = rig.engine.parts.scheduler
        publish = scheduler.publish

        def published(committed: Committed) -> StorePlan | None:
            completed = [request for request, _ in committed.completed]
            happened.append(f"publish {len(completed)}" if completed else "nothing")
            return publish(committed)

        monkeypatch.setattr(scheduler, "publish", published)
        long = rig.submit([5] * 6, 200, on_delta=lambda delta: happened.append("goes on"))
        long.wait_for_tokens(3)
        short = rig.submit([7] * 12, 1, on_delta=lambda delta: happened.append("ends"))
        short.wait()
        long.wait()
    at = happened.index("ends")
    assert happened[at - 1].startswith("publish")
    assert happened[at - 2] == "goes on"
