"""A valid request of an API, and what requests are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sidestream.config import SamplingParams
from sidestream.errors import ContextTooLong
from sidestream.formats import AnswerFormat
from sidestream.server.errors import ApiError

Api = Literal["chat", "text"]


@dataclass(frozen=True, slots=True)
class Served:
    """Constants of the server against which requests are checked.

    max_choices    maximum number of prompts times n
    max_model_len  maximum number of tokens of prompt and output together
    tool_format, reasoning_format   formats of the model's answers; None: unknown, or switched off
    always_reasoning   reasoning is split from every chat answer, not only if the request has tools or reasoning options
    """

    model_name: str
    max_choices: int
    max_model_len: int
    tool_format: str | None = None
    reasoning_format: str | None = None
    always_reasoning: bool = False

    def check_length(self, items: Sequence[Any], param: str, unit: str) -> None:
        """Raise ContextTooLong for more items than the model takes tokens."""
        if len(items) > self.max_model_len:
            raise ContextTooLong(
                f"{param} has {len(items)} {unit}, the model takes {self.max_model_len} tokens: shorten it", param=param
            )

    def check_model(self, name: str | None) -> None:
        """Raise ApiError with status 404 for a name other than the served model's."""
        if name is not None and name != self.model_name:
            message = f"the model {name[:100]!r} does not exist: this server serves {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True, slots=True)
class Beams:
    """A beam search in place of sampling: the number of beams, and the exponent of the length in answers' scores."""

    width: int
    length_penalty: float


@dataclass(frozen=True, slots=True)
class Call:
    """One valid request of either API, with encoded prompts.

    include_usage     end the stream with a chunk that holds the usage
    continuous_usage  add the usage to every chunk
    request_id        the id that the client gave
    continues         the answers continue the prompts' texts; False: they begin a text
    tokens_as_ids     log-probabilities name a token `token_id:7` in place of its text
    prompt_logprobs   the reply has log-probabilities of the prompts, with so many alternatives; None: it has none
    echo              the prompts' texts, with which their answers begin; empty: answers begin with the model's text
    answer            what to parse in the answers; None: they are text
    include_reasoning, parallel_tool_calls  whether the reply has the reasoning, and calls after the first one
    beams             the answers are those of a beam search; None: they are sampled
    only_echo         answers are the prompts' texts; the token that the engine computes is left out
    """

    api: Api
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    request_id: str | None = None
    cache_salt: str = ""
    continues: bool = True
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    only_echo: bool = False
    beams: Beams | None = None
    answer: AnswerFormat | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool = True

    @property
    def shown_tokens(self) -> Sequence[str]:
        """Special tokens whose name is part of the answers' text, unless `params.skip_special_tokens` is false."""
        return () if self.answer is None else self.answer.literals()

    @property
    def num_choices(self) -> int:
        """Number of samples in the reply."""
        return len(self.prompts) * self.params.n
