"""Answers of models, and the messages that they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sidestream.formats import AnswerFormat

SCHEMAS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "s": {"type": "string"},
            "b": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "o": {"type": "object"},
        },
    },
    "g": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Sample:
    """`calls`: name and arguments (JSON text) of each."""

    tools: str | None
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    reasoner: str | None = None
    inside: bool = False

    @property
    def form(self) -> AnswerFormat:
        return AnswerFormat(self.tools, self.reasoner, self.inside, SCHEMAS)


def _same(tools: str, *texts: str) -> list[Sample]:
    """Answers that are content as they are."""
    return [Sample(tools, text, text) for text in texts]


F = ("f", '{"x": 1}')
G = ("g", "{}")
_DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
_DS_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
_HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'

_NEXT, _FINAL = "<|end|><|start|>assistant", "<|channel|>final<|message|>"
_THOUGHT = "<|channel|>analysis<|message|>hm <b>"
_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
# Text, content, calls and reasoning of answers of gpt-oss.
_MESSAGES: list[tuple[str, str, tuple[tuple[str, str], ...], str]] = [
    (f"{_THOUGHT}{_NEXT}{_FINAL}Yes<|return|>", "Yes", (), "hm <b>"),
    (f'{_THOUGHT}{_NEXT}{_CALL}{{"x": 1}}<|call|>', "", (F,), "hm <b>"),
    (f'{_CALL}{{"x": 1}}', "", (F,), ""),  # the token that ends it has no text
    (f'{_THOUGHT}{_NEXT}<|channel|>commentary<|message|>I look.{_NEXT}{_CALL}{{"x": 1}}', "I look.", (F,), "hm <b>"),
    (f"{_THOUGHT}{_NEXT}{_THOUGHT}{_NEXT}{_FINAL}a{_NEXT}{_FINAL}b", "a\nb", (), "hm <b>\nhm <b>"),
    # Recipient before the channel, without <|constrain|>, as a format on another channel, or without `functions.`.
    (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', "", (F,), ""),
    (
        f"{_THOUGHT}<|end|>\n<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
        '\n{"x": 1}',
        "",
        (F,),
        "hm <b>",
    ),
    ('<|channel|>analysis to=functions.f code<|message|>{"x": 1}<|call|>', "", (F,), ""),
    ("<|channel|>commentary to=g<|message|>{}<|call|>", "", (G,), ""),
    ("<|channel|>commentary to=functions.g<|message|>{}", "", (G,), ""),
    # Several calls, if the token that ends one does not end the answer.
    (f'{_CALL}{{"x": 1}}<|call|><|start|>assistant{_CALL.replace(".f", ".g")}{{}}<|call|>', "", (F, G), ""),
    (f'{_CALL}{{"x": 1}}<|end|>{_NEXT[7:]}{_FINAL}Done', "Done", (F,), ""),
    # A tool that is none of the request's.
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "", (), "1 + 1"),
    # No marker at the start, markers in words, and messages without an end.
    ("just text < | and to=f <|mes", "just text < | and to=f <|mes", (), ""),
    (f"{_THOUGHT}<|channel|>final<|message|>Yes", "Yes", (), "hm <b>"),
    (f"{_THOUGHT}<|en", "", (), "hm <b><|en"),
    (f"{_THOUGHT}{_NEXT}<|channel|>fin", "", (), "hm <b>"),
    ("to=5, I think", "to=5, I think", (), ""),
    ("", "", (), ""),
    # Malformed calls are content, in the form of the table.
    (f'{_CALL}{{"x": ', f'{_CALL}{{"x": ', (), ""),
    (f"{_CALL}none<|call|>", f"{_CALL}none", (), ""),
]

SAMPLES = [
    Sample("hermes", _HERMES, calls=(F,)),
    Sample("hermes", f"Let me see.\n{_HERMES}\n{_HERMES.replace('f', 'g', 1)}\n", "Let me see.\n", (F, ("g", F[1]))),
    Sample("hermes", f"\n\n{_HERMES} done", " done", (F,)),
    Sample("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', calls=(F,)),
    Sample("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', calls=(F,)),
    Sample("hermes", '<tool_call>{"name": "g"}</tool_call>', calls=(G,)),
    Sample("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}', calls=(F,)),
    Sample(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\"}é🐋", "o": {"a": [1, {}]}}}</tool_call>!',
        "!",
        (("f", '{"s": "</tool_call> \\"}é🐋", "o": {"a": [1, {}]}}'),),
    ),
    *_same(
        "hermes",
        "a < b <tool <tool_ca",
        " \n ",
        "<tool_call>no json</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1]}</tool_call> and more',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"query": "f"',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        "<tool_call>",
    ),
    Sample("hermes", f"<tool_call><tool_call>{_HERMES}", "<tool_call><tool_call>", (F,)),
    Sample(
        "qwen3_coder",
        "I call.\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n<b>\n5\n</parameter>\n"
        '<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{"a": [null]}\n</parameter>\n</function>\n</tool_call>',
        "I call.\n",
        (("f", '{"x": 1, "s": "<b>\\n5", "b": true, "o": {"a": [null]}}'),),
    ),
    Sample("qwen3_coder", "<tool_call><function=g></function></tool_call>\n", calls=(G,)),
    Sample(
        "qwen3_coder",
        "<tool_call><function=f><parameter=x>many</parameter><parameter=y>7</parameter></function></tool_call>",
        calls=(("f", '{"x": "many", "y": "7"}'),),
    ),
    *_same("qwen3_coder", "<tool_call><function=f><parameter=x>1", "<tool_call><function f></tool_call>"),
    Sample("llama3_json", '{"name": "f", "parameters": {"x": 1}}', calls=(F,)),
    Sample("llama3_json", ' {"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', calls=(F, G)),
    Sample("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}', calls=(F,)),
    *_same(
        "llama3_json",
        '{"answer": {"name": "f"}}',
        'See {"name": "f", "parameters": {}}',
        '{"name": "Bob", "parameters": {"age": 7}}',
        '{"name": "f", "par',
        "{",
    ),
    Sample("llama3_json", '{"name": "g", "parameters": {}}; ok', "; ok", (G,)),
    Sample(
        "mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', "", (F, G)
    ),
    Sample("mistral", 'Well [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{}', "Well ", (F, G)),
    Sample("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"x": 1}} ok', " ok", (F,)),
    *_same("mistral", "[TOOL_CALLS] [1]", "[TOOL_CALL", "[TOOL_CALLS]f(x)", "[TOOL_CALLS]f"),
    Sample("pythonic", '[f(x=1, s="a]\\")"), g()]', calls=(("f", '{"x": 1, "s": "a]\\")"}'), G)),
    Sample("pythonic", "<|python_start|>[f(x=1)]<|python_end|>", calls=(F,)),
    Sample("pythonic", "[f(b=true, o={'a': (1, null)})]", calls=(("f", '{"b": true, "o": {"a": [1, null]}}'),)),
    *_same("pythonic", "[1, 2] is a list", "[h(x=1)]", "[f(1)]", "[f(x=open('a'))]", "[f(x=1", "Use [g()]", "[](g)"),
    Sample("deepseek_v3", f'Ok{_DS}function<｜tool▁sep｜>f\n```json\n{{"x": 1}}\n```{_DS_END}', "Ok", (F,)),
    Sample(
        "deepseek_v3",
        f"{_DS}function<｜tool▁sep｜>g\n```json\n{{}}\n```<｜tool▁call▁end｜>\n"
        f'<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{{"x": 1}}\n```{_DS_END}',
        calls=(G, F),
    ),
    Sample(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f oh",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f oh",
    ),
    Sample("deepseek_v31", f'{_DS}f<｜tool▁sep｜>{{"x": 1}}{_DS_END}', calls=(F,)),
    Sample("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", calls=(F,)),
    Sample(
        "glm45",
        "\n<tool_call>g</tool_call>\n<tool_call>f\n<arg_key>s</arg_key><arg_value>1</arg_value>"
        "<arg_key>b</arg_key><arg_value>null</arg_value></tool_call>",
        calls=(G, ("f", '{"s": "1", "b": null}')),
    ),
    *_same("glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>1", "<tool_call>f and g</tool_call>"),
    Sample("kimi_k2", f'Sure.{_KIMI}{{"x": 1}}<|tool_call_end|><|tool_calls_section_end|>', "Sure.", (F,)),
    Sample("kimi_k2", "<|tool_call_begin|>functions.f:0 what", "<|tool_call_begin|>functions.f:0 what"),
    *[
        Sample("openai", text, content, calls, reasoning, "openai_gptoss")
        for text, content, calls, reasoning in _MESSAGES
    ],
    Sample(
        "openai", "one<|end|>\n<|start|>assistant<|channel|>final<|message|>a", "a", (), "one", "openai_gptoss", True
    ),
    Sample(None, f"{_THOUGHT}{_NEXT}{_FINAL}Yes", "Yes", (), "hm <b>", "openai_gptoss"),
    Sample("openai", f'a {_CALL}{{"x": 1}} b', "a  b", (F,)),
    *_same("openai", "<|channel|>final<|message|>a", f"{_CALL}[1]", f"{_CALL[:-11]} oh", "<|channel|>commentary to="),
    Sample(None, "<think>\nhm\n</think>\n\nYes", "\n\nYes", reasoning="\nhm\n", reasoner="qwen3"),
    Sample(None, "hm</think>Yes", "Yes", reasoning="hm", reasoner="qwen3", inside=True),
    Sample(None, "<think>hm</think>Yes", "Yes", reasoning="hm", reasoner="deepseek_r1", inside=True),
    Sample(None, " <thin and <think> later", " <thin and <think> later", reasoner="qwen3"),
    Sample(None, "<think>a < b </thin", reasoning="a < b </thin", reasoner="glm45"),
    Sample(None, "[THINK]a[/THINK]b[/THINK]", "b[/THINK]", reasoning="a", reasoner="mistral"),
    Sample("hermes", f"<think>{_HERMES}</think>\n{_HERMES}", "", (F,), _HERMES, "qwen3"),
    Sample("hermes", f"no thought {_HERMES}", "no thought ", (F,), "", "kimi_k2"),
]
