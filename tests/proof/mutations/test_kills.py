"""The hunt works: rules of each room that are missed soon, by the oracle that should miss them, after the same number
of schedules each time.
"""

from __future__ import annotations

import pytest

from proof.mutations import find
from proof.torture import hunt, kill

# One or two of each room; all of them by `python -m proof torture --mutations`.
QUICK = {
    "release-keeps-its-fences": "checker",
    "key-contains-the-salt": "content",
    "only-committed-blocks-are-published": "checker",
    "finish-releases": "checker",
    "settled-blocks-are-released": "no progress",
    "store-waits-for-step": "checker",
    "disk-write-holds-its-slot": "checker",
    "every-bit-is-verified": "content",
    "slot-has-one-writer-and-no-reader": "content",
    "block-that-others-evicted-is-forgotten": "content",
    "ended-find-is-reported": "no progress",
    "sampled-token-stays-on-the-device": "tokens",
    "request-ends-before-its-client-is-notified": "answered",
    "requests-end-with-the-engine": "balance",
    "close-survives-a-lost-device": "error",
    "error-of-the-last-step-ends-the-engine": "balance",
    "failure-of-the-engine-is-delivered": "balance",
    "stream-numbers-are-not-reused": "answered",
    "end-is-sent-to-the-engine": "answered",
    "engine-side-drops-finished-streams": "balance",
}


@pytest.mark.parametrize(("name", "oracle"), QUICK.items())
def test_a_missing_rule_is_noticed_within_a_few_schedules(name: str, oracle: str) -> None:
    killed = kill(find(name), max_schedules=10)
    assert killed is not None
    assert killed.oracle == oracle, killed.detail
    assert killed.failure is not None and killed.failure.workload.features >= find(name).needs


def test_the_same_seed_kills_after_the_same_number_of_schedules_with_the_same_words() -> None:
    first, second = (kill(find("release-waits-for-the-transfers"), seed=3, max_schedules=60) for _ in range(2))
    assert first is not None and second is not None
    assert (first.after, first.oracle, first.detail) == (second.after, second.oracle, second.detail)


def test_a_mutation_without_effect_survives_and_is_reported_as_a_survivor() -> None:
    assert kill(find("finished-fences-are-dropped"), max_schedules=8) is None
    found = hunt(["load-waits-for-the-last-use"], max_schedules=1)
    assert [row.name for row in found.survivors] == ["load-waits-for-the-last-use"]
