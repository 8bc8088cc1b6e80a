"""The requests that a server and an engine in process are both measured with. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

_FIRST_ID = 3  # tokenizers put special tokens first
MOST_IDS = 32_000  # every vocabulary of a served model is larger, so any server can be asked the same

NEARLY = 0.85
"""Share of its tokens at which an answer has nearly ended."""
_FEWEST_ASKED = 16  # requests of which a median TTFT is taken
_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop: each client sends its next request when its former one has ended.

    seed      no two workloads of different seeds share a prompt, so nothing is found in a prefix cache
    ids       prompt tokens are drawn from [3, ids)
    watched   report when all first requests have begun to answer, and when one of them has nearly ended
    """

    seed: str
    clients: int
    rounds: int
    prompt_tokens: int
    output_tokens: int
    ids: int = MOST_IDS
    watched: bool = False

    def prompt(self, client: int, number: int) -> list[int]:
        """The prompt of a client's request in a round."""
        drawn = random.Random(f"{self.seed}/{self.clients}/{client}/{number}")
        return drawn.choices(range(_FIRST_ID, min(self.ids, MOST_IDS)), k=self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Loads:
    """What is asked with one number of clients: to warm up, the closed loop, and one longer request of each at once."""

    warm: Workload
    loop: Workload
    calm: Workload


def loads_of(
    *, clients: int, rounds: int, prompt_tokens: int, output_tokens: int, ids: int, repetition: int = 0
) -> Loads:
    """Few clients have more rounds: at least 16 requests follow the ramp. Each repetition has prompts of its own."""
    rounds = max(rounds, -(-_FEWEST_ASKED // clients) + 1)
    return Loads(
        Workload(f"warm {repetition}", clients, 1, prompt_tokens, min(_WARM_TOKENS, output_tokens), ids),
        Workload(f"loop {repetition}", clients, rounds, prompt_tokens, output_tokens, ids),
        Workload(f"calm {repetition}", clients, 1, prompt_tokens, 2 * output_tokens, ids, watched=True),
    )
