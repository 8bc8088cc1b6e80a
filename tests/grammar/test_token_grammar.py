"""Grammars of llguidance over token ids: masks, drafts, the end of an answer, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from sidestream.config import ReasoningMarks, StructuredOutputs
from sidestream.errors import RequestRejected
from sidestream.grammar import GrammarCompiler, TokenGrammar, check
from sidestream.grammar.token_rules import BudgetedAnswer, RuledAnswer

EOS = 0
VOCABULARY = {"<eos>": EOS, **{chr(number): number - 32 for number in range(33, 127)}}


def tokenizer(decoder: Any) -> str:
    """A tokenizer with one token for each character."""
    made = Tokenizer(BPE(vocab=VOCABULARY, merges=[]))
    made.add_special_tokens(["<eos>"])
    if decoder is not None:
        made.decoder = decoder
    return made.to_str()


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(ByteLevel()), vocab_size=100, eos_ids=(EOS,))


def ids(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def allowed(grammar: TokenGrammar, drafts: str = "") -> list[str]:
    masks = np.zeros((1 + len(drafts), 4), np.int32)
    grammar.fill(masks, ids(drafts))
    texts = {at: text for text, at in VOCABULARY.items()}
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return ["".join(texts[at] for at in np.flatnonzero(row) if at in texts) for row in bits]


def test_masks_follow_the_answer_to_its_end(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="a[bc]+d?"))
    assert allowed(grammar) == ["a"]
    assert grammar.advance(ids("ab")) is False
    assert allowed(grammar) == ["<eos>bcd"]
    assert grammar.advance(ids("d")) is True
    assert allowed(grammar) == ["<eos>"]


def test_an_answer_may_also_end_with_its_eos_token(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="a+"))
    assert grammar.advance([*ids("aa"), EOS]) is True
    assert grammar.failure is None


def test_masks_of_drafts_leave_the_position_as_it_was(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="a[bc]d"))
    assert allowed(grammar, "ab") == ["a", "bc", "d"]
    assert allowed(grammar) == ["a"]
    everything = "".join(VOCABULARY)
    assert allowed(grammar, "axy") == ["a", "bc", everything, everything]
    assert allowed(grammar) == ["a"]


def test_answers_of_one_form_are_apart(grammars: GrammarCompiler) -> None:
    first, second = (grammars.compile(StructuredOutputs(choice=("ab", "cd"))) for _ in range(2))
    first.advance(ids("a"))
    third = first.copy()
    third.advance(ids("b"))
    assert [allowed(one) for one in (first, second, third)] == [["b"], ["ac"], ["<eos>"]]


def test_a_limit_that_is_reached_is_a_failure_and_not_an_end(grammars: GrammarCompiler) -> None:
    ambiguous = "start: many\nmany: many many | " + " | ".join(f'"a" part_{number}' for number in range(60)) + "\n"
    parts = "\n".join(f"part_{number}: many? many?" for number in range(60))
    grammar = grammars.compile(StructuredOutputs(grammar=ambiguous + parts))
    for _ in range(400):
        allowed(grammar)
        if grammar.failure is not None:
            break
        assert grammar.advance(ids("a")) is False
    assert grammar.failure is not None
    assert grammar.advance([EOS]) is False


def test_a_token_that_is_not_allowed_is_a_failure(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="ab"))
    assert (grammar.advance(ids("x")), grammar.failure is None) == (False, False)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"json": '{"not": {"type": "string"}}'}, "structured_outputs.json", "Unimplemented keys"),
        ({"json": "[1]"}, "structured_outputs.json", "a schema is an object"),
        ({"json": "{"}, "structured_outputs.json", "cannot be enforced"),
        ({"regex": "a(b"}, "structured_outputs.regex", "invalid regex"),
        ({"grammar": "start: missing"}, "structured_outputs.grammar", 'unknown name: "missing"'),
        (
            {"structural_tag": {"structures": [{"begin": "<x"}], "triggers": ["<f"]}},
            "structured_outputs.structural_tag",
            "<x",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_forms_that_cannot_be_enforced_are_refused(
    grammars: GrammarCompiler, fields: dict[str, Any], param: str, says: str
) -> None:
    for refuse in (check, grammars.compile):
        with pytest.raises(RequestRejected, match=says) as caught:
            refuse(StructuredOutputs(**fields))
        assert caught.value.param == param


def test_a_tokenizer_that_grammars_cannot_use_is_named() -> None:
    grammars = GrammarCompiler(tokenizer(None), vocab_size=100, eos_ids=(EOS,))
    for _ in range(2):
        with pytest.raises(RequestRejected, match=r"cannot use this model's tokenizer \(can't determine decoder type"):
            grammars.compile(StructuredOutputs(regex="a"))


def test_a_deeply_nested_schema_is_refused_at_once() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(RequestRejected, match="recursion limit"):
        check(StructuredOutputs(json=json.dumps(schema)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "has nothing"),
        ({"regex": "a", "choice": ("b",)}, "has regex and choice"),
        ({"regex": 5}, "is a int"),
        ({"choice": "ab"}, "give a tuple of texts"),
        ({"choice": ("a",) * 10_001}, "10001 texts: at most 10000"),
        ({"regex": "a" * ((1 << 20) + 1)}, "at most 1048576"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_structured_outputs_have_exactly_one_form(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestRejected, match=says):
        StructuredOutputs(**fields)


def test_a_grammar_that_exceeds_a_limit_at_its_first_token_is_refused(grammars: GrammarCompiler) -> None:
    with pytest.raises(RequestRejected, match="too many expressions constructed"):
        grammars.compile(StructuredOutputs(regex="((((a{99}){99}){99}){99})"))


def test_the_only_continuation_is_forced_and_leaves_the_position_as_it_was(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(regex="abc[de]fg|xyz"))
    assert grammar.forced((), 9) == ()
    grammar.advance(ids("a"))
    assert grammar.forced((), 9) == grammar.forced(ids("b"), 9) == tuple(ids("bc"))
    assert grammar.forced((), 1) == tuple(ids("b"))
    assert allowed(grammar, "bcd") == ["b", "c", "de", "f"]
    assert grammar.forced((), 9) == tuple(ids("bc"))
    assert grammar.advance(ids("bcdfg")) is True
    assert grammar.forced((), 9) == ()


class Counted:
    """A matcher that counts its calls by name."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.calls = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.matcher, name)


def test_a_long_forced_text_is_looked_at_no_further_than_asked(grammars: GrammarCompiler) -> None:
    """`compute_ff_tokens` looks at all of it, however few tokens are asked for."""
    grammar: Any = grammars.compile(StructuredOutputs(regex="(ab){50000}"))
    grammar._matcher = counted = Counted(grammar._matcher)
    assert grammar.forced((), 8) == tuple(ids("abababab"))
    assert counted.calls["compute_bitmask"] == 8 and not counted.calls["compute_ff_tokens"]


def test_rules_about_tokens_force_what_their_grammar_forces(grammars: GrammarCompiler) -> None:
    inner = grammars.compile(StructuredOutputs(regex="abc"))
    marks = ReasoningMarks((1,), (2,), inside=False)
    for rules in (RuledAnswer(inner, (), ((4, 5),)), BudgetedAnswer(inner, marks, 3)):
        assert rules.forced((), 9) == tuple(ids("abc"))
    for rules in (RuledAnswer(None, (3,), ()), BudgetedAnswer(None, marks, 3)):
        assert rules.forced((), 9) == ()
