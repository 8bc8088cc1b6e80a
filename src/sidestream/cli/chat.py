"""`sidestream chat`: a conversation in the terminal, or one question per line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.text import Text

from sidestream.cli.answer import Answer, show_text
from sidestream.cli.declare import Option
from sidestream.cli.errors import show_error
from sidestream.cli.loading import running, start_logging
from sidestream.cli.options import (
    DEMO_MODEL,
    Logging,
    LogLevel,
    Model,
    Watching,
    engine_config,
    options_of,
    sampling_params,
    watching,
)
from sidestream.config import EngineConfig, SamplingParams
from sidestream.errors import ConfigError, RequestError
from sidestream_kv.config import unknown_name

if TYPE_CHECKING:
    from sidestream.llm import LLM

_COMMANDS = {
    "/help": "list the commands",
    "/reset": "clear the conversation",
    "/stats": "show the engine's counters",
    "/quit": "end",
}


@options_of(config=engine_config, watch=watching, params=sampling_params)
def chat(
    model: Model = DEMO_MODEL,
    system: Annotated[str | None, Option("System message.", "TEXT", False)] = None,
    log_level: Logging = LogLevel.WARNING,
    *,
    config: EngineConfig,
    watch: Watching,
    params: SamplingParams,
) -> None:
    """Talk with MODEL. If the input is a pipe, each line is a question, and only the answers are printed.

    Ctrl-C interrupts an answer, Ctrl-D ends the conversation; /help lists commands.
    """
    start_logging(log_level)

    with running(model, config=config, watch=watch) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ConfigError(f"model {model} has no chat template: use sidestream generate, or a chat model")
        conversation = _Conversation(llm, params, system)
        if sys.stdin.isatty():
            _interactive(conversation)
        else:
            _piped(conversation)


class _Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def reset(self) -> None:
        self._messages = list(self._opening)

    def ask(self, question: str) -> Answer:
        """Print the answer as it arrives. After Ctrl-C, the conversation keeps the partial answer; if the answer is
        empty, the conversation keeps neither the question nor the answer.
        """
        answer = Answer()
        messages = [*self._messages, {"role": "user", "content": question}]
        with contextlib.suppress(KeyboardInterrupt):
            answer.follow(self.llm, self.llm.tokenizer.chat(messages), self._params, show_text)
        if answer.text:
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def _piped(conversation: _Conversation) -> None:
    for line in sys.stdin:
        question = line.strip()
        if question == "/quit":
            return
        if question.startswith("/"):
            _command(conversation, question, Console())
        elif question:
            answer = conversation.ask(question)
            print(flush=True)
            if answer.finish_reason is None:
                raise KeyboardInterrupt


def _interactive(conversation: _Conversation) -> None:
    console = Console(highlight=False)
    console.print(
        Text.assemble(
            (conversation.llm.model_name, "bold"), (" · Ctrl-C interrupts an answer, Ctrl-D ends · /help", "dim")
        )
    )
    for question in _questions(console):
        if question == "/quit":
            return
        if question.startswith("/"):
            _command(conversation, question, console)
        elif question:
            _answer(conversation, question, console)


def _answer(conversation: _Conversation, question: str, console: Console) -> None:
    try:
        answer = conversation.ask(question)
        console.print(f"\n{answer.summary()}\n", style="dim", soft_wrap=True)
    except RequestError as error:
        show_error(error)
        console.print("the question was dropped; /reset clears the conversation\n", style="dim")


def _questions(console: Console) -> Iterator[str]:
    """Yield the lines that the user types, until Ctrl-D. Ctrl-C discards the current line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and history
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            console.print("\n(Ctrl-D or /quit ends)", style="dim")
        except EOFError:
            console.print()
            return


def _command(conversation: _Conversation, name: str, console: Console) -> None:
    match name:
        case "/reset":
            conversation.reset()
            console.print("the conversation is cleared", style="dim")
        case "/stats":
            console.print(_stats(conversation.llm), style="dim", highlight=False)
        case "/help":
            console.print("\n".join(f"{command:8}{meaning}" for command, meaning in _COMMANDS.items()), style="dim")
        case _:
            console.print(Text(unknown_name("command", name.split()[0], _COMMANDS)))


def _stats(llm: LLM) -> str:
    from sidestream_kv.offload.tiers.stack import names

    value = llm.metrics.value
    lines = [f"prompt tokens {value('prompt_tokens_total'):.0f}, output tokens {value('output_tokens_total'):.0f}"]
    known = [tier for tier in names() if tier in names(stores=False) or value("tier_blocks", tier)]
    cached = (f"{value('cached_tokens_total', tier):.0f} {tier}" for tier in known)
    blocks = (f"{value(f'blocks_{state}'):.0f} {state}" for state in ("used", "cached", "free"))
    lines += [f"cached tokens: {', '.join(cached)}", f"device blocks: {', '.join(blocks)}"]
    if llm.config.offload is not None:
        tiers = (f"{value('tier_blocks', tier):.0f} in {tier}" for tier in known[1:])
        lines += [f"tier blocks: {', '.join(tiers)}"]
    return "\n".join(lines)
