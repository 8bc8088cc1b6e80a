"""The command line with the toy model behind it: a real engine, no weights. Also a program, for tests that send signals.

The toy never ends an answer, so one without `--max-tokens` runs until it is interrupted.
"""

from __future__ import annotations

import sys
from typing import Any

from sidestream.testing.tokenizer import ToyTokenizer
from sidestream.testing.toy import ToyModel

ENGINE = ("--kv-memory", "8MiB", "--threads", "1")
_MAX_MODEL_LEN = 1 << 16


class ChattingToyTokenizer(ToyTokenizer):
    """Says that it has a chat template, as tokenizers of real models do."""

    has_chat_template = True


def load_toy(path: str, *, dtype: str, block_tokens: int) -> ToyModel:
    """In the place of `sidestream.models.load_model`."""
    return ToyModel(block_tokens=block_tokens, max_model_len=_MAX_MODEL_LEN)


def expected_text(prompt: str, num_tokens: int) -> str:
    """What the toy writes after `prompt`."""
    tokenizer = ToyTokenizer()
    return tokenizer.decode(ToyModel().expected(tokenizer.encode(prompt), num_tokens))


def use_toy(patch: Any) -> None:
    """Let every command that loads a model load the toy. `patch(target, name, value)` sets an attribute."""
    from sidestream import llm

    patch(llm, "load_model", load_toy)
    patch(llm.Tokenizer, "load", lambda path: ChattingToyTokenizer())


if __name__ == "__main__":
    use_toy(setattr)
    from sidestream.cli import main

    main()
