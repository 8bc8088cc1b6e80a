"""The requests of the measurement, for a server and for an engine without a server. Does no I/O."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

_FIRST_ID = 3  # the smallest token ids are often special tokens
MOST_IDS = 32_000  # smaller than the vocabulary of every served model, so all servers can get the same prompts

NEARLY = 0.85
"""An answer counts as nearly ended when it has this share of its tokens."""
_FEWEST_ASKED = 16  # minimum number of requests for a median TTFT
_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop: each client sends its next request when its previous one has ended. With `rate`, an open loop:
    each client sends one request, at a time that does not depend on any answer.

    seed      workloads with different seeds share no prompt, so the prefix cache does not help
    rounds    number of consecutive requests of each client
    ids       prompt tokens are drawn from token ids in [3, ids)
    watched   the clients report when all first answers have begun, and when the first answer has nearly ended
    rate      mean requests per second of Poisson arrivals; None: a closed loop, whose first requests are sent at once
    """

    seed: str
    clients: int
    rounds: int
    prompt_tokens: int
    output_tokens: int
    ids: int = MOST_IDS
    watched: bool = False
    rate: float | None = None

    def prompt(self, client: int, number: int) -> list[int]:
        """The prompt of a client's request in round `number`."""
        drawn = random.Random(f"{self.seed}/{self.clients}/{client}/{number}")
        return drawn.choices(range(_FIRST_ID, min(self.ids, MOST_IDS)), k=self.prompt_tokens)

    def arrivals_s(self) -> list[float]:
        """When each client sends its first request, in seconds from the beginning of the run."""
        if self.rate is None:
            return [0.0] * self.clients
        drawn = random.Random(f"{self.seed}/{self.clients}/arrivals")
        return list(accumulate(drawn.expovariate(self.rate) for _ in range(self.clients)))


@dataclass(frozen=True, slots=True)
class Loads:
    """The workloads for one number of clients: a warm-up, a closed loop, and the calm phase (one longer request per
    client).
    """

    warm: Workload
    loop: Workload
    calm: Workload


def loads_of(
    *, clients: int, rounds: int, prompt_tokens: int, output_tokens: int, ids: int, repetition: int = 0
) -> Loads:
    """The workloads for `clients` clients. With few clients there are more rounds, so that at least 16 requests follow
    the first round. Each repetition has different prompts.
    """
    rounds = max(rounds, -(-_FEWEST_ASKED // clients) + 1)
    return Loads(
        Workload(f"warm {repetition}", clients, 1, prompt_tokens, min(_WARM_TOKENS, output_tokens), ids),
        Workload(f"loop {repetition}", clients, rounds, prompt_tokens, output_tokens, ids),
        Workload(f"calm {repetition}", clients, 1, prompt_tokens, 2 * output_tokens, ids, watched=True),
    )


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Poisson arrivals at a share of a server's capacity.

    percent    of the capacity, which is the rate of the closed loop with the most clients
    requests   number of requests
    """

    percent: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    ids: int
    repetition: int = 0

    @property
    def name(self) -> str:
        """End of the names of the figures."""
        return f"poisson{self.percent}"

    def workload(self, rate: float) -> Workload:
        """The requests, at `rate` requests per second."""
        seed = f"{self.name} {self.repetition}"
        return Workload(seed, self.requests, 1, self.prompt_tokens, self.output_tokens, self.ids, rate=rate)
