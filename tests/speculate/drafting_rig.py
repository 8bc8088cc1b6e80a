"""Helpers of tests of proposers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidestream import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
PROMPTS = [
    [10 + position * step % 200 for position in range(length)] for step, length in ((3, 37), (7, 18), (11, 5), (5, 52))
]

Seen = dict[tuple[int, ...], list[list[int]]]
"""Drafts that were made behind which tokens."""


def check_drafts_from_every_source(
    llm: LLM, expected: Sequence[tuple[int, ...]], seen: Seen, drafts_behind: Callable[[tuple[int, ...]], list[int]]
) -> None:
    """Cold, from the device and from the host: the answers are `expected`, and each draft is what `drafts_behind` gives
    without an engine.
    """
    costs = llm.engine.parts.costs
    assert costs is not None
    costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]
    for source in ("nothing", "device", "host"):
        if source == "host":
            assert llm.flush()
            llm.engine.call(llm.engine.parts.blocks.forget_all)
        seen.clear()
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        assert (sum(output.cached.host for output in outputs) > 0) == (source == "host")
        steps = 0
        for tokens, every in seen.items():
            if not any(
                expected[number][: len(tokens) - len(prompt)] == tokens[len(prompt) :]
                for number, prompt in enumerate(PROMPTS)
            ):
                continue  # behind an answer's end
            steps += 1
            assert every == [drafts_behind(tokens)[: len(row)] for row in every]
        assert steps > 12
