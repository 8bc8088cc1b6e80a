"""The time of a step, as the loop measures it."""

from __future__ import annotations

from engine_rig import Reply, prompts, serving

from sidestream.engine.stats import step_seconds
from sidestream.types import Delta, StepPlan


def test_step_time_is_the_larger_one_of_device_and_host_or_unknown() -> None:
    assert step_seconds(2.0, 1.0, before=True, awaited=True) == 2.0
    assert step_seconds(2.0, 1.0, before=False, awaited=True) is None  # it began nobody knows when
    assert step_seconds(2.0, 1.9, before=False, awaited=False) == 1.9
    assert step_seconds(2.0, 1.9, before=True, awaited=False) == 1.9
    assert (
        step_seconds(2.0, 0.9, before=True, awaited=False) == 2.0
    )  # by something else that the host does all the time


def test_queue_and_whole_time_are_observed_once_per_request_despite_preemptions() -> None:
    with serving(blocks=24) as rig:
        asked = prompts(0, 8, shared=24)
        for reply, prompt in zip([rig.submit(prompt, 16) for prompt in asked], asked, strict=True):
            rig.expect(reply, prompt, 16)
        assert rig.engine.parts.scheduler.num_preemptions > 0
        aborted = rig.submit(asked[0], 60)
        aborted.wait_for_tokens(1)
        rig.abort(aborted)
        aborted.wait()
        histograms = rig.engine.parts.metrics.snapshot().histograms
    queued, first, whole = (histograms[f"{name}_seconds"][()] for name in ("queue", "ttft", "e2e"))
    assert (queued.count, first.count, whole.count) == (9, 9, 8)
    assert 0 < queued.total < first.total < whole.total


def test_the_measured_prefill_rate_bounds_chunks_beside_a_decoding_request() -> None:
    burst = [[first, *(1 + at % 90 for at in range(399))] for first in (91, 92, 93)]
    with serving(blocks=1000, chunk_tokens=2048, token_budget=2100, target_gap_ms=50) as rig:
        times, scheduler = rig.engine.loop.times, rig.engine.parts.scheduler
        plan, chunks = scheduler.plan, list[list[int]]()

        def noted(**given: float | None) -> StepPlan:
            step = plan(**given)  # type: ignore[arg-type]
            chunks.append([row.stop - row.min_start for row in step.batch.rows if row.tokens is not None])
            return step

        def beside_talker(prompts: list[list[int]]) -> list[list[int]]:
            """The chunks of the steps that compute `prompts`, which arrive together while a request decodes."""
            replies = list[Reply]()

            def ask(delta: Delta) -> None:
                if not replies:
                    replies.extend(rig.submit(prompt, 1) for prompt in prompts)

            chunks.clear()
            rig.expect(rig.submit([3, 4, 5], 40, on_delta=ask), [3, 4, 5], 40)
            for reply, prompt in zip(replies, prompts, strict=True):
                rig.expect(reply, prompt, 1)
            return [step for step in chunks if step]

        scheduler.plan = noted  # type: ignore[method-assign]
        assert times.prefill_rate is None
        assert beside_talker(burst) == [[3], [400, 400, 400]]
        assert times.prefill_rate is not None
        times.prefill_rate = 1.0  # a device that takes a second for a token
        assert beside_talker([[94, *burst[0]]]) == [[3], [256], [145]]
