"""One sample's stream of deltas to its client."""

from __future__ import annotations

from engine_rig import serving

from sidestream.config import SamplingParams
from sidestream.engine.output_stream import OutputStream, TokenColumns
from sidestream.schedule.request import Request
from sidestream.types import Delta, RowResult


def stream_to(deltas: list[Delta]) -> OutputStream:
    request = Request(
        id=7,
        prompt=(1, 2, 3),
        sampling=SamplingParams().spec(seed=0, eos_ids=()),
        max_outputs=4,
        stop_ids=frozenset(),
        min_tokens=0,
    )
    return OutputStream(request, index=1, sink=deltas.append, arrival_s=0.0)


def test_a_delta_has_the_committed_tokens_of_a_result_only() -> None:
    delta = stream_to([]).delta_of(RowResult((5, 6, 7)), 2, "stop")
    assert (delta.index, delta.token_ids, delta.finish_reason, delta.prompt_tokens) == (1, (5, 6), "stop", 3)


def test_a_sink_that_raises_is_reported_to_the_caller() -> None:
    stream = stream_to([])
    stream._sink = lambda delta: 1 / 0  # type: ignore[assignment,return-value]
    assert not stream.send(stream.delta_of(RowResult((5,)), 1, None))


def test_ending_a_stream_with_an_error_sends_a_delta_with_it() -> None:
    deltas: list[Delta] = []
    stream_to(deltas).end("error", "injected")
    assert [(delta.token_ids, delta.finish_reason, delta.error) for delta in deltas] == [((), "error", "injected")]


def test_tokens_between_the_first_and_the_last_go_to_the_columns_of_the_client() -> None:
    columns, deltas = TokenColumns([], [], first=5), list[Delta]()
    with serving() as rig:
        params = SamplingParams(temperature=0, max_tokens=5, n=2)
        rig.engine.submit([1, 2, 3], params, deltas.append, columns=columns)
        rig.turn_until(lambda: not rig.engine.unfinished)
        first, *between, last = rig.model.expected([1, 2, 3], 5)
    assert [(delta.index, delta.token_ids) for delta in deltas] == [
        (0, (first,)),
        (1, (first,)),
        (0, (last,)),
        (1, (last,)),
    ]
    for stream in (5, 6):
        assert [token for at, token in zip(columns.streams, columns.tokens, strict=True) if at == stream] == between


def test_the_scheduler_has_released_a_request_before_its_client_gets_the_last_delta() -> None:  # H24
    held: list[bool] = []
    with serving() as rig:
        scheduler = rig.engine.parts.scheduler
        reply = rig.submit([1, 2, 3], 3, on_delta=lambda delta: held.append(bool(scheduler.requests())))
        reply.wait()
    assert held == [True, True, False]
