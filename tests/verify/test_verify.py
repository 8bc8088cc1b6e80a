"""`sidestream verify` finds a cache that returns wrong blocks, and raises no alarm over rounding."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from sidestream.cli.app import app
from sidestream.errors import ConfigError, SidestreamError
from sidestream.verify import Answer, Ask, Endpoint, Plan, Verdict, compare, verify
from sidestream.verify.judge import tolerance_of

BLOCK = 16
SMALL = Plan(questions=12, output_tokens=6, longest=200, pressure_tokens=2_000)


class FakeServer(ThreadingHTTPServer):
    """A server whose "model" draws log-probabilities from a hash of the context, with a prefix cache of blocks.

    rounding   largest change of a logit that differs between calls
    fault      probability that a reused block is another one
    salts      whether it knows `cache_salt`
    leaks      whether the cache ignores salts
    """

    daemon_threads = True

    def __init__(self, *, rounding: float = 0.0, fault: float = 0.0, salts: bool = True, leaks: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.rounding, self.fault, self.salts, self.leaks = rounding, fault, salts, leaks
        self.blocks: dict[tuple[str, tuple[int, ...]], None] = {}
        self.random = random.Random(5)
        self.requests = self.resets = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, salt = list(body["prompt"]), "" if self.leaks else body.get("cache_salt", "")
        cached = 0
        for stop in range(BLOCK, len(prompt), BLOCK):
            key = (salt, tuple(body["prompt"][:stop]))
            if key not in self.blocks:
                break
            cached = stop
            if self.random.random() < self.fault:
                prompt[stop - BLOCK : stop] = [1] * BLOCK
        for stop in range(BLOCK, len(prompt) + 1, BLOCK):
            self.blocks[salt, tuple(body["prompt"][:stop])] = None
        tokens, found, tops = list[str](), list[float](), list[dict[str, float]]()
        for position in range(body["max_tokens"]):
            top = self.distribution((*prompt, *map(ord, "".join(tokens))))
            if "seed" in body:
                token = random.Random(f"{body['seed']} {position}").choices(
                    list(top), list(map(math.exp, top.values()))
                )[0]
            else:
                token = max(top, key=top.__getitem__)
            tokens.append(token)
            found.append(top[token])
            tops.append(top)
        logprobs = {"tokens": tokens, "token_logprobs": found, "top_logprobs": tops}
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"choices": [{"text": "".join(tokens), "logprobs": logprobs}], "usage": usage}

    def distribution(self, context: tuple[int, ...]) -> dict[str, float]:
        drawn = random.Random(str(context))
        logits = {drawn.choice("abcdefghijkl") + drawn.choice("xyz"): drawn.gauss(0, 2) for _ in range(6)}
        logits = {token: logit + self.random.uniform(-1, 1) * self.rounding for token, logit in logits.items()}
        total = math.log(sum(map(math.exp, logits.values())))
        return {token: logit - total for token, logit in logits.items()}


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests += 1
        if self.path == "/reset_prefix_cache":
            self.server.blocks.clear()
            self.server.resets += 1
            self.reply(200, {})
        elif "cache_salt" in body and not self.server.salts:
            self.reply(400, {"error": "unknown field cache_salt"})
        elif max(body["prompt"]) >= 1_000:
            self.reply(400, {"error": "no such token id"})
        else:
            self.reply(200, self.server.complete(body))

    def reply(self, status: int, value: object) -> None:
        content = json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the client has left
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Any]:
    servers: list[FakeServer] = []

    def start(**options: Any) -> FakeServer:
        servers.append(FakeServer(**options))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(*logprobs: dict[str, float], tokens: str) -> Answer:
    return Answer(tuple(tokens), tuple(top[t] for top, t in zip(logprobs, tokens, strict=True)), logprobs, None)


def test_answers_are_compared_up_to_the_first_different_token() -> None:
    tie = answer({"a": -0.7, "b": -0.71}, {"c": -0.1}, tokens="ac")
    other = answer({"a": -0.71, "b": -0.7}, {"z": -0.1}, tokens="bz")
    found = compare(tie, other)
    assert (round(found.distance, 3), found.differs_at) == (0.01, 0)
    assert found.verdict(0.05) is Verdict.ROUNDING
    assert compare(tie, tie).verdict(0.05) is Verdict.EQUAL


@pytest.mark.parametrize(
    "got",
    [
        answer({"a": -0.7, "b": -0.9}, {"c": -0.1, "d": -3.0}, tokens="ac"),
        answer({"x": -0.7, "y": -0.9}, {"c": -0.1}, tokens="xc"),
        answer({"a": -0.7, "b": -0.9}, tokens="a"),
    ],
    ids=["log-probability", "no common token", "shorter"],
)
def test_an_answer_that_rounding_does_not_explain_is_wrong(got: Answer) -> None:
    expected = answer({"a": -0.7, "b": -0.9}, {"c": -0.3, "d": -2.0}, tokens="ac")
    assert compare(expected, got).verdict(tolerance_of([0.01])) is Verdict.WRONG


@pytest.mark.parametrize("salts", [True, False])
def test_a_sound_server_gives_no_alarm_in_a_thousand_requests(serve: Any, salts: bool) -> None:
    server, requests = serve(rounding=0.01, salts=salts), 0
    for seed in range(5):
        report = verify(Endpoint(server.url), Plan(questions=24, output_tokens=6, longest=200, seed=seed))
        requests += report.requests
        assert report.wrong == []
        assert sum(part.reused or 0 for part in report.rounds) > 1_000
    assert requests > 1_000 and server.resets == 5


def test_answers_as_far_apart_as_uncached_ones_are_rounding(serve: Any) -> None:
    server = serve()

    def progress(name: str) -> None:
        server.rounding = 0.4 if name == "repeated" else server.rounding  # more than was measured at first

    report = verify(Endpoint(server.url), SMALL, on_progress=progress)
    assert not report.wrong and sum(part.rounding for part in report.rounds) > 10


def test_a_block_that_is_wrong_once_in_a_hundred_times_is_found(serve: Any) -> None:
    report = verify(Endpoint(serve(rounding=0.01, fault=0.01).url), SMALL)
    assert report.wrong
    assert all(wrong.got.cached for wrong in report.wrong)


def test_the_smallest_pair_of_a_frequent_fault_is_short(serve: Any) -> None:
    report = verify(Endpoint(serve(fault=0.5).url), SMALL)
    smallest = report.wrong[0].smallest
    assert smallest is not None and len(smallest.prompt) == BLOCK + 1


def test_a_server_that_ignores_salts_is_noted_and_hides_no_fault(serve: Any) -> None:
    report = verify(Endpoint(serve(leaks=True, fault=0.3).url), SMALL)
    assert report.wrong and not report.salts
    rounds = {part.name: part for part in report.rounds}
    assert "although the salt is new" in rounds["another salt"].note


def test_first_answers_that_were_cached_are_noted(serve: Any) -> None:
    server = serve()
    notes = [verify(Endpoint(server.url), SMALL).rounds[0].note for _ in range(2)]
    assert not notes[0] and "use another --seed" in notes[1]


def test_a_second_server_must_answer_alike(serve: Any) -> None:
    sound, broken = serve(), serve(fault=1.0)
    endpoint = Endpoint(broken.url)
    for ask in (Ask(tuple(range(5, 60)), 1),) * 2:
        endpoint.answer(ask)
    report = verify(Endpoint(sound.url), SMALL, beside=endpoint)
    assert not report.wrong  # the second server has not seen these prompts
    report = verify(Endpoint(sound.url), SMALL, beside=endpoint)
    assert {wrong.round for wrong in report.wrong} == {"beside"}


def test_the_command_says_what_it_found_and_exits_with_1(serve: Any) -> None:
    options = ["--questions", "8", "--longest", "200", "--output-tokens", "6", "--pressure-tokens", "1000"]
    server = serve()
    for _ in range(2):  # by default, each run asks other questions
        sound = CliRunner().invoke(app, ["verify", server.url, *options])
        assert sound.exit_code == 0, sound.output
        assert "first answers: 8 answers, 0 prompt tokens reused" in sound.output and "--seed" in sound.output
    assert "0 wrong answers" in sound.output and "after a restart: left out" in sound.output
    broken = CliRunner().invoke(app, ["verify", serve(fault=0.3).url, *options, "--json"])
    assert broken.exit_code == 1
    found = json.loads(broken.stdout)
    assert found["wrong"] == sum(len(part["wrong"]) for part in found["rounds"]) > 0


def test_the_restart_command_runs_and_the_server_is_waited_for(serve: Any, tmp_path: Any) -> None:
    mark = tmp_path / "restarted"
    plan = Plan(questions=4, output_tokens=4, longest=160, pressure_tokens=200, restart=f"touch {mark}")
    report = verify(Endpoint(serve().url), plan)
    assert mark.exists()
    assert report.rounds[-1].name == "after a restart" and report.rounds[-1].compared == 4
    with pytest.raises(SidestreamError, match="the restart failed"):
        verify(Endpoint(serve().url), Plan(questions=4, output_tokens=4, longest=160, restart="exit 3"))


def test_bad_input_names_value_bound_and_remedy() -> None:
    with pytest.raises(ConfigError, match="eight blocks and an answer need 145"):
        Plan(longest=100)
    with pytest.raises(ConfigError, match="questions is 0: it must be at least 1"):
        Plan(questions=0)
    with pytest.raises(ConfigError, match="no URL of a server"):
        Endpoint("ftp://x")
    with pytest.raises(SidestreamError, match="does not answer"):
        Endpoint("http://127.0.0.1:9")
