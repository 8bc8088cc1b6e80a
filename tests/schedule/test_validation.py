"""A front end checks requests and makes keys like the engine, from the few facts that the engine sends it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.config import SamplingParams
from sidestream.errors import ContextTooLong, RequestError, RequestRejected
from sidestream.schedule.limits import Bounds, RequestChecker
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.types import Key

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=4, dtype="float32")
BOUNDS = Bounds(max_model_len=64, pool_tokens=48, block_tokens=4, vocab_size=97, max_unfinished=6, padding_token=95)
PARAMS = SamplingParams()


def no_keys(tokens: npt.NDArray[np.int64], cache_salt: str) -> tuple[list[Key], int]:
    return [], 3


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(0, 1 << 31), max_size=40), st.text(max_size=4), st.text(max_size=4))
def test_keys_made_from_a_root_equal_those_of_the_engine(tokens: list[int], salt: str, cache_salt: str) -> None:
    own = BlockKeys(fingerprint="model", layout=LAYOUT, salt=salt)
    theirs = BlockKeys.from_root(own.root, LAYOUT.block_tokens)
    expected: list[Key] = []
    made: list[Key] = []
    own.extend(expected, tokens, salt=cache_salt)
    theirs.extend(made, tokens, salt=cache_salt)
    assert made == expected
    assert len(made) == len(tokens) // 4


def test_different_roots_share_no_keys() -> None:
    tokens, made = list(range(40)), list[list[Key]]()
    for salt in ("", "a"):
        made.append([])
        BlockKeys.from_root(BlockKeys(fingerprint="model", layout=LAYOUT, salt=salt).root, 4).extend(made[-1], tokens)
    assert not set(made[0]) & set(made[1])


def test_a_checked_request_has_all_that_the_engine_needs() -> None:
    asked: list[tuple[list[int], str]] = []

    def keys_of(tokens: npt.NDArray[np.int64], cache_salt: str) -> tuple[list[Key], int]:
        asked.append((tokens.tolist(), cache_salt))
        return [b"k" * 16], 7

    request = RequestChecker(BOUNDS, keys_of).check(np.arange(1, 7), PARAMS, seed=5, priority=-2, cache_salt="a")  # type: ignore[arg-type]
    assert asked == [([1, 2, 3, 4, 5, 6], "a")]
    assert request.prompt == (1, 2, 3, 4, 5, 6)
    assert {type(token) for token in request.prompt} == {int}
    assert (request.keys, request.keys_version, request.seed, request.priority, request.cache_salt) == (
        [b"k" * 16],
        7,
        5,
        -2,
        "a",
    )


def test_the_seed_of_the_params_is_used_before_a_random_one() -> None:
    checker = RequestChecker(BOUNDS, no_keys)
    assert [checker.check([1], SamplingParams(seed=seed), seed=5).seed for seed in (None, 0, -3)] == [5, 0, -3]


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 38), (5, 5), (38, 38), (100, 38)])
def test_max_tokens_is_clipped_to_the_smaller_limit_of_model_and_pool(max_tokens: int | None, expected: int) -> None:
    assert (
        RequestChecker(BOUNDS, no_keys).check([1] * 10, SamplingParams(max_tokens=max_tokens)).max_outputs == expected
    )


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    checker = RequestChecker(BOUNDS, no_keys)
    assert checker.check([1] * 47, PARAMS).max_outputs == 1
    with pytest.raises(
        ContextTooLong, match=r"^prompt has 48 tokens, the pool holds 48 \(12 blocks x 4\) with at least one of output"
    ):
        checker.check([1] * 48, PARAMS)
    with pytest.raises(
        ContextTooLong, match=r"^prompt has 64 tokens, the model takes 64 with at least one of output: shorten it$"
    ):
        checker.check([1] * 64, PARAMS)


@pytest.mark.parametrize(
    ("prompt", "params", "options", "words", "param"),
    [
        ([], {}, {}, "^the prompt is empty: give at least one token$", "prompt"),
        ([5, -1], {}, {}, "^the prompt has token id -1: the model knows 0 to 96$", "prompt"),
        ([97], {}, {}, "^the prompt has token id 97: the model knows 0 to 96$", "prompt"),
        ([1 << 70], {}, {}, f"^the prompt has token id {1 << 70}: the model knows 0 to 96$", "prompt"),
        ([5, 95], {}, {}, "^the prompt has the padding token 95, whose position this model does not count", "prompt"),
        (7, {}, {}, "^prompt is 7: give a list of whole numbers$", "prompt"),
        ([True], {}, {}, "^prompt has True, which is not a whole number$", "prompt"),
        ([1], {"logit_bias": {97: 1.0}}, {}, "^logit_bias has token id 97: the model knows 0 to 96$", "logit_bias"),
        (
            [1],
            {"stop_token_ids": (200,)},
            {},
            "^stop_token_ids has token id 200: the model knows 0 to 96$",
            "stop_token_ids",
        ),
        ([1], {"n": 7}, {}, "^n is 7: the engine takes 6 samples at a time; ask for fewer$", "n"),
        ([1] * 40, {"min_tokens": 9}, {}, "^min_tokens is 9: after this prompt, the limit is 8$", "min_tokens"),
        ([1], {}, {"cache_salt": 5}, "^cache_salt is a int: give a text of at most", "cache_salt"),
        ([1], {}, {"priority": "high"}, "^priority has 'high', which is not a whole number$", "priority"),
        ([1], {}, {"priority": 1 << 63}, f"^priority is {1 << 63}: give a number of 64 bits$", "priority"),
        (
            [1],
            {},
            {"priority": -(1 << 63) - 1},
            f"^priority is {-(1 << 63) - 1}: give a number of 64 bits$",
            "priority",
        ),
    ],
)
def test_a_refusal_names_the_field_of_the_request(
    prompt: Any, params: Any, options: Any, words: str, param: str
) -> None:
    def no_work(tokens: npt.NDArray[np.int64], cache_salt: str) -> tuple[list[Key], int]:
        raise AssertionError("keys of a refused request are made")

    with pytest.raises(RequestRejected, match=words) as refusal:
        RequestChecker(BOUNDS, no_work).check(prompt, SamplingParams(**params), **options)
    assert refusal.value.param == param
    assert isinstance(refusal.value, RequestError)


@pytest.mark.parametrize("bound", [1, 1000])
def test_the_longest_context_is_the_smaller_limit_of_model_and_pool(bound: int) -> None:
    assert dataclasses.replace(BOUNDS, max_model_len=bound).longest == min(bound, 48)
