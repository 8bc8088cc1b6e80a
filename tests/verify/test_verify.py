"""`sidestream verify` finds a cache that returns wrong blocks, and raises no alarm over rounding."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from faulty_server import faulty_server
from typer.testing import CliRunner

from sidestream.cli.app import app
from sidestream.errors import ConfigError, SidestreamError
from sidestream.verify import Answer, Ask, Endpoint, Plan, Verdict, compare, verify
from sidestream.verify.judge import UNMEASURED_TOLERANCE, tolerance_of
from sidestream.verify.report import as_text

BLOCK = 16
SMALL = Plan(questions=12, output_tokens=6, longest=200, pressure_tokens=2_000)


class FakeServer(ThreadingHTTPServer):
    """A server whose "model" draws log-probabilities from a hash of the context, with a prefix cache of blocks.

    rounding   largest change of a logit that differs between calls
    fault      probability that a reused block is another one
    shift      largest change of a logit by such a block; 0: all logits are others
    salts      whether it knows `cache_salt`
    leaks      whether the cache ignores salts
    block      tokens of a block
    ids        whether it knows `return_tokens_as_token_ids`
    """

    daemon_threads = True
    request_queue_size = 64  # more than connect at once

    def __init__(
        self,
        *,
        rounding: float = 0.0,
        fault: float = 0.0,
        shift: float = 0.0,
        salts: bool = True,
        leaks: bool = False,
        block: int = BLOCK,
        ids: bool = True,
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.rounding, self.fault, self.salts, self.leaks, self.block = rounding, fault, salts, leaks, block
        self.shift, self.ids = shift, ids
        self.blocks: dict[tuple[str, tuple[int, ...]], None] = {}
        self.random = random.Random(5)
        self.requests = self.resets = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, salt = list(body["prompt"]), "" if self.leaks else body.get("cache_salt", "")
        cached, shift = 0, 0.0
        for stop in range(self.block, len(prompt), self.block):
            key = (salt, tuple(body["prompt"][:stop]))
            if key not in self.blocks:
                break
            cached = stop
            if self.random.random() < self.fault:
                shift = self.shift
                prompt[stop - self.block : stop] = prompt[stop - self.block : stop] if shift else [1] * self.block
        for stop in range(self.block, len(prompt) + 1, self.block):
            self.blocks[salt, tuple(body["prompt"][:stop])] = None
        tokens, found, tops = list[str](), list[float](), list[dict[str, float]]()
        for position in range(body["max_tokens"]):
            top = self.distribution((*prompt, *map(ord, "".join(tokens))), shift)
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

    def distribution(self, context: tuple[int, ...], shift: float) -> dict[str, float]:
        drawn = random.Random(str(context))
        logits = {drawn.choice("abcdefghijkl") + drawn.choice("xyz"): drawn.gauss(0, 2) for _ in range(6)}
        logits = {
            token: logit + self.random.uniform(-1, 1) * max(shift, self.rounding) for token, logit in logits.items()
        }
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
        elif "return_tokens_as_token_ids" in body and not self.server.ids:
            self.reply(400, {"error": "unknown field return_tokens_as_token_ids"})
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


def test_a_small_change_of_all_log_probabilities_counts_more_than_a_large_one_of_one() -> None:
    expected = answer(*[{"a": -0.7, "b": -0.9}] * 8, tokens="a" * 8)
    single = answer({"a": -0.7, "b": -1.3}, *[{"a": -0.7, "b": -0.9}] * 7, tokens="a" * 8)
    every = answer(*[{"a": -0.8, "b": -0.8}] * 8, tokens="a" * 8)
    assert [compare(expected, one).verdict(0.05) for one in (single, every)] == [Verdict.EQUAL, Verdict.WRONG]


def test_behind_a_token_that_has_no_spelling_of_its_own_nothing_is_compared() -> None:
    first = Answer(("x", "", "a"), (-0.7, -0.3, -0.1), ({"x": -0.7}, {"": -0.3}, {"a": -0.1}), None)
    other = Answer(("x", "", "b"), (-0.7, -0.9, -0.1), ({"x": -0.7}, {"\ufffd": -0.9}, {"b": -0.1}), None)
    assert compare(first, other).verdict(0.05) is Verdict.EQUAL


@pytest.mark.parametrize("salts", [True, False])
@pytest.mark.parametrize("ids", [True, False])
def test_only_optional_fields_that_the_server_refuses_are_left_out(serve: Any, salts: bool, ids: bool) -> None:
    endpoint = Endpoint(serve(salts=salts, ids=ids).url)
    sent = json.loads(endpoint._body(Ask((5,), 1, salt="s")))
    assert (endpoint.salts, "cache_salt" in sent, "return_tokens_as_token_ids" in sent) == (salts, salts, ids)


@pytest.mark.parametrize(("block", "found"), [(16, 16), (48, 48), (100, 100), (4, 16), (1_000, 16)])
def test_the_block_size_is_found_from_the_reused_tokens(serve: Any, block: int, found: int) -> None:
    assert Endpoint(serve(block=block).url).block_tokens(512, seed=1) == found


@pytest.mark.parametrize("salts", [True, False])
def test_a_sound_server_gives_no_alarm_in_a_thousand_requests(serve: Any, salts: bool) -> None:
    server, requests = serve(rounding=0.01, salts=salts), 0
    for seed in range(4):
        report = verify(Endpoint(server.url), Plan(questions=24, output_tokens=6, longest=200, seed=seed))
        requests += report.requests
        assert report.wrong == []
        assert sum(part.reused or 0 for part in report.rounds) > 1_000
    assert requests > 1_000 and server.resets == 4


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


def test_a_wrong_block_that_changes_little_more_than_rounding_is_found(serve: Any) -> None:
    report = verify(Endpoint(serve(rounding=0.05, fault=0.02, shift=0.2).url), SMALL)
    assert sum(wrong.distance < UNMEASURED_TOLERANCE for wrong in report.wrong) > 2
    assert all(wrong.got.cached for wrong in report.wrong)


def test_after_a_finding_a_shorter_prompt_is_searched(serve: Any) -> None:
    server = serve()

    def progress(name: str) -> None:
        server.fault = 0.5 if name == "unrelated prompts" else server.fault

    plan = Plan(questions=2, output_tokens=6, longest=200, pressure_s=0.0)
    report = verify(Endpoint(server.url), plan, on_progress=progress)
    smallest = report.smallest
    assert [len(part.wrong) for part in report.rounds if part.note == "they had 0 tokens"] == [1]
    assert smallest is not None and smallest.round == report.rounds[-1].name
    assert len(smallest.ask.prompt) == BLOCK + 1 and any(
        str(list(smallest.ask.prompt)) in line for line in as_text(report)
    )


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


def test_the_restart_command_runs_and_the_server_is_waited_for(serve: Any, tmp_path: Path, capfd: Any) -> None:
    mark = tmp_path / "restarted"
    plan = Plan(questions=4, output_tokens=4, longest=160, pressure_tokens=200, restart=f"touch {mark}; echo done")
    report = verify(Endpoint(serve().url), plan)
    assert mark.exists() and capfd.readouterr() == ("", "done\n")
    assert report.rounds[-1].name == "after a restart" and report.rounds[-1].compared == 4
    with pytest.raises(SidestreamError, match="the restart failed"):
        verify(Endpoint(serve().url), Plan(questions=4, output_tokens=4, longest=160, restart="exit 3"))


def test_bad_input_names_value_bound_and_remedy() -> None:
    with pytest.raises(ConfigError, match="eight blocks and an answer need 137"):
        Plan(longest=100)
    with pytest.raises(ConfigError, match="questions is 0: it must be at least 1"):
        Plan(questions=0)
    for url in ("ftp://x", "http://[::1", "http://x:99999", "http://x:y"):
        with pytest.raises(ConfigError, match="no URL of a server"):
            Endpoint(url)
    with pytest.raises(SidestreamError, match="does not answer"):
        Endpoint("http://127.0.0.1:9")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "share", "status"), [("hit", 0.01, 1), ("load", 0.01, 1), ("load", 0.0, 0)])
def test_a_rare_wrong_block_of_a_real_server_is_found(kind: str, share: float, status: int, tmp_path: Path) -> None:
    options = ["--seed", "1", "--longest", "160", "--repeats", "9", "--pressure-tokens", "4000", "--json"]
    with faulty_server(kind, share, tmp_path) as url:
        done = CliRunner().invoke(app, ["verify", url, *options])
    assert done.exit_code == status, done.output
    found = json.loads(done.stdout)
    assert sum(part["reused"] or 0 for part in found["rounds"]) > 10_000
    if status:
        assert found["smallest"]["got"]["cached"] >= BLOCK and found["smallest"]["distance"] > found["tolerance"]
