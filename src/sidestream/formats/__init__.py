"""Formats in which models write tool calls and reasoning: one table, and an incremental parser for each answer. Pure
text: knows no tokens, no requests and no server.
"""

from sidestream.formats.answer import AnswerFormat, AnswerParser, Message, is_inside, message_of
from sidestream.formats.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from sidestream.formats.table import REASONING_FORMATS, TOOL_FORMATS, reasoning_format_of, tool_format_of

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "AnswerFormat",
    "AnswerParser",
    "Arguments",
    "CallBegun",
    "CallEnded",
    "Content",
    "Event",
    "Message",
    "Reasoning",
    "is_inside",
    "message_of",
    "reasoning_format_of",
    "tool_format_of",
]
