"""The share of an agent's prompt tokens that come from a cache: each turn forces a tool call, and the next one sends
the conversation with this call and its result.

The server runs in another process, as users start it; turns go through OpenAI's client. A turn's prompt repeats the
last one's and its answer, so the model computes only a tool result and the rest of a block again, if the chat template
writes the call with the tokens that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.serving.server import Server
from proof.report import Figure, at_least
from sidestream.errors import SidestreamError

_TEMPLATE = Path(__file__).parents[1] / "examples/agent/chat_template.jinja"
_ANSWER_TOKENS = 200
_ANSWER_S = 120.0
_CITIES = ("Paris", "Rome", "Lima", "Oslo", "Cairo")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Keep a note",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "maxLength": 60}, "tags": {"type": "array", "maxItems": 3}},
                "required": ["text"],
            },
        },
    },
]


def measure(model: str, *, turns: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Run one agent for `turns` turns on a server that offloads to host memory. Raises SidestreamError if a turn has no
    call.
    """
    import openai

    arguments = ["--device", "cpu", "--threads", "1", "--api-processes", "1", "--offload-host", "256MiB"]
    with Server(model, [*arguments, "--served-model-name", "agent", "--chat-template", str(_TEMPLATE)]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=_ANSWER_S, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "Plan a trip: ask for the weather, and keep notes."}]
        usages = []
        with client:
            for turn in range(turns):
                on_progress(f"turn {turn + 1} of {turns}")
                usages.append(_turn(client, messages, turn))
    later = usages[1:]
    prompt, cached = (sum(usage[index] for usage in later) for index in (0, 1))
    return [
        Figure("agent_reused_share", cached / prompt, "of prompt tokens", at_least(0.95)),
        Figure("agent_prompt_tokens", prompt / len(later), "tokens a turn"),
        Figure("agent_last_prompt_tokens", usages[-1][0], "tokens"),
        Figure("agent_not_reused_tokens", (prompt - cached) / len(later), "tokens a turn"),
    ]


def _turn(client: Any, messages: list[Any], turn: int) -> tuple[int, int]:
    """Ask, and append the call and its result to `messages`. Returns the numbers of prompt tokens and cached ones."""
    reply = client.chat.completions.create(
        model="agent",
        messages=messages,
        tools=_TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=_ANSWER_TOKENS,
    )
    message, usage = reply.choices[0].message, reply.usage
    if not message.tool_calls:
        raise SidestreamError(f"turn {turn + 1} has no call: {message.content!r:.200}")
    messages.append(message.model_dump(exclude_none=True))
    city = _CITIES[turn % len(_CITIES)]
    text = f"{city}: sunny, {turn + 10} degrees in the morning and {turn + 17} in the afternoon"
    messages += [{"role": "tool", "tool_call_id": call.id, "content": text} for call in message.tool_calls]
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
