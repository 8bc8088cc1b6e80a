"""A model's chat template: checks messages and renders them as text. Any thread may use it."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jinja2
from transformers import PreTrainedTokenizerBase

from sidestream.errors import RequestRejected
from sidestream_kv.config import unknown_name

# Parameters of apply_chat_template. They are not allowed as template options, because an option would replace them.
_TEMPLATE_CALL = frozenset(
    {"messages", "most_tokens", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
)
_ROLES = ("user", "system", "developer", "assistant", "tool")

ContentForm = Literal["text", "parts", "dropped"]
"""How a template reads the content of a role's messages: as a string, as a list of parts, or not at all."""

_PROBE = "probecontent"  # no template changes a lower-case word
_PROBE_CALL = {"id": "probecall", "type": "function", "function": {"name": "probe", "arguments": {}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
# The messages before a role's probe message. Templates raise for a conversation that does not begin with the user.
_BEFORE: Mapping[str, tuple[str | Mapping[str, Any], ...]] = {"assistant": ("user",), "tool": ("user", _CALLING)}


class ChatTemplate:
    """Renders messages with the chat template of a transformers tokenizer."""

    def __init__(self, backend: PreTrainedTokenizerBase) -> None:
        self._backend = backend
        self._forms: dict[str, Mapping[str, ContentForm]] = {}

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template."""
        return self._backend.chat_template is not None

    @property
    def text(self) -> str:
        """The text of the template that is used with tools; empty if there is none."""
        return str(self._backend.get_chat_template(tools=[{}])) if self.exists else ""

    def knows(self, option: str) -> bool:
        """Whether the template reads this variable, such as reasoning_effort."""
        return self.exists and option in _words(self._backend.get_chat_template())[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The text of a conversation.

        messages                each has a role (system, developer, user, assistant, tool) and a content: a string or a
                                list of parts `{"type": "text", "text": …}`; an assistant's message with tool_calls
                                may omit the content
        add_generation_prompt   end with the start of the assistant's turn
        continue_final_message  do not end the last message, so that the model continues it
        options                 variables of the template, such as enable_thinking

        Raises RequestRejected if the model has no template, if the template refuses the messages, or if it does not
        read the given `tools`, tool calls, role `tool`, a message's content or an option. So no argument is ignored
        silently.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            example = '[{"role": "user", "content": "Hello"}]'
            reason = f"messages is {reprlib.repr(messages)}: give a list of messages, such as {example}"
            raise RequestRejected(reason, param="messages")
        conversation = [_message(index, message) for index, message in enumerate(messages)]
        if not conversation:
            raise RequestRejected("messages is empty: give at least one", param="messages")
        if not self.exists:
            raise RequestRejected(
                "this model has no chat template: ask for a plain completion, or serve a model that is made for chat",
                param="messages",
            )
        given_tools = [dict(tool) for tool in tools] if tools else None
        self._check(conversation, given_tools, options)
        forms = self.content_forms(given_tools)
        conversation = _as_read(conversation, self._backend.get_chat_template(tools=given_tools))
        try:
            return str(
                self._backend.apply_chat_template(
                    [_in_form(message, forms[message["role"]]) for message in conversation],
                    tools=given_tools,
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **options,
                )
            )
        except Exception as fault:  # a template may raise any exception
            reason = next(iter(str(fault).splitlines()), "") or type(fault).__name__
            raise RequestRejected(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from fault

    def content_forms(self, tools: list[Any] | None = None) -> Mapping[str, ContentForm]:
        """The form of content that the template reads, for each role.

        A template for images and text may loop over a list of parts. Given a string, it loops over the characters and
        drops them. So the template renders a probe message of each role in both forms; a form whose rendering has the
        probe's content is read. A role whose probes the template refuses gets the user's form. The probes are rendered
        with the first conversation, not at load: a server bounds the time of a conversation's template.
        """
        template = self._backend.get_chat_template(tools=tools)
        if template not in self._forms:
            user = self._form(template, "user", "text")
            self._forms[template] = {role: self._form(template, role, user) for role in _ROLES}
        return self._forms[template]

    def _form(self, template: str, role: str, user: ContentForm) -> ContentForm:
        question = _in_form({"role": "user", "content": "Hello"}, user)
        before = [question if message == "user" else message for message in _BEFORE.get(role, ())]
        probe = {"role": role, "content": _PROBE, "name": "probe", "tool_call_id": _PROBE_CALL["id"]}
        if role != "tool":
            probe = {"role": role, "content": _PROBE}
        after = [] if role in ("user", "tool") else [question]
        refused = False
        for form in ("text", "parts"):
            try:
                text = self._backend.apply_chat_template(
                    [*before, _in_form(probe, form), *after], chat_template=template, tokenize=False
                )
            except Exception:  # a template may raise any exception
                refused = True
                continue
            if _PROBE in str(text):
                return form
        return user if refused or role == "tool" else "dropped"

    def _check(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, options: Mapping[str, Any]
    ) -> None:
        names, strings = _words(self._backend.get_chat_template(tools=tools))
        forms = self.content_forms(tools)
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            if message["role"] == "tool" and "tool" not in strings:
                raise RequestRejected(
                    f"{where}.role is tool, which this model's chat template does not know: leave it out",
                    param=f"{where}.role",
                )
            if message.get("tool_calls") and "tool_calls" not in names | strings:
                where = f"{where}.tool_calls"
                raise RequestRejected(f"this model's chat template knows no {where}: leave them out", param=where)
        if tools and "tools" not in names:
            raise RequestRejected("this model's chat template knows no tools: leave them out", param="tools")
        for name in options:
            if name in _TEMPLATE_CALL:
                raise RequestRejected(f"{name} is no option of a chat template: leave it out", param=name)
            if name not in names:
                raise RequestRejected(f"this model's chat template has no option {name}: leave it out", param=name)
        for index, message in enumerate(messages):
            if forms[message["role"]] == "dropped" and message.get("content"):
                where = f"messages[{index}].role"
                raise RequestRejected(
                    f"{where} is {message['role']}, whose content this model's chat template leaves out: "
                    "leave the message out, or correct the template",
                    param=where,
                )


def _as_read(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages in the form of templates, such as gpt-oss's, that read the reasoning as `thinking`, refuse content
    beside it in a message with calls, or read only the first call of a message.
    """
    if "message.thinking" in template:
        messages = [_thinking(message) for message in messages]
    if "tool_calls[0]" not in template:
        return messages
    out: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # messages with a call, until its result comes
    for message in messages:
        if message["role"] == "tool" and waiting:
            call_id = message.get("tool_call_id")
            found = next((one for one in waiting if one["tool_calls"][0].get("id") == call_id), waiting[0])
            waiting.remove(found)
            out += [found, message]
            continue
        calls = list(message.get("tool_calls") or ())
        out += [*waiting, *([] if len(calls) > 1 else [message])]
        waiting = [{"role": message["role"], "content": "", "tool_calls": [call]} for call in calls if len(calls) > 1]
        if waiting:
            waiting[0] = {**message, "tool_calls": [calls[0]]}
    return out + waiting


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    thinking, content = message.get("reasoning_content"), message.get("content")
    if not thinking:
        return message
    fields = {**message, "thinking": thinking}
    if message.get("tool_calls") and content:  # a preamble of the calls, for which there is no other field
        fields |= {"thinking": f"{thinking}\n{content}", "content": ""}
    return fields


def _in_form(message: Mapping[str, Any], form: ContentForm) -> dict[str, Any]:
    content = message.get("content")
    if form == "parts" and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return dict(message)


@functools.lru_cache(maxsize=8)
def _words(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names in a template (variables and attributes) and its string literals."""
    words = [(kind, word) for _, kind, word in jinja2.Environment().lex(template)]
    return (
        frozenset(word for kind, word in words if kind == "name"),
        frozenset(word[1:-1] for kind, word in words if kind == "string"),
    )


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestRejected(f"{where} is {message!r}: give an object with role and content", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestRejected(f"{where}: {unknown_name('role', str(role), _ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    return {**message, "content": _content(where, content)}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRejected(
            f"{where}.content is {content!r}: give a string or a list of text parts", param=f"{where}.content"
        )
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestRejected(
                f"{where}.content has a part of type {kind}: only text parts are supported", param=f"{where}.content"
            )
    return "".join(part["text"] for part in content)
