"""Start a server, ask it over HTTP as any OpenAI client would, and stop it.

    python examples/serve_and_ask.py [MODEL]

Only the standard library is used for the requests; `openai.OpenAI(base_url=f"{url}/v1", api_key="-")` works as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def server(model: str, disk: Path) -> Iterator[str]:
    """URL of a server on a free port, which ends with the block. SIGTERM lets it finish and store what it has."""
    command = [sys.executable, "-m", "sidestream", "serve", model, "--port", "0", "--api-processes", "1"]
    offload = ["--kv-memory", "64MiB", "--offload-host", "64MiB", "--offload-disk", str(disk)]
    with subprocess.Popen([*command, *offload], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            # It prints one line when it accepts requests: MODEL is ready at http://127.0.0.1:PORT
            ready = next((line for line in process.stdout if " is ready at " in line), None)
            if ready is None:
                sys.exit(f"error: the server ended with status {process.wait()}; its messages are above")
            yield ready.split()[-1]
        finally:
            process.terminate()


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One chat completion."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return dict(json.load(reply))


def main(model: str, disk: Path) -> None:
    """Ask the same question twice; the second time the server reuses the KV of the first."""
    with server(model, disk) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as reply:
            name = json.load(reply)["data"][0]["id"]
        question = {"role": "user", "content": "Why do whales sing? Answer in one sentence, please."}
        for _ in range(2):
            answer = ask(url, {"model": name, "messages": [question], "max_tokens": 16, "temperature": 0})
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            print(f"{answer['choices'][0]['message']['content']!r}, cached prompt tokens: {cached}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct", Path(temporary))
