"""The torture test of ranks: its reference, its delays, and that a rule missing on one rank shows in the answers."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from proof.torture.conversations import LENGTH, TURNS, Conversation, hold_conversations
from proof.torture.rank_engine import write_model
from proof.torture.rank_program import Meddling, meddle
from proof.torture.rank_service import RanksReport, _Asked, _Traffic, torture_ranks
from sidestream.errors import ConfigError
from sidestream.types import TokenLogprob
from sidestream_kv.device.cpu import CpuDevice

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def conversations(model: Path) -> list[Conversation]:
    return hold_conversations(model, 3, seed=4, margin=0.02)


def test_answers_of_a_conversation_equal_the_models_own_tokens(model: Path, conversations: list[Conversation]) -> None:
    talk = conversations[1]
    start = random.Random(0).choice([start for start in talk.starts if talk.ends[start] > start + 3])
    stop = talk.ends[start]
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.inference_mode():
        logprobs = module(torch.tensor([talk.tokens[:stop]]), use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
    assert tuple(logprobs.argmax(-1).tolist()) == talk.tokens[start:stop]
    assert logprobs.amax(-1).tolist() == pytest.approx(talk.logprobs[start:stop], abs=1e-4)
    two = logprobs.topk(2, -1).values
    assert (two[:, 0] - two[:, 1]).min() >= 0.019  # so that rounding changes no token


def test_only_certain_tokens_of_answers_are_asked_for(conversations: list[Conversation]) -> None:
    answered, at = set(), 0
    for user, answer in TURNS:
        answered.update(range(at + user, at + user + answer))
        at += user + answer
    uncertain = 0
    for talk in conversations:
        assert len(talk.tokens) == len(talk.logprobs) == len(talk.ends) == LENGTH
        asked = {at for start in talk.starts for at in range(start, talk.ends[start])}
        assert asked <= answered
        uncertain += len(answered - asked)
    assert 0 < uncertain < len(answered)


def test_neighbours_share_their_first_turns(conversations: list[Conversation]) -> None:
    first, second, third = (talk.tokens for talk in conversations)
    one, two = (sum(map(sum, TURNS[:count])) for count in (1, 2))
    assert first[:two] == second[:two]
    assert first[two:] != second[two:]
    assert first[:one] == third[:one]
    assert first[one:two] != third[one:two]


def judged(change: Any, *, reason: str = "length") -> RanksReport:
    """The report on an answer of three tokens, of which `change` makes another one."""
    talk = Conversation((1, 2, 3, 4, 5), (0.0, -1.0, -2.0, -1.0, -0.5), (0, 1, 5, 5, 5), (2, 3, 4))
    right = [TokenLogprob(talk.tokens[at], talk.logprobs[at], ()) for at in (2, 3, 4)]
    report = RanksReport()
    engine = cast(Any, SimpleNamespace())
    one = _Asked(talk, 2, 3, None, given=change(right), reason=reason)
    _Traffic(engine, [talk], report, seed=0, near=1e-3, ranks=2)._judge(one)
    return report


@pytest.mark.parametrize(
    ("change", "reason", "finding"),
    [
        (lambda given: given, "length", ""),
        (lambda given: given[:2], "abort", ""),
        (lambda given: given[:2], "length", "2 tokens were given, 3 expected"),
        (lambda given: [*given, given[0]], "abort", "4 tokens were given, 3 expected"),
        (lambda given: [given[0], TokenLogprob(9, -1.0, ()), given[2]], "length", "output 1 is wrong: token 9"),
        (lambda given: [*given[:2], TokenLogprob(5, -0.498, ())], "length", "output 2 is wrong: token 5"),
        (lambda given: [*given[:2], TokenLogprob(5, float("nan"), ())], "length", "output 2 is wrong: token 5"),
        (lambda given: given, "error", "ended with error"),
    ],
)
def test_an_answer_is_wrong_if_a_token_its_logprob_or_its_length_is(change: Any, reason: str, finding: str) -> None:
    report = judged(change, reason=reason)
    assert report.requests == 1
    assert report.wrong == bool(finding)
    assert finding in "".join(report.findings)


def test_each_rank_delays_its_steps_stores_and_disk_by_other_times() -> None:
    spans = []
    for rank in (0, 1):
        device = CpuDevice(compute_threads=1)
        always = (1.0, 5e-3, 50e-3)
        meddle(rank, device, Meddling(3, 4096, always, always, faults=0.0))
        assert device.segment_bytes == 4096
        ends: list[float] = []
        done = threading.Event()
        try:
            for stream in (device.stream("compute"), device.worker("disk-write")):
                before_s = time.monotonic()
                done.clear()
                stream.submit(done.set, label="work")
                assert done.wait(5.0)
                ends.append(time.monotonic() - before_s)
        finally:
            device.close()
        assert min(ends) >= 5e-3
        spans.append(ends)
    assert spans[0] != pytest.approx(spans[1], abs=1e-3)


def test_warm_up_is_not_delayed_because_a_graph_would_keep_the_delay() -> None:
    device = CpuDevice(compute_threads=1)
    meddle(0, device, Meddling(0, 4096, (1.0, 30.0, 31.0), (0.0, 1e-3, 1e-3), faults=0.0))
    done = threading.Event()
    try:
        device.stream("compute").submit(done.set, label="capture")
        assert done.wait(5.0)
    finally:
        device.close()


def test_a_rule_that_only_one_other_rank_lacks_shows_in_the_answers_h5() -> None:
    """Rank 0 waits for its loads; rank 1, in its own process, reads layers that are not loaded yet."""
    report = torture_ranks("cpu", ranks=2, blocks=2000, seed=1, late=True, without=["layer-waits-for-its-load"])
    assert report.wrong > 0
    assert "is wrong" in report.findings[0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("without", [(), ("captured-layer-waits-for-its-load",)], ids=["clean", "without"])
def test_two_gpus_answer_right_from_every_tier_unless_a_rule_is_missing(without: tuple[str, ...]) -> None:
    report = torture_ranks("cuda", ranks=2, blocks=20_000, seed=1, late=bool(without), without=without)
    assert bool(report.findings) == bool(without), report.findings
    if not without:
        least = (report.from_device, report.from_host, report.from_disk, report.preemptions, report.failed)
        assert report.blocks >= 20_000
        assert min(*least, report.aborted, report.accepted) > 0


def test_invalid_options_are_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match="blocks is 0: give a whole number from 1"):
        torture_ranks("cpu", ranks=2, blocks=0)
    with pytest.raises(ConfigError, match="no device gpu"):
        torture_ranks("gpu", ranks=2, blocks=1)
    for ranks in (1, 3, 16):
        with pytest.raises(ConfigError, match=rf"tensor_parallel is {ranks}: .* give 2 or 4 or 8"):
            torture_ranks("cpu", ranks=ranks, blocks=1)
