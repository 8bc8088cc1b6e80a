"""`sidestream generate`: answers one prompt, for scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sidestream.cli.answer import Answer, show_text
from sidestream.cli.declare import Option, option
from sidestream.cli.loading import running, start_logging
from sidestream.cli.options import (
    DEMO_MODEL,
    AsJson,
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
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from sidestream.llm import LLM


@options_of(config=engine_config, watch=watching, params=sampling_params)
def generate(
    model: Model = DEMO_MODEL,
    prompt: Annotated[
        str | None,
        option("--prompt", short=("-p",), metavar="TEXT", help="Prompt to continue.", show_default="read from stdin"),
    ] = None,
    prompt_file: Annotated[Path | None, Option("File with the prompt, in UTF-8.", "FILE", False)] = None,
    chat: Annotated[bool, Option("Format the prompt as a question with the chat template.")] = False,
    system: Annotated[str | None, Option("System message, with --chat.", "TEXT", False)] = None,
    as_json: AsJson = False,
    log_level: Logging = LogLevel.WARNING,
    *,
    config: EngineConfig,
    watch: Watching,
    params: SamplingParams,
) -> None:
    """Continue a prompt (or, with --chat, answer it) and print the text as it arrives.

    With --json, print one object instead: text, tokens, the tiers that the prompt's KV came from, times, and the
    numbers of drafted and accepted tokens. One newline at the end of a file or of stdin is not part of the prompt.
    """
    if system is not None and not chat:
        raise ConfigError(
            "--system is given without --chat: a plain prompt has no system message; add --chat, or leave it out"
        )
    text = _prompt(prompt, prompt_file)
    start_logging(log_level)

    with running(model, config=config, watch=watch) as llm:
        answer = Answer()
        prompt_ids = llm.tokenizer.chat(_messages(text, system)) if chat else llm.tokenizer.encode(text)
        show = (lambda piece: None) if as_json else show_text
        answer.follow(llm, prompt_ids, params, show, continues=not chat)
        print(json.dumps(_as_json(llm, answer)) if as_json else "", flush=True)


def _prompt(text: str | None, path: Path | None) -> str:
    """The prompt from the option, the file or standard input. Raises ConfigError if there is no prompt, if two are
    given, or if the prompt is not UTF-8.
    """
    if text is not None and path is not None:
        raise ConfigError(f"--prompt and --prompt-file {path} are both given: give only one")
    if text is None:
        if path is None and _at_terminal():
            raise ConfigError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe a text in")
        text = _read(path)
    if not text:
        raise ConfigError("the prompt is empty: give at least one character")
    return text


def _at_terminal() -> bool:
    return sys.stdin.isatty()


def _read(path: Path | None) -> str:
    where = "standard input" if path is None else f"prompt file {path}"
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
        return data.decode("utf-8").removesuffix("\n")
    except OSError as fault:
        raise ConfigError(f"{where} cannot be read: {fault.strerror or fault}; check the path") from fault
    except UnicodeDecodeError as fault:
        raise ConfigError(
            f"{where} is not UTF-8: byte {fault.start} is 0x{fault.object[fault.start]:02x}; convert it"
        ) from fault


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _as_json(llm: LLM, answer: Answer) -> dict[str, object]:
    from sidestream_kv.offload.tiers.stack import names

    cached, speculative = answer.cached, llm.config.speculative
    drafts = {}
    if speculative is not None:
        counters = {"drafted": "draft_tokens_total", "accepted": "accepted_tokens_total"}
        drafts = {name: int(llm.metrics.value(counter, speculative.proposer)) for name, counter in counters.items()}
    return {
        "model": llm.model_name,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "cached": {**dict.fromkeys(names(stores=False), 0), **cached.by_tier},
        "ttft_s": answer.ttft_s,
        "seconds": answer.seconds,
        **drafts,
    }
