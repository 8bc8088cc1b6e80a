"""Allowed token ids, bad words and bounds of reasoning, alone and with a grammar."""

from __future__ import annotations

import numpy as np

from proof.toy_grammar import ToyGrammar
from sidestream.config import ReasoningMarks
from sidestream.grammar import BudgetedAnswer, RuledAnswer, TokenGrammar


def allowed(rules: TokenGrammar, *drafts: int) -> list[set[int]]:
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


EVERYTHING = set(range(64))


def test_the_end_of_reasoning_is_forced_behind_its_budget_and_the_answer_is_free() -> None:
    rules = BudgetedAnswer(None, ReasoningMarks((5,), (6, 7, 8), inside=True), 2, 0)
    assert allowed(rules, 1, 2, 6, 7, 8, 9) == [EVERYTHING, EVERYTHING, {6}, {7}, {8}, EVERYTHING, EVERYTHING]
    assert rules.advance((1, 2, 6)) is False
    assert allowed(rules.copy(), 7) == [{7}, {8}]
    rules.advance((7, 8))
    assert allowed(rules, 1, 1, 1, 5, 1, 1, 1) == [EVERYTHING] * 8


def test_a_model_may_begin_and_end_its_reasoning_itself() -> None:
    rules = BudgetedAnswer(None, ReasoningMarks((5,), (6, 7)), 3)
    assert allowed(rules, *[1] * 9) == [EVERYTHING] * 10  # it has not begun
    rules.advance((1, 5, 6, 6, 7))  # a beginning of the end, and the end
    assert allowed(rules, *[1] * 9) == [EVERYTHING] * 10
    begun = BudgetedAnswer(None, ReasoningMarks((5,), (6, 7)), 3)
    assert allowed(begun, 5, 1, 1, 6, 7) == [*[EVERYTHING] * 4, {7}, EVERYTHING]
    none = BudgetedAnswer(None, ReasoningMarks((5,), (6,)), 0)
    assert allowed(none, 5, 6) == [EVERYTHING, {6}, EVERYTHING]


def test_a_bound_of_reasoning_follows_the_grammar_and_its_failure() -> None:
    marks = ReasoningMarks((5,), (2,), inside=True)
    rules = BudgetedAnswer(ToyGrammar(64, period=2, length=3), marks, 1, 0)
    whole = allowed(ToyGrammar(64, period=2, length=3), 1)
    assert allowed(rules, 1) == [whole[0], whole[1] & {2} or whole[1]]
    late = BudgetedAnswer(ToyGrammar(64, period=2, length=3), marks, 0, 0)
    assert allowed(late) == [whole[0] & {2} or whole[0]]  # a grammar that does not allow the end yet goes on
    assert [rules.advance((token,)) for token in (1, 2, 2)] == [False, False, True]
    failing = BudgetedAnswer(ToyGrammar(64, period=2, length=30, fails_at=0), marks, 1, 0)
    allowed(failing)
    assert failing.failure == "a limit was reached"
