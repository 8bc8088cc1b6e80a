"""The benchmark of ranks: plans arrive in every way, and a rank that waits on its host is counted."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from command_runner import Run

from bench.broadcast import WAYS, decode_steps, measure_broadcast
from bench.scale import waits_of_rank
from proof.tiny_models import tiny_model_dir
from sidestream.ranks.follower import Follower
from sidestream.ranks.messages import StepDecoder, StepEncoder
from sidestream_kv.types import LayerGates

pytestmark = pytest.mark.slow


def test_every_way_brings_each_plan_to_every_rank() -> None:
    result = measure_broadcast(3, steps=12, rate=200.0, idle_s=0.1)
    assert set(result.ways) == set(WAYS)
    for arrivals in result.ways.values():
        assert len(arrivals.us) == 6 and min(arrivals.us) > 0  # the first half warms up
        assert arrivals.cpu > 0
    assert result.ways["ring"].idle_cpu > 2 * result.ways["socket"].idle_cpu  # it spins
    assert result.step_overhead_us > 0


def test_a_rank_that_waits_on_its_host_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model_dir("llama", tmp_path / "model", seed=0)
    waits, steps = waits_of_rank(model, tmp_path / "ranks")
    assert waits == 0 and steps > 40
    turn = Follower.turn

    def waiting(follower: Follower) -> Any:
        rest = turn(follower)
        for fence in rest.fences:
            follower._device.wait_host(fence, reason="test")
        return rest

    monkeypatch.setattr(Follower, "turn", waiting)
    assert waits_of_rank(model, tmp_path / "others")[0] > 0


def test_plans_are_decoded_as_they_were_encoded_apart_from_requests() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    for batch in islice(decode_steps(), 20):
        assert decoder.decode(encoder.encode(batch, (), LayerGates(()))) == batch


def test_one_rank_has_no_others_to_send_plans_to(run: Run) -> None:
    done = run("scale", "--ranks", "1")
    assert done.exit_code == 2 and "--ranks is 1" in done.stderr
