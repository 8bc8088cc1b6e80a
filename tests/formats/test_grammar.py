"""Grammars of tool calls: the parser reads whatever a grammar allows as calls with valid arguments."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from sidestream.formats import TOOL_FORMATS, AnswerFormat, AnswerParser, message_of
from sidestream.formats.grammar import answer_grammar

BYTES = LLTokenizer("byte")
SCHEMAS = {
    "weather.at": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


def answers(grammar: str, count: int, seed: int) -> list[str]:
    """Random complete answers of a grammar. Most characters of each are chosen among the least of those allowed, so
    that texts and lists end soon.
    """
    rng, found = random.Random(seed), list[str]()
    while len(found) < count:
        matcher, answer = LLMatcher(BYTES, grammar), list[int]()
        assert not matcher.is_error(), matcher.get_error()
        while not matcher.is_stopped() and len(answer) < 600:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if BYTES.eos_token in allowed and (len(allowed) < 3 or rng.random() < 0.2):
                break
            allowed = [int(token) for token in allowed if token < 128] or [int(allowed[0])]
            closing = [token for token in allowed if chr(token) in '"}])<[']
            token = rng.choice(closing if closing and rng.random() < 0.3 else allowed)
            answer.append(token)
            assert matcher.consume_token(token)
        if matcher.is_accepting():
            found.append(BYTES.decode_str(answer))
    return found


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_whatever_a_forced_grammar_allows_is_read_as_calls(name: str, several: bool) -> None:
    form = AnswerFormat(name, None, False, SCHEMAS)
    grammar = answer_grammar(form, lambda text: None, forced=True, several=several)
    for text in answers(grammar, 12, seed=1):
        parser = AnswerParser(form)
        message = message_of([*parser.feed(text), *parser.finish()])
        assert message.calls and (several or len(message.calls) == 1), text
        assert not message.content.strip(), text
        for _, tool, arguments in message.calls:
            given = json.loads(arguments)
            assert set(SCHEMAS[tool].get("required", ())) <= set(given) <= set(SCHEMAS[tool]["properties"]), text
            if name != "pythonic" and "days" in given:
                assert isinstance(given["days"], int), text


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if form.start and not form.bare])
def test_with_auto_only_what_follows_a_marker_is_bound(name: str) -> None:
    form = AnswerFormat(name, None, False, SCHEMAS)
    grammar = answer_grammar(form, lambda text: None)
    marker = (TOOL_FORMATS[name].wrappers or (TOOL_FORMATS[name].start,))[0]
    forced = answers(answer_grammar(form, lambda text: None, forced=True), 3, seed=2)

    def follows(text: str) -> tuple[bool, bool]:
        matcher, tokens = LLMatcher(BYTES, grammar), BYTES.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()

    assert follows("a text with < and [ and {") == (True, True)
    assert follows(f"so {marker}") == (True, False)
    assert follows(f"so {marker}?")[0] is False
    assert all(follows(f"so {call}") == (True, True) for call in forced)


_JSON = '%json {"type": "integer"}'


@pytest.mark.parametrize(("forced", "content"), [(True, None), (False, None), (False, _JSON)])
def test_whatever_a_grammar_of_messages_allows_is_read_as_reasoning_and_one_more(
    forced: bool, content: str | None
) -> None:
    form = AnswerFormat("openai", "openai_gptoss", False, SCHEMAS)
    grammar = answer_grammar(form, lambda text: None, content=content, forced=forced)
    for text in answers(grammar, 12, seed=1):
        parser = AnswerParser(form)
        message = message_of([*parser.feed(text), *parser.finish()])
        assert len(message.calls) <= 1 and (message.calls or not forced), text
        if content is not None and not message.calls:
            assert isinstance(json.loads(message.content.splitlines()[-1]), int), text


@pytest.mark.parametrize(
    ("last", "is_free", "is_forced", "has_form"),
    [
        ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}", True, True, True),
        ("<|channel|>final<|message|>7", True, False, True),
        ("<|channel|>final<|message|>seven", True, False, False),
        ("<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}", False, False, False),
        ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{} and more", False, False, False),
        ("<|channel|>analysis<|message|>7", False, False, False),
        ("7", False, False, False),
    ],
)
def test_an_answer_of_messages_ends_with_content_or_a_call(
    last: str, is_free: bool, is_forced: bool, has_form: bool
) -> None:
    form = AnswerFormat("openai", "openai_gptoss", False, SCHEMAS)
    thought, preamble = (
        f"<|channel|>{name}<|message|>hm<|end|><|start|>assistant" for name in ("analysis", "commentary")
    )
    for before in ("", thought, thought + preamble + thought):
        found = []
        for content, forced in ((None, False), (None, True), (_JSON, False)):
            matcher = LLMatcher(BYTES, answer_grammar(form, lambda text: None, content=content, forced=forced))
            tokens = BYTES.tokenize_str(before + last)
            found.append(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
        assert found == [is_free, is_forced, has_form], before


@pytest.mark.parametrize("inside", [False, True])
def test_headers_of_messages_are_special_tokens_and_words(inside: bool) -> None:
    tokens = {text: number for number, text in enumerate(("<|start|>", "<|channel|>", "<|message|>", "<|end|>"), 7)}
    tokens["<|constrain|>"] = 11
    form = AnswerFormat("openai", "openai_gptoss", inside, SCHEMAS)
    grammar = answer_grammar(form, tokens.get, content=_JSON)
    go_on = '<[10]> <[7]> "assistant"'
    assert f"start: {f'TEXT {go_on}' if inside else ''} (reasoning | preamble)* (" in grammar
    assert f'reasoning: <[8]> "analysis" <[9]> TEXT {go_on}' in grammar
    assert f'preamble: <[8]> "commentary" <[9]> TEXT {go_on}' in grammar
    assert f'(<[8]> "final" <[9]> {_JSON} | <[8]> "commentary to=functions." call)' in grammar
    assert 'call_1: "now" gap <[11]> "json" gap <[9]> gap arguments_1' in grammar


def test_markers_that_are_special_tokens_become_tokens() -> None:
    special = {"<tool_call>": 7, "</tool_call>": 8, "</think>": 9}
    form = AnswerFormat("hermes", "qwen3", True, SCHEMAS)
    grammar = answer_grammar(form, special.get)
    assert all(f"<[{token}]>" in grammar for token in special.values())
    assert not any(f'"{text}' in grammar for text in special)


def test_reasoning_may_begin_with_a_special_token_before_text_and_calls() -> None:
    form = AnswerFormat("hermes", "mistral", False, SCHEMAS)
    assert "start: (<[7]> TEXT <[8]> ws)? answer" in answer_grammar(form, {"[THINK]": 7, "[/THINK]": 8}.get)
    assert "start: answer" in answer_grammar(form, lambda text: None)


def test_arguments_have_one_spelling_of_each_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = AnswerFormat("hermes", None, False, {"f": schema})
    grammar = answer_grammar(form, lambda text: None, forced=True, several=False)
    taken = []
    for arguments in ('{"b": "x"}', r'{"\u0061": "x"}'):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        matcher, tokens = LLMatcher(BYTES, grammar), BYTES.tokenize_str(text)
        taken.append(matcher.try_consume_tokens(tokens) == len(tokens))
    assert taken == [True, False]


@pytest.mark.parametrize(("space", "is_allowed"), [("", True), ("\n", True), ("\n\n", False)])
def test_a_model_cannot_write_more_white_space_than_templates_repeat(space: str, is_allowed: bool) -> None:
    grammar = answer_grammar(AnswerFormat("hermes", None, False, SCHEMAS), lambda text: None, forced=True)
    call = f'<tool_call>{space}{{"name": "now", "arguments": {{}}}}{space}</tool_call>'
    for text in (call, f"{call}{space}{call}"):
        tokens = BYTES.tokenize_str(text)
        assert (LLMatcher(BYTES, grammar).try_consume_tokens(tokens) == len(tokens)) is is_allowed
