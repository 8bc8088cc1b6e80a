"""The form of an answer that a request asks for, as one grammar: its reasoning, its tool calls, and the form of its
content. Used where requests are parsed, off the event loop.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from sidestream.config import StructuredOutputs
from sidestream.errors import RequestRejected
from sidestream.formats import AnswerFormat
from sidestream.formats.grammar import answer_grammar
from sidestream.grammar import check, expression_of
from sidestream.server.errors import bad_request
from sidestream.text import TokenizerLike


def structured_outputs(asked: Any) -> StructuredOutputs | None:
    """The form that the fields `response_format` and `structured_outputs` ask for; None: any. Raises ApiError or
    RequestError, naming the field at fault.
    """
    response, structured = asked.response_format, asked.structured_outputs
    if response is not None and response.type == "text":
        response = None
    if response is not None and structured is not None:
        raise bad_request("response_format and structured_outputs are both given: send one of them", "response_format")
    if structured is not None:
        wanted = StructuredOutputs(
            **{**structured.model_dump(by_alias=True, exclude_unset=True), "choice": tuple(structured.choice)}
        )
        check(wanted)
        return wanted
    if response is None:
        return None
    if response.type == "json_object":
        return StructuredOutputs(json_object=True)
    if response.json_schema is None:
        raise bad_request("response_format.json_schema is missing: type json_schema needs it", "response_format")
    wanted = StructuredOutputs(json=json.dumps(response.json_schema.schema_))
    check(wanted, "response_format.json_schema.schema")
    return wanted


def answer_form(
    answer: AnswerFormat, tokenizer: TokenizerLike, content: StructuredOutputs | None, *, forced: bool, several: bool
) -> StructuredOutputs | None:
    """The form of a whole answer, with the given form of its content; None: any text is an answer.

    forced    the answer must be tool calls
    several   the answer may have more than one call
    """
    if answer.tools is None and content is None:
        return None
    expression = None if content is None else expression_of(content)
    grammar = answer_grammar(answer, tokenizer.special_id, content=expression, forced=forced, several=several)
    return StructuredOutputs(grammar=grammar)


def check_strict(function: dict[str, Any], where: str) -> None:
    """Raise RequestRejected if a strict tool's schema cannot be enforced."""
    if function.pop("strict", False):
        check(StructuredOutputs(json=json.dumps(function.get("parameters", {}))), f"{where}.parameters")


def enforceable_parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which allows no others unless it says so. Any object if it cannot be enforced,
    and the tool is not strict.
    """
    parameters = {"type": "object", "properties": {}, "additionalProperties": False, **function.get("parameters", {})}
    return parameters if _is_enforceable(json.dumps(parameters)) else {"type": "object"}


@functools.lru_cache(maxsize=1024)
def _is_enforceable(schema: str) -> bool:
    try:
        check(StructuredOutputs(json=schema))
    except RequestRejected:
        return False
    return True
