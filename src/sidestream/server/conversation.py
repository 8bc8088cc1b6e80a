"""A conversation in a request: its messages, its tools, and the options with which the chat template formats them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from sidestream.errors import RequestRejected
from sidestream.server.body import Served, Strict, parse_json, short, without_idle
from sidestream.server.errors import bad_request
from sidestream.server.extras import IDLE
from sidestream.server.structured import check_strict
from sidestream.text import TokenizerLike

_MOST_TOOLS = 1024
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MESSAGE_FIELDS = ("role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id")
# Options of chat templates that a request sets in other fields, so chat_template_kwargs may not contain them.
_OWN_OPTIONS = ("self", "messages", "tools", "most_tokens", "add_generation_prompt", "continue_final_message")


class Conversation(Strict):
    """Messages, and the options with which the chat template formats them."""

    messages: Any
    tools: Any = ()
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # not in OpenAI's API
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default={})


def layout_options(asked: Conversation, tokenizer: TokenizerLike) -> dict[str, Any]:
    """The options for the chat template: the client's own, and those for the end of the prompt."""
    for name in asked.chat_template_kwargs:
        if name in _OWN_OPTIONS:
            where = f"chat_template_kwargs.{name}"
            raise bad_request(f"{where} is a field of the request itself: send it as such, or leave it out", where)
    if asked.continue_final_message and asked.add_generation_prompt:
        message = (
            "continue_final_message and add_generation_prompt are both true: "
            "an answer either continues a message or begins one"
        )
        raise bad_request(message, "continue_final_message")
    options = dict(asked.chat_template_kwargs)
    if asked.reasoning_effort is not None and tokenizer.template_knows("reasoning_effort"):
        options.setdefault("reasoning_effort", asked.reasoning_effort)
    begins = not asked.continue_final_message if asked.add_generation_prompt is None else asked.add_generation_prompt
    if tools := _tools(asked.tools):
        for number, tool in enumerate(tools):
            check_strict(tool["function"], f"tools[{number}].function")
        options["tools"] = tools
    return {**options, "add_generation_prompt": begins, "continue_final_message": asked.continue_final_message}


def lay_out(
    tokenizer: TokenizerLike, messages: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], served: Served
) -> list[int]:
    """The token ids of the messages. Raises RequestRejected, naming the field of the request at fault."""
    try:
        return tokenizer.chat(messages, most_tokens=served.max_model_len, **layout)
    except RequestRejected as refusal:  # the error names the template's option, but the client knows the request field
        if refusal.param in layout and refusal.param != "tools":
            raise RequestRejected(str(refusal), param=f"chat_template_kwargs.{refusal.param}") from None
        raise


def chosen_tools(choice: Any, tools: Sequence[dict[str, Any]]) -> tuple[Sequence[dict[str, Any]], bool]:
    """The tools that the answer may call, and whether it must call one."""
    if choice in ("auto", "none"):
        return (tools if choice == "auto" else ()), False
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    named = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and named is None:
        expected = "it must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise bad_request(f"tool_choice is {short(choice)}: {expected}", "tool_choice")
    found = [tool for tool in tools if named is None or tool["function"]["name"] == named]
    if not found:
        reason = "no tool has this name" if tools else "there are no tools"
        raise bad_request(f"tool_choice is {short(choice)}: {reason}; send the tool in tools", "tool_choice")
    return found, True


def checked_messages(messages: Any, served: Served) -> list[dict[str, Any]]:
    """The messages for the chat template. Raises ApiError with status 400, naming the field at fault."""
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"messages is {short(messages)}: it must be a list of one or more messages", "messages")
    served.check_length(messages, "messages", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _tools(tools: Any) -> list[dict[str, Any]]:
    """The definitions of tools, for the chat template."""
    if not isinstance(tools, list | tuple):
        raise bad_request(f"tools is {short(tools)}: it must be a list of tools", "tools")
    if len(tools) > _MOST_TOOLS:
        raise bad_request(f"tools has {len(tools)} tools, at most {_MOST_TOOLS} are allowed: leave some out", "tools")
    found = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in found]
    for number, name in enumerate(names):
        if name in names[:number]:
            where = f"tools[{number}].function.name"
            raise bad_request(f"{where} is {short(name)}, as of another tool: give each a name of its own", where)
    return found


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise bad_request(f"{where} is {short(tool)}: it must be an object with type 'function' and a function", where)
    without_idle(tool, {}, known=("type", "function"), where=f"{where}.")
    where = f"{where}.function"
    known = ("name", "description", "parameters", "strict")
    function = without_idle(tool["function"], {}, known=known, where=f"{where}.")
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        reason = "give 1 to 128 letters, digits and ._:/-"
        raise bad_request(f"{where}.name is {short(name)}: {reason}", f"{where}.name")
    for name, kind, expected in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON schema, an object"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(function.get(name, kind()), kind):
            at = f"{where}.{name}"
            raise bad_request(f"{at} is {short(function[name])}: it must be {expected}", at)
    return {"type": "function", "function": function}


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message for the chat template: its role, its content, and fields that some templates read."""
    if not isinstance(message, dict):
        raise bad_request(f"{where} is {short(message)}: it must be an object with role and content", where)
    fields = without_idle(message, IDLE["message"], known=_MESSAGE_FIELDS, where=f"{where}.")
    role = fields.get("role")
    if role == "developer":
        role = "system"  # OpenAI's newer name; chat templates know only the older one
    if role not in ("system", "user", "assistant", "tool"):
        raise bad_request(
            f"{where}.role is {short(role)}: it must be system, developer, user, assistant or tool", f"{where}.role"
        )
    known: dict[str, Any] = {"role": role}
    calls = _tool_calls(fields.get("tool_calls", []), f"{where}.tool_calls")
    if calls:
        known["tool_calls"] = calls
    if not calls or "content" in fields:
        known["content"] = _content(fields.get("content"), f"{where}.content")
    for name in ("reasoning", "reasoning_content", "name", "tool_call_id"):
        if name in fields:
            if not isinstance(fields[name], str):
                raise bad_request(f"{where}.{name} is {short(fields[name])}: it must be a string", f"{where}.{name}")
            known["reasoning_content" if name == "reasoning" else name] = fields[
                name
            ]  # the two names have the same meaning
    return known


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls of an earlier answer. In OpenAI's API the arguments are a JSON text, but chat templates expect an
    object.
    """
    if not isinstance(calls, list):
        raise bad_request(f"{where} is {short(calls)}: it must be a list", where)
    return [_tool_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(
            f"{where} is {short(call)}: it must be an object with a function, which has a name and arguments", where
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"{where}.function.arguments")
    if not isinstance(arguments, dict):
        at = f"{where}.function.arguments"
        raise bad_request(f"{at} is {short(arguments)}: it must be a JSON object", at)
    return {**call, "function": {**function, "arguments": arguments}}


def _content(content: Any, where: str) -> str:
    """A message's text. The parts of a message are joined without a separator."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_request(f"{where} is {short(content)}: it must be a string or a list of text parts", where)
    return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise bad_request(f"{where} is {short(part)}: it must be an object with type and text", where)
    if part.get("type") != "text":
        raise bad_request(
            f"{where}.type is {short(part.get('type'))}: this server reads parts of type 'text' only", f"{where}.type"
        )
    fields = without_idle(part, IDLE["part"], known=("type", "text"), where=f"{where}.")
    text = fields.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text is {short(text)}: it must be a string", f"{where}.text")
    return text
