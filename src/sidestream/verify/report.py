"""The outcome of `verify` as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from sidestream.verify.rounds import Report, Round, Wrong

_SHOWN = 2  # wrong answers of each round in the text


def as_text(report: Report) -> Iterator[str]:
    """Lines for a terminal."""
    for part in report.rounds:
        yield f"{'✗' if part.wrong else '·' if part.note and not part.compared else '✓'} {part.name}: {_summary(part)}"
        for wrong in part.wrong[:_SHOWN]:
            yield from (f"    {line}" for line in _lines(wrong))
        if len(part.wrong) > _SHOWN:
            yield f"    and {len(part.wrong) - _SHOWN} more, which --json lists"
    if not any(part.reused for part in report.rounds):
        yield (
            "The server did not say that it reused anything: is its prefix cache on? "
            "(vLLM says it with --enable-prompt-tokens-details)"
        )
    if report.smallest is not None:
        ask = report.smallest.ask
        kind = "temperature 0" if ask.seed is None else f"temperature 1, seed {ask.seed}"
        yield (
            f"smallest pair of requests: {ask.max_tokens} tokens with {kind} after the prompt {list(ask.prompt)}, "
            f"first when nothing is cached, then {report.smallest.round}"
        )
    found = len(report.wrong)
    yield (
        f"{found} wrong answers in {report.requests} requests; log-probabilities may differ by {report.tolerance:.3f}"
        + ("" if report.salts else ", an assumption: without separate salts, rounding could not be measured")
        + f"; --seed {report.seed} asks the same"
    )


def as_json(report: Report) -> dict[str, Any]:
    """Plain values. Prompts are token ids."""
    return {
        "wrong": len(report.wrong),
        "requests": report.requests,
        "tolerance": report.tolerance,
        "rounding_measured": report.salts,
        "seed": report.seed,
        "smallest": None if report.smallest is None else dataclasses.asdict(report.smallest),
        "rounds": [dataclasses.asdict(part) for part in report.rounds],
    }


def _summary(part: Round) -> str:
    if part.note and not part.compared:
        return part.note
    reused = "" if part.reused is None else f", {part.reused} prompt tokens reused"
    rounding = f", {part.rounding} with other tokens by rounding" if part.rounding else ""
    note = f"; {part.note}" if part.note else ""
    apart = f", at most {part.farthest:.2g} nats apart" if part.farthest else ""
    return f"{part.compared} answers{reused}{rounding}{apart}{note}"


def _lines(wrong: Wrong) -> Iterator[str]:
    where = f"token {wrong.differs_at}" if wrong.differs_at is not None else "no token, but the log-probabilities"
    kind = "greedy" if wrong.ask.seed is None else f"seed {wrong.ask.seed}"
    reused = f", {wrong.got.cached} reused" if wrong.got.cached is not None else ""
    yield (
        f"a prompt of {len(wrong.ask.prompt)} tokens ({kind}{reused}) differs at {where}, by {wrong.distance:.2f} nats"
    )
    yield f"expected {' '.join(map(repr, wrong.expected.tokens[:12]))}"
    yield f"answered {' '.join(map(repr, wrong.got.tokens[:12]))}"
    yield f"asked again: wrong {wrong.repeats} times of {wrong.asked_again}"
