"""Serve two replicas of a model on this machine with Ray Serve, ask them, and stop them.

    pip install 'sidestream[ray]' openai
    python examples/ray_serve/two_replicas.py [MODEL] [--serve]

All turns of a session go to the replica that has its KV. With --serve, the replicas serve on port 8000 until Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import openai

from sidestream import SidestreamError
from sidestream.ray import serve_locally


def ask(url: str) -> None:
    """Two turns of a conversation; the second one reuses the KV of the first."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", default_headers={"x-session-id": "whales"})
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "Why do whales sing? Answer in one sentence, please."}]
    for question in ("Do all of them sing?", ""):
        reply = client.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=16, temperature=0
        )
        answer = reply.parse()
        text, cached = answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens
        print(f"{text!r}, cached prompt tokens: {cached}, replica: {reply.headers['x-sidestream-replica']}")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]


def main(arguments: list[str]) -> None:
    """Ask the replicas, or serve until a signal."""
    models = [argument for argument in arguments if argument != "--serve"]
    application = {
        "model": models[0] if models else "smollm2-135m-instruct",
        "engine": {"device": "cpu", "compute_threads": 1, "kv_memory": "256MiB"},
        "router": "session",
        "replicas": {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}},
    }
    signals = {signal.SIGINT, signal.SIGTERM}
    with serve_locally(application, num_cpus=4) as url:
        if "--serve" in arguments:
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            print(f"two replicas serve at {url}; Ctrl-C stops them", flush=True)
            signal.sigwait(signals)
        else:
            ask(url)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SidestreamError as error:
        sys.exit(f"error: {error}")
