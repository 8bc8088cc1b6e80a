"""A key identifies a block by everything its KV depends on, equally in every process (H14)."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream_kv.kv import keys as keys_module
from sidestream_kv.kv.keys import KEY_BYTES, BlockKeys
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.types import Key

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=4, dtype="float32")
TOKENS = list(range(100, 112))
# What disks hold under these names must be found by every later version; a new way to make keys needs a new person
# string.
GOLDEN = ["dd86350350acc1bd6c1d60f86ca3cae6", "f1690f228b2ea85dfbb22b9b811d5e74", "e1996f2d7f8a003768f0f937b5997393"]


def keys_of(tokens: list[int], *, fingerprint: str = "model", layout: KVLayout = LAYOUT, salt: str = "") -> list[Key]:
    keys: list[Key] = []
    BlockKeys(fingerprint=fingerprint, layout=layout, salt=salt).extend(keys, tokens)
    return keys


def test_keys_equal_those_of_earlier_versions() -> None:
    assert [key.hex() for key in keys_of(TOKENS)] == GOLDEN


def test_keys_are_equal_in_every_process() -> None:
    program = (
        "from sidestream_kv.kv.keys import BlockKeys\n"
        "from sidestream_kv.kv.layout import KVLayout\n"
        "keys = []\n"
        f"BlockKeys(fingerprint='model', layout={LAYOUT!r}).extend(keys, {TOKENS})\n"
        "print(*[key.hex() for key in keys])\n"
    )
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert ran.stdout.split() == GOLDEN


def test_only_complete_blocks_have_keys() -> None:
    assert [len(keys_of(TOKENS[:count])) for count in (0, 1, 3, 4, 7, 8, 12)] == [0, 0, 0, 1, 1, 2, 3]
    assert {len(key) for key in keys_of(TOKENS)} == {KEY_BYTES}


@settings(deadline=None, derandomize=True, max_examples=50)
@given(tokens=st.lists(st.integers(0, 5), max_size=30), cut=st.integers(0, 30))
def test_keys_extended_in_two_calls_equal_keys_made_in_one(tokens: list[int], cut: int) -> None:
    maker, keys = BlockKeys(fingerprint="model", layout=LAYOUT), []
    maker.extend(keys, tokens[:cut])
    maker.extend(keys, tokens)
    assert keys == keys_of(tokens)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(one=st.lists(st.integers(0, 1), max_size=20), two=st.lists(st.integers(0, 1), max_size=20))
def test_keys_are_equal_exactly_if_prefixes_are_equal(one: list[int], two: list[int]) -> None:
    for index, (left, right) in enumerate(zip(keys_of(one), keys_of(two), strict=False)):
        stop = (index + 1) * LAYOUT.block_tokens
        assert (left == right) == (one[:stop] == two[:stop])


LONG = [7 * number % 151 for number in range(5000)]


def one_by_one(tokens: list[int], layout: KVLayout) -> list[Key]:
    """Keys made one block at a time, which are never cached."""
    maker, keys = BlockKeys(fingerprint="model", layout=layout), list[Key]()
    for stop in range(layout.block_tokens, len(tokens) + 1, layout.block_tokens):
        maker.extend(keys, tokens[:stop])
    return keys


@pytest.mark.parametrize("block_tokens", [1, 3, 4, 48, 512, 1024])
def test_cached_keys_equal_computed_keys(block_tokens: int) -> None:
    for length in [511, 512, 515, 1024, 5000]:
        for first in [0, 1, 128, 129]:
            layout = dataclasses.replace(LAYOUT, block_tokens=block_tokens)
            maker = BlockKeys(fingerprint="model", layout=layout)
            maker.extend([], LONG)
            for tokens in (LONG, [*LONG[:600], 999, *LONG[601:]], [*LONG[4:516], *LONG]):
                expected = one_by_one(tokens[:length], layout)
                keys = expected[:first]
                maker.extend(keys, tokens[:length])
                assert keys == expected


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All data hashed from now on."""
    hashed, blake2b = list[bytes](), hashlib.blake2b

    def noted(data: bytes, **how: Any) -> Any:
        if "person" not in how:  # the root's, which is no block's
            hashed.append(data)
        return blake2b(data, **how)

    monkeypatch.setattr(hashlib, "blake2b", noted)
    return hashed


def test_a_repeated_prompt_is_hashed_only_from_its_first_new_token(hashed: list[bytes]) -> None:
    maker = BlockKeys(fingerprint="model", layout=LAYOUT)
    for tokens, blocks in (
        (LONG, 1250),
        (LONG, 1250 % 128),  # a piece that is not whole
        ([*LONG[:1024], *LONG], 1250),  # the same tokens, but behind others
        (LONG[:1030], 1),
    ):
        hashed.clear()
        maker.extend([], tokens)
        assert len(hashed) == blocks


def test_the_cache_of_keys_is_bounded_and_evicts_least_recently_used_first(
    hashed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "_CACHE_BYTES", 3 * 15_000)  # a piece has 4,096 bytes of tokens and 128 keys
    maker = BlockKeys(fingerprint="model", layout=LAYOUT)
    one, two, three, four = ([number] * 512 for number in range(4))
    for tokens, blocks in (
        (one, 128),
        (two, 128),
        (three, 128),
        (one, 0),
        (four, 128),
        (one, 0),
        (three, 0),
        (two, 128),
    ):
        hashed.clear()
        maker.extend([], tokens)
        assert len(hashed) == blocks


def test_another_token_in_the_first_block_changes_all_keys() -> None:
    for changed in [0, 3]:
        other = [token + (index == changed) for index, token in enumerate(TOKENS)]
        assert not set(keys_of(other)) & set(keys_of(TOKENS))


def test_another_token_changes_the_keys_of_its_block_and_later_blocks() -> None:
    other = [*TOKENS[:5], 7, *TOKENS[6:]]
    assert [one == two for one, two in zip(keys_of(other), keys_of(TOKENS), strict=True)] == [True, False, False]


def test_equal_blocks_after_different_prefixes_have_different_keys() -> None:
    first, second = keys_of([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


OTHER_LAYOUTS = {
    "layers": dataclasses.replace(LAYOUT, num_layers=4),
    "heads": dataclasses.replace(LAYOUT, num_kv_heads=2),
    "head_dim": dataclasses.replace(LAYOUT, head_dim=8),
    "dtype": dataclasses.replace(LAYOUT, dtype="bfloat16"),
    "dtype of equal size": dataclasses.replace(LAYOUT, dtype="float16"),
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_layouts_share_no_keys(layout: KVLayout) -> None:
    assert not set(keys_of(TOKENS, layout=layout)) & set(keys_of(TOKENS))


def test_block_sizes_share_no_keys_even_if_blocks_end_at_the_same_token() -> None:
    wide = keys_of(TOKENS, layout=dataclasses.replace(LAYOUT, block_tokens=12))
    assert len(wide) == 1
    assert not set(wide) & set(keys_of(TOKENS))


def salted(salt: str, tokens: list[int] = TOKENS, *, maker: BlockKeys | None = None, split: int = 0) -> list[Key]:
    """Keys of a request with this cache salt; with `split`, made in two steps."""
    maker, keys = maker or BlockKeys(fingerprint="model", layout=LAYOUT), list[Key]()
    maker.extend(keys, tokens[:split], salt=salt)
    maker.extend(keys, tokens, salt=salt)
    return keys


def test_keys_are_shared_within_a_cache_salt_and_never_between_salts() -> None:
    variants = [salted(""), salted("a"), salted("b"), salted("ab"), salted("\ud800"), keys_of(TOKENS, salt="a")]
    assert len({key for keys in variants for key in keys}) == 3 * len(variants)
    assert salted("") == keys_of(TOKENS)
    assert salted("a", split=5) == salted("a")


def test_cached_keys_of_one_cache_salt_are_not_used_for_another() -> None:
    maker = BlockKeys(fingerprint="model", layout=LAYOUT)
    variants = [salted(salt, LONG, maker=maker) for salt in ("", "a", "b", "", "a", "b")]
    assert variants[:3] == variants[3:]
    assert len({key for keys in variants for key in keys}) == 3 * (len(LONG) // LAYOUT.block_tokens)


def test_models_and_salts_share_no_keys() -> None:
    variants = [
        keys_of(TOKENS),
        keys_of(TOKENS, fingerprint="other"),
        keys_of(TOKENS, salt="tenant"),
        keys_of(TOKENS, fingerprint="tenant"),
        keys_of(TOKENS, fingerprint="modeltenant"),
    ]
    assert len({key for keys in variants for key in keys}) == 3 * len(variants)
