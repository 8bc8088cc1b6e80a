"""Allowed token ids and bad words, alone and with a grammar."""

from __future__ import annotations

import numpy as np

from proof.toy_grammar import ToyGrammar
from sidestream.grammar import RuledAnswer


def allowed(rules: RuledAnswer, *drafts: int) -> list[set[int]]:
    masks = np.zeros((1 + len(drafts), 2), np.int32)
    rules.fill(masks, drafts)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [{*map(int, np.flatnonzero(row))} for row in bits]


def test_only_allowed_tokens_may_come() -> None:
    assert allowed(RuledAnswer(None, (3, 40), ())) == [{3, 40}]


def test_the_last_token_of_a_bad_word_is_forbidden_behind_its_others() -> None:
    everything = set(range(64))
    rules = RuledAnswer(None, (), ((7,), (1, 2, 3)))
    assert allowed(rules) == [everything - {7}]
    assert rules.advance((1,)) is False
    assert allowed(rules, 2, 5) == [everything - {7}, everything - {3, 7}, everything - {7}]
    rules.advance((2,))
    assert allowed(rules) == [everything - {3, 7}]
    assert allowed(rules.copy()) == [everything - {3, 7}]
    rules.advance((4, 2))
    assert allowed(rules) == [everything - {7}]


def test_rules_allow_no_more_than_the_grammar() -> None:
    rules = RuledAnswer(ToyGrammar(64, period=2, length=3), (1, 2, 3), ((3,),))
    assert allowed(rules) == [{1}]
    assert [rules.advance((token,)) for token in (1, 2, 2)] == [False, False, True]


def test_a_grammar_that_fails_fails_with_rules() -> None:
    rules = RuledAnswer(ToyGrammar(64, period=2, length=30, fails_at=0), (1,), ())
    allowed(rules)
    assert rules.failure == "a limit was reached"
