"""Keys are judged by the identities of their blocks: another hash has no finding, a key without a part of its block's
identity has one (H14).
"""

from __future__ import annotations

import dataclasses

import pytest

from proof.mutations import Feature, applied, find
from proof.torture import Asked, Workload, draw_workload, kill, reference_of
from proof.torture.contents import contents_of

PROMPT = tuple(range(1, 14))
HARMLESS = find("keys-have-a-version")
WORKLOAD = Workload(
    0,
    (
        Asked(0, PROMPT, 2),
        Asked(0, (50, *PROMPT[1:]), 2),  # a twin: its second and third block hold equal tokens
        Asked(1, PROMPT, 2, salt="one"),
    ),
)


@pytest.mark.parametrize("needs", [(), ("cache_salts",), ("twins", "disk"), ("cache_salts", "border")])
def test_another_hash_of_the_same_parts_survives(needs: tuple[Feature, ...]) -> None:
    assert kill(dataclasses.replace(HARMLESS, needs=frozenset(needs)), max_schedules=3) is None


def test_another_hash_changes_all_keys_and_no_content() -> None:
    reference = reference_of(WORKLOAD)
    contents = contents_of(WORKLOAD, reference)
    with applied(HARMLESS):
        changed = contents_of(WORKLOAD, reference)
    assert contents.collisions == changed.collisions == []
    assert not contents.blocks.keys() & changed.blocks.keys()
    assert sorted(contents.blocks.values()) == sorted(changed.blocks.values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("key-contains-its-prefix", "the block behind"),
        ("key-contains-every-block-before", "the block behind"),
        ("key-contains-its-tokens", "the block behind"),
        ("key-contains-the-requests-salt", "with salt 'one'"),
        ("key-contains-the-salt", "an engine with another salt has the key"),
        ("key-contains-the-weights", "an engine with other weights has the key"),
        ("key-contains-the-layout", "an engine with another dtype has the key"),
        ("key-contains-the-states", "an engine with other recurrent states has the key"),
    ],
)
def test_a_key_without_a_part_of_its_blocks_identity_is_noticed(name: str, text: str) -> None:
    reference = reference_of(WORKLOAD)
    with applied(find(name)):
        collisions = contents_of(WORKLOAD, reference).collisions
    assert any(text in collision for collision in collisions), collisions


def test_workloads_have_salts_and_twins() -> None:
    features = [draw_workload(seed).features for seed in range(80)]
    assert any("cache_salts" in some for some in features)
    assert any("twins" in some for some in features)
    assert "twins" in WORKLOAD.features
    assert "twins" not in dataclasses.replace(WORKLOAD, requests=WORKLOAD.requests[:1]).features
