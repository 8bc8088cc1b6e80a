"""`sidestream top`: the live figures of a running server in the terminal, from its `/metrics/stream`."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Generator, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from sidestream.cli.declare import Option, flag
from sidestream.cli.top_view import Screen
from sidestream.errors import ConfigError, SidestreamError
from sidestream.verify.endpoint import server_url

_CONNECT_S, _SILENCE_S, _AGAIN_S = 5.0, 15.0, 1.0
_STREAM = "/metrics/stream"

Url = Annotated[str, typer.Argument(metavar="URL", help="Sidestream server, such as http://127.0.0.1:8000.")]


def top(
    url: Url = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, Option("The server's API key.", "KEY", False, envvar="SIDESTREAM_API_KEY")] = None,
    once: Annotated[bool, Option("Print one sample and end.")] = False,
    as_json: Annotated[bool, flag("--json", "Print one sample as a JSON object and end.")] = False,
) -> None:
    """Show what the server at URL does: its streams, requests, tiers, steps and drafts. Ctrl-C ends.

    If the server ends, the command waits until it is back.
    """
    source = LiveSource(url, api_key)
    console = Console()
    if as_json or once:
        with contextlib.closing(source.samples()) as samples:
            sample = next(samples)
        if as_json:
            print(json.dumps(sample))
        else:
            screen = Screen(url)
            screen.add(sample)
            console.print(screen)
        return
    if not console.is_terminal:
        raise ConfigError("standard output is no terminal: give --once for one sample, or --json")
    screen, samples = Screen(url), source.samples()
    screen.add(next(samples))  # an error here is one line, not a screen
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for sample in samples:
                    screen.add(sample)
                    live.refresh()
            except ConfigError:  # another server, or another key: no wait helps
                raise
            except SidestreamError as error:
                screen.lose(str(error))
            live.refresh()
            time.sleep(_AGAIN_S)
            samples = source.samples()


class LiveSource:
    """The stream of live figures of the server at `url`. Raises ConfigError for an unusable URL."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._parts = parts = server_url(url)
        self._url = parts.geturl().rstrip("/")
        self._path = parts.path.rstrip("/").removesuffix("/v1") + _STREAM
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def samples(self) -> Generator[dict[str, Any], None, None]:
        """Yield samples until the connection ends. Raises SidestreamError if it ends or is silent, ConfigError if the
        server has no such stream or refuses the key.
        """
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(_SILENCE_S)
            connection.request("GET", self._path, headers=self._headers)
            with connection.getresponse() as reply:
                self._check(reply)
                yield from self._read(reply)
        except (OSError, http.client.HTTPException) as error:
            raise SidestreamError(f"{self._url} does not answer ({error or type(error).__name__})") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{self._url}{_STREAM} sends no live figures of this version ({error!r})") from error
        finally:
            connection.close()

    def _read(self, reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        while line := reply.readline():
            if not line.startswith(b"data: "):
                continue
            sample = json.loads(line[6:])
            if "error" in sample:
                raise SidestreamError(f"{self._url}: {sample['error']['message']}")
            if "requests" in sample:
                yield sample
            elif (status := sample["health"]["status"]) != "ok":  # without an engine, a sample has its health only
                raise SidestreamError(f"{self._url}: the engine is {status}")
        raise SidestreamError(f"{self._url} has ended the stream")

    def _check(self, reply: http.client.HTTPResponse) -> None:
        if reply.status == 200 and reply.headers.get_content_type() == "text/event-stream":
            return
        if reply.status == 401:
            raise ConfigError(f"{self._url} refused the key: give --api-key, or set SIDESTREAM_API_KEY")
        if reply.status == 503:
            raise SidestreamError(f"{self._url}: {_message(reply.read(4096))}")
        raise ConfigError(
            f"{self._url} has no live figures (status {reply.status} for {_STREAM}): it is another kind of server, an "
            "older Sidestream, or was started with --no-page"
        )


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "it cannot serve the live figures now"
