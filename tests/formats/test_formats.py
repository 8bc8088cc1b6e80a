"""Tool calls and reasoning in answers, whatever the pieces in which their text arrives."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from sidestream.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormat,
    AnswerParser,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Message,
    Reasoning,
    message_of,
    reasoning_format_of,
    tool_format_of,
)
from sidestream.formats.answer import is_inside

from .samples import SAMPLES, SCHEMAS, Sample

_WORDS = 'f g {"name":"f","arguments":{ "x":1 } { [ ] f(x=1) , ; \\ " < é <parameter=x> functions.f:0 ( null'


def _events(form: AnswerFormat, pieces: Sequence[str]) -> list[Event]:
    parser = AnswerParser(form)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def _cuts(text: str, most: int) -> list[list[str]]:
    """The text whole, cut at each border and at each two borders up to `most` apart, and in pieces of 1 to 7."""
    size = len(text)
    ones = [[text[:cut], text[cut:]] for cut in range(1, size)]
    twos = [[text[:a], text[a:b], text[b:]] for a in range(1, size) for b in range(a + 1, min(size, a + 1 + most))]
    pieces = [[text[start : start + step] for start in range(0, size, step)] for step in range(1, 8)]
    return [[text], *ones, *twos, *pieces]


def _streamed(events: Sequence[Event]) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """What a stream's client has at the end: content, reasoning, and each call with whether it is well formed."""
    calls: list[list[str]] = []
    ended: list[bool] = []
    for event in events:
        match event:
            case CallBegun(index, _, name):
                assert index == len(calls) == len(ended)
                calls.append([name, ""])
            case Arguments(index, text):
                assert index == len(calls) - 1 == len(ended)
                calls[index][1] += text
            case CallEnded(index, malformed):
                assert index == len(ended) == len(calls) - 1
                ended.append(not malformed)
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return content, reasoning, [(name, text, whole) for (name, text), whole in zip(calls, ended, strict=True)]


def _plain(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [(name, arguments) for _, name, arguments in message.calls]


@pytest.mark.parametrize("most", [8, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.tools}/{sample.reasoner} {sample.text[:40]!a}")
def test_an_answer_means_the_same_message_wherever_it_is_cut(sample: Sample, most: int) -> None:
    wanted = (sample.content, sample.reasoning, list(sample.calls))
    whole = _streamed(_events(sample.form, [sample.text]))
    for pieces in _cuts(sample.text, most):
        events = _events(sample.form, pieces)
        assert _plain(message_of(events)) == wanted, pieces
        assert _streamed(events) == whole, pieces
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in sample.calls)


def test_every_format_has_samples() -> None:
    assert {sample.tools for sample in SAMPLES if sample.calls} == set(TOOL_FORMATS)
    assert {sample.reasoner for sample in SAMPLES} >= set(REASONING_FORMATS) - {"deepseek_v3"}  # the same as qwen3


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_random_text_raises_nothing_and_loses_no_character(name: str) -> None:
    """Text without well-formed calls comes out as it is; with them, equal for all pieces."""
    draw = random.Random(name)
    words = [*sorted(TOOL_FORMATS[name].literals()), *_WORDS.split(), " ", "\n"]
    for _ in range(300):
        text = "".join(draw.choices(words, k=draw.randrange(1, 14)))
        whole = _events(AnswerFormat(name, schemas=SCHEMAS), [text])
        assert _streamed(_events(AnswerFormat(name, schemas=SCHEMAS), list(text))) == _streamed(whole), text
        if not any(isinstance(event, CallBegun) for event in whole):
            left = text
            for wrapper in TOOL_FORMATS[name].wrappers:
                left = left.replace(wrapper, "")
            assert message_of(whole).content == left, text


def test_random_messages_mean_the_same_wherever_they_are_cut() -> None:
    draw, form = random.Random("messages"), AnswerFormat("openai", "openai_gptoss", schemas=SCHEMAS)
    words = [*sorted(form.literals()), "analysis", "final", "assistant", " to=functions.f", "to=g", "{}", " ", "a", "<"]
    for _ in range(300):
        text = "".join(draw.choices([*words, "x" * 300], k=draw.randrange(1, 14)))
        cut = draw.randrange(len(text))
        whole = _streamed(_events(form, [text]))
        assert _streamed(_events(form, list(text))) == whole, text
        assert _streamed(_events(form, [text[:cut], text[cut:]])) == whole, text


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    parser = AnswerParser(AnswerFormat("hermes", "qwen3"))
    assert parser.feed("<thi") == []
    assert parser.feed("nk>a<") == [Reasoning("a")]
    assert parser.feed("b</think") == [Reasoning("<b")]
    assert parser.feed(">c <tool") == [Content("c ")]
    assert parser.feed("s <") == [Content("<tools ")]
    assert parser.finish() == [Content("<")]


def test_text_of_messages_arrives_as_the_model_writes_it() -> None:
    parser = AnswerParser(AnswerFormat("openai", "openai_gptoss", schemas=SCHEMAS))
    assert parser.feed("<|channel|>analysis<|mess") == []
    assert parser.feed("age|>a<") == [Reasoning("a")]
    assert parser.feed("b<|end|><|start|>assistant") == [Reasoning("<b")]
    assert parser.feed("<|channel|>final<|message|>") == []
    assert parser.feed("c") == [Content("c")]
    (*_, begun, first) = parser.feed('<|end|><|start|>assistant to=f<|channel|>commentary<|message|>{"x')
    assert isinstance(begun, CallBegun) and first == Arguments(0, '{"x')
    assert parser.feed('": 1}<|call|>') == [Arguments(0, '": 1}'), CallEnded(0)]


def test_a_header_without_an_end_is_text_at_last() -> None:
    parser = AnswerParser(AnswerFormat(None, "openai_gptoss"))
    assert parser.feed("<|start|>" + "x" * 400) == []
    assert parser.feed("y" * 200) == [Content("<|start|>" + "x" * 400 + "y" * 200)]
    long = "<|start|>" + "x" * 600 + "<|message|>a"
    for pieces in ([long], list(long)):
        assert message_of(_events(AnswerFormat(None, "openai_gptoss"), pieces)).content == long


def test_arguments_arrive_while_the_model_writes_them() -> None:
    parser = AnswerParser(AnswerFormat("hermes"))
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    (begun, first) = parser.feed('{"x')
    assert isinstance(begun, CallBegun) and (begun.index, begun.name) == (0, "f")
    assert first == Arguments(0, '{"x')
    assert parser.feed('": "}') == [Arguments(0, '": "}')]
    assert parser.feed('"}}') == [Arguments(0, '"}')]
    assert parser.feed("</tool_call>") == [CallEnded(0)]


def test_json_that_is_no_call_is_not_held_back() -> None:
    parser = AnswerParser(AnswerFormat("llama3_json", schemas=SCHEMAS))
    assert parser.feed('{"answer"') == [Content('{"answer"')]
    parser = AnswerParser(AnswerFormat("pythonic", schemas=SCHEMAS))
    assert parser.feed("[1") == [Content("[1")]


def test_a_stream_gets_the_rest_of_a_malformed_call_as_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": 1]}</tool_call>'
    assert _streamed(_events(AnswerFormat("hermes"), [text])) == ("]}</tool_call>", "", [("f", '{"x": 1', False)])


def test_ids_have_the_form_that_the_models_template_reads() -> None:
    def ids(name: str, text: str) -> list[str]:
        return [call_id for call_id, _, _ in message_of(_events(AnswerFormat(name, schemas=SCHEMAS), [text])).calls]

    calls = '<tool_call>{"name": "f"}</tool_call>' * 2
    assert all(one.startswith("call_") and len(one) == 29 for one in ids("hermes", calls))
    assert len(set(ids("hermes", calls))) == 2
    assert all(one.isalnum() and len(one) == 9 for one in ids("mistral", "[TOOL_CALLS]f{}"))
    assert ids("kimi_k2", "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}") == ["functions.f:3"]


@pytest.mark.parametrize(
    ("end", "inside"),
    [("<think>\n", (True, True)), ("<think>\n\n</think>\n\n", (False, False)), ("assistant\n", (False, True))],
)
def test_the_end_of_the_prompt_tells_whether_the_answer_begins_inside(end: str, inside: tuple[bool, bool]) -> None:
    assert (is_inside("qwen3", end), is_inside("deepseek_r1", end)) == inside


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ('<tool_call>\\n{"name": ', "hermes", None),
        ("<tool_call>\\n<function=f>\\n<parameter=x> </think>", "qwen3_coder", "qwen3"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json", None),
        ("[TOOL_CALLS] [THINK] [/THINK]", "mistral", "mistral"),
        ("[func_name1(params_name1=params_value1, params_name2=...)]", "pythonic", None),
        ("<｜tool▁calls▁begin｜> ```json </think>", "deepseek_v3", "qwen3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31", None),
        ("<tool_call>{{name}}<arg_key>", "glm45", None),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<|channel|>analysis<|message|> <|channel|>commentary json<|message|> <|end|>", "openai", "openai_gptoss"),
        ("<|assistant|> <|end|>", None, None),
        ("{{ messages }}", None, None),
    ],
)
def test_the_formats_are_found_in_the_chat_template(template: str, tools: str | None, reasoning: str | None) -> None:
    assert (tool_format_of(template), reasoning_format_of(template)) == (tools, reasoning)
