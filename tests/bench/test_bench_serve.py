"""`python -m bench serve`: what it makes of bytes and times, that its clients ask as they should, and one short run of
all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_runner import Run

from bench.serving.answers import (
    Answer,
    Measured,
    StepsSoFar,
    Window,
    answer_of,
    burst_share,
    gaps_ms,
    steady_window,
    tokens_per_second,
    whole_run,
)
from bench.serving.baseline import _Calm, _Loop, config_of
from bench.serving.beside import capacity_of, compared, read_result
from bench.serving.clients import Clients, Target
from bench.serving.measure import LIMITS, _compared, medians, row
from bench.serving.reply import Reply
from bench.serving.server import Server, metric
from bench.serving.workload import Arrivals, Workload, loads_of
from proof.random_models import random_checkpoint
from proof.report import Figure, at_least, percentile
from sidestream.config import SamplingParams
from sidestream.errors import ConfigError, SidestreamError
from sidestream.models import load_model
from sidestream.tokenizer import Tokenizer
from sidestream.types import CachedTokens, Delta
from sidestream_kv.metrics import Metrics

pytestmark = pytest.mark.slow

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MS = 1_000_000


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}], usage=None)


def usage(tokens: int) -> bytes:
    return event(choices=[], usage={"completion_tokens": tokens})


DONE = b"data: [DONE]\n\n"


def taken(*arrivals: tuple[int, bytes]) -> Reply:
    reply = Reply()
    ends = [reply.take(data, now_ns) for now_ns, data in arrivals]
    assert ends == [False] * (len(ends) - 1) + [True]
    return reply


def read(*parts: bytes, tokens: int = 2) -> Answer:
    return answer_of(taken((1, HEAD + chunked(*parts))), client=0, number=0, sent_ns=0, tokens=tokens)


# ------------------------------------------------------------------ bytes


def test_an_event_has_the_time_of_its_last_byte_wherever_the_stream_is_cut() -> None:
    # an event over two chunks, two events in one chunk, a comment
    parts = [piece("a")[:9], piece("a")[9:], piece("b") + piece("c"), b": ping\n\n", usage(3), DONE]
    raw = HEAD + chunked(*parts)
    whole = [event.data for event in taken((1, raw)).events()]
    assert len(whole) == 5
    assert whole[-1] == b"[DONE]"
    ends = [
        raw.index(data) + len(data) + 2 for data in whole[1:]
    ]  # with the empty line that ends it; the first one is cut by a chunk
    for cut in range(1, len(raw)):
        events = list(taken((1, raw[:cut]), (2, raw[cut:])).events())
        assert [event.data for event in events] == whole
        assert [event.time_ns for event in events[1:]] == [1 if end <= cut else 2 for end in ends]


def test_events_that_end_with_carriage_returns_are_read_too() -> None:
    reply = taken((1, HEAD + chunked(b"data: 1\r\n\r\n", b"data: [DONE]\r\n\r\n")))
    assert [event.data for event in reply.events()] == [b"1", b"[DONE]"]


def test_a_reply_of_known_length_ends_with_its_last_byte() -> None:
    reply = taken((1, b"HTTP/1.1 503 Busy\r\nContent-Le"), (2, b"ngth: 4\r\n\r\nab"), (3, b"cd"))
    assert (reply.status, reply.body()) == (503, b"abcd")


def test_a_reply_without_a_known_end_is_refused() -> None:
    with pytest.raises(SidestreamError, match="neither chunks nor a length"):
        Reply().take(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", 0)


def test_an_answer_has_a_time_for_each_piece_with_text() -> None:
    parts = [piece("a"), piece(""), piece("b", "length"), usage(3), DONE]
    raw, arrivals = HEAD + chunked(*parts), []
    for number, part in enumerate(parts):
        end = raw.index(part) + len(part)
        arrivals.append((number + 1, raw[:end]))
        raw = b"\0" * end + raw[end:]
    arrivals = [(now, data.lstrip(b"\0")) for now, data in arrivals]
    arrivals.append((9, raw.lstrip(b"\0")))
    answer = answer_of(taken(*arrivals), client=4, number=2, sent_ns=0, tokens=3)
    assert answer == Answer(4, 2, 0, (1, 3), 5, 3, "ab")


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([piece("a"), usage(2)], r"ended without \[DONE\]"),
        ([], r"ended without \[DONE\]"),
        ([piece("a"), b'data: {"error": {"message": "lost"}}\n\n', DONE], "ended with an error.*lost"),
        ([piece("a"), usage(1), DONE], "the usage of an answer is 1 tokens instead of 2"),
        ([piece("a"), DONE], "the usage of an answer is None tokens"),
        ([piece(""), usage(2), DONE], "has no text"),
    ],
)
def test_an_answer_that_is_not_as_requested_ends_the_benchmark(parts: list[bytes], reason: str) -> None:
    with pytest.raises(SidestreamError, match=reason):
        read(*parts)


# ------------------------------------------------------------------ times


def answer(client: int, number: int, sent_ms: float, *pieces_ms: float, tokens: int | None = None) -> Answer:
    times = tuple(int(at * MS) for at in pieces_ms)
    return Answer(client, number, int(sent_ms * MS), times, times[-1], tokens or len(times))


def test_figures_are_of_the_whole_run_but_for_the_steady_rate() -> None:
    answers = (
        answer(0, 0, 0, 10, 20, 30),
        answer(0, 1, 30, 40, 50, 60),
        answer(1, 0, 0, 25, 35, 45),
        answer(1, 1, 45, 55, 75, 75),
    )
    assert (whole_run(answers), steady_window(answers)) == (Window(0, 75 * MS), Window(25 * MS, 60 * MS))
    figures = {figure.name: figure.value for figure in row("a", 2, Measured(answers, ()))}
    assert figures["a_tok_s_b2"] == pytest.approx(12 / 0.075)
    # 30, 40, 50, 60 of the one, 35, 45, 55 of the other
    assert figures["a_steady_tok_s_b2"] == pytest.approx(7 / 0.035)
    assert figures["a_ttft_ms_p99_b2"] == pytest.approx(np.percentile([10, 10, 25, 10], 99))
    assert figures["a_itl_ms_p90_b2"] == pytest.approx(np.percentile([10] * 6 + [20, 0], 90))
    assert figures["a_tpot_ms_p50_b2"] == 10
    assert figures["a_e2e_ms_p99_b2"] == pytest.approx(np.percentile([30, 30, 45, 30], 99))
    assert figures["a_burst_share_b2"] == 1 / 8


def test_tokens_without_text_of_their_own_count_with_the_pieces_of_their_answer() -> None:
    assert tokens_per_second([answer(0, 0, 0, 10, 20, 30, 40, tokens=8)], Window(20 * MS, 1020 * MS)) == 4


def test_clients_that_are_never_busy_together_have_no_steady_rate() -> None:
    answers = (answer(0, 0, 0, 1, 2), answer(1, 0, 0, 3, 4))
    assert steady_window(answers) is None
    assert [figure.name for figure in row("a", 2, Measured(answers, ())) if "steady" in figure.name] == []


def test_pieces_that_arrive_together_are_a_burst() -> None:
    lumps = [answer(0, 0, 0, 10, 10, 10.1, 20, 20.2, 30)]
    assert gaps_ms(lumps, Window(0, 100 * MS)) == pytest.approx([0, 0.1, 9.9, 0.2, 9.8])
    assert burst_share(gaps_ms(lumps, Window(0, 100 * MS))) == pytest.approx(3 / 5)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_equal_those_of_numpy(count: int) -> None:
    drawn = random.Random(count)
    values = [drawn.gauss(0, 1) for _ in range(count)]
    for percent in (0, 1, 50, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_the_mean_step_time_covers_only_the_time_when_all_requests_decode() -> None:
    measured = Measured((), (), StepsSoFar(5, 100, 1.0), StepsSoFar(9, 150, 1.5))
    assert (measured.calm_window, measured.step_ms) == (Window(5, 9), pytest.approx(10))
    assert Measured((), (), None, StepsSoFar(9, 150, 1.5)).step_ms is None
    assert Measured((), (), StepsSoFar(9, 150, 1.5), StepsSoFar(9, 150, 1.5)).calm_window is None


def test_bounds_of_a_shape_hold_for_the_sizes_that_they_are_known_for() -> None:
    loop = (answer(0, 0, 0, 10, 20, 30), answer(0, 1, 30, 40, 50, 60))
    one = Measured(loop, loop, StepsSoFar(15 * MS, 10, 0.1), StepsSoFar(45 * MS, 20, 0.2))
    named = {
        size: {f.name: str(f.bound) for f in _compared(size, one, one, LIMITS["qwen3-8b", "cuda"]) if f.bound}
        for size in (1, 8, 128)
    }
    assert named[1] == {
        "served_over_engine_tok_s_b1": "at least 0.97",
        "served_burst_share_b1": "at most 0.02",
        "ttft_added_ms": "at most 3",
    }
    assert named[8] == {}
    assert named[128] == {
        "served_over_engine_tok_s_b128": "at least 0.97",
        "served_burst_share_b128": "at most 0.05",
        "ttft_added_ms_p99_b128": "at most 20",
    }
    assert {f.name: f.value for f in _compared(32, one, one, LIMITS["qwen3-8b", "cuda"])}[
        "itl_p99_over_step_b32"
    ] == pytest.approx(1)


# ------------------------------------------------------------------ clients


def test_few_clients_have_enough_rounds_for_a_median_and_no_prompt_is_asked_twice() -> None:
    loads = [loads_of(clients=size, rounds=3, prompt_tokens=24, output_tokens=8, ids=100) for size in (1, 8, 32)]
    assert [load.loop.rounds for load in loads] == [17, 3, 3]
    asked = [one for load in loads for one in (load.warm, load.loop, load.calm)]
    prompts = [
        tuple(one.prompt(client, number))
        for one in asked
        for client in range(one.clients)
        for number in range(one.rounds)
    ]
    assert len(set(prompts)) == len(prompts)
    assert all(len(prompt) == 24 and all(3 <= token < 100 for token in prompt) for prompt in prompts)


@dataclass
class FakeServer:
    """Speaks as much HTTP as a streamed completion takes; each answer in pieces of one token."""

    url: str = ""
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    if head.startswith(b"GET /v1/models"):
                        self._whole(writer, {"data": [{"id": "fake"}]})
                        continue
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    body = json.loads(await reader.readexactly(length))
                    # A client waits for its answer before it sends again.
                    assert not reader._buffer  # type: ignore[attr-defined]
                    self.bodies.append(body)
                    if self.status != 200:
                        self._whole(writer, {"error": {"message": "busy"}})
                        continue
                    tokens = body["max_tokens"]
                    writer.write(HEAD)
                    for part in [*[piece("x")] * tokens, usage(tokens), DONE]:
                        writer.write(chunked(part)[: -len(b"0\r\n\r\n")])
                        await writer.drain()
                        await asyncio.sleep(0)
                    writer.write(b"0\r\n\r\n")
        finally:
            writer.transport.abort()

    def _whole(self, writer: asyncio.StreamWriter, value: object) -> None:
        body = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (self.status, len(body), body))


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake, loop, ready = FakeServer(), asyncio.new_event_loop(), threading.Event()

    async def start() -> asyncio.Server:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        ready.set()
        return server

    async def end() -> None:
        await asyncio.sleep(0)  # connections that were just accepted begin
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # and the sockets of those that ended are closed

    def run() -> None:
        server = loop.run_until_complete(start())
        loop.run_forever()
        server.close()
        loop.run_until_complete(end())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    yield fake
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_each_client_sends_its_requests_one_after_another_on_one_connection(fake_server: FakeServer) -> None:
    load = Workload("loop", 3, 4, 8, 5, watched=True)
    told: list[str] = []
    with Clients(Target.at(fake_server.url, "fake"), most=3) as clients:
        answers = clients.run(load, on_begun=lambda: told.append("begun"), on_nearly=lambda: told.append("nearly"))
        assert fake_server.connections == 3
        again = clients.run(Workload("again", 1, 1, 8, 2))
    assert sorted((answer.client, answer.round) for answer in answers) == [
        (client, number) for client in range(3) for number in range(4)
    ]
    assert {answer.text for answer in answers} == {"xxxxx"}
    assert sorted(told) == ["begun", "nearly"]
    for client in range(3):
        own = sorted((answer for answer in answers if answer.client == client), key=lambda answer: answer.round)
        assert all(before.ended_ns <= after.sent_ns for before, after in pairwise(own))
        assert all(answer.sent_ns < answer.pieces_ns[0] <= answer.pieces_ns[-1] <= answer.ended_ns for answer in own)
    prompts = [load.prompt(client, number) for client in range(3) for number in range(4)]
    assert sorted(body["prompt"] for body in fake_server.bodies[:12]) == sorted(prompts)
    fields = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True, "model": "fake"}
    assert fields.items() <= fake_server.bodies[0].items()
    assert [answer.text for answer in again] == ["xx"]


def test_poisson_arrivals_are_sent_when_due_whatever_was_answered(fake_server: FakeServer) -> None:
    load = Arrivals(80, requests=40, prompt_tokens=8, output_tokens=4, ids=100).workload(rate=200.0)
    with Clients(Target.at(fake_server.url, "fake"), most=40) as clients:
        answers = clients.run(load)
    due = load.arrivals_s()
    assert due == sorted(due)
    assert due[-1] == pytest.approx(40 / 200.0, rel=0.5)
    sent = {answer.client: answer.sent_ns for answer in answers}
    assert len(sent) == fake_server.connections == 40
    # The times of all requests count from their due times, to the nanosecond.
    assert [(sent[client] - sent[0]) / 1e9 for client in range(40)] == pytest.approx(
        [at - due[0] for at in due], abs=2e-9
    )
    assert all(answer.ttft_ms > 0 for answer in answers)


def test_a_refused_request_ends_the_run_with_the_servers_message(fake_server: FakeServer) -> None:
    fake_server.status = 503
    with (
        Clients(Target.at(fake_server.url, "fake"), most=1) as clients,
        pytest.raises(SidestreamError, match=r"status 503.*busy"),
    ):
        clients.run(Workload("loop", 1, 2, 8, 5))


def test_another_server_is_measured_beside_an_earlier_result(fake_server: FakeServer, run: Run, tmp_path: Path) -> None:
    rates = ("served_over_engine_tok_s_b2", "served_tok_s_b2", "engine_tok_s_b2")
    figures = [Figure(name, 50.0, "tokens/s") for name in rates]
    figures += [Figure("served_requests_per_s_poisson50", 40.0, "requests/s")]
    figures += [Figure("served_e2e_ms_p99_poisson50", 1e9, "ms")]
    ours: dict[str, Any] = {"bench": "serve", "command": "python -m bench serve", "environment": {}}
    ours["figures"] = [figure.plain() for figure in figures]
    (tmp_path / "ours.json").write_text(json.dumps(ours), encoding="utf-8")
    sizes = "--clients 2 --prompt-tokens 8 --output-tokens 8 --rounds 12 --label vllm --arrivals 50 --json"
    done = run("serve", "--against", fake_server.url, "--beside", tmp_path / "ours.json", *sizes.split())
    assert done.exit_code == 1, done.output  # the earlier server is slower
    report = json.loads(done.stdout)
    found = {figure["name"]: figure["value"] for figure in report["figures"]}
    assert next(iter(found)) == "served_tok_s_b2"
    assert found["served_over_vllm_tok_s_b2"] == pytest.approx(50 / found["vllm_tok_s_b2"], rel=1e-3)
    assert found["vllm_requests_per_s_poisson50"] == 40  # the earlier server's rate, not a share of its own
    assert found["served_over_vllm_e2e_ms_p99_poisson50"] > 1
    assert {"vllm_ttft_ms_p99_b2", "vllm_itl_ms_p90_b2", "vllm_burst_share_b2"} <= found.keys()
    holds = {figure["name"]: figure["holds"] for figure in report["figures"] if figure["holds"] is not None}
    assert holds == {"served_over_vllm_tok_s_b2": False, "served_over_vllm_e2e_ms_p99_poisson50": False}
    assert report["beside"] == [{"command": "python -m bench serve", "environment": {}}]
    assert {body["model"] for body in fake_server.bodies} == {"fake"}


def test_earlier_results_keep_their_servers_and_no_name_stands_twice(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    names = ["engine_itl_ms_p50_b1", "a_tok_s_b1", "a_steady_tok_s_b1", "a_over_b_tok_s_b1", "texts_identical"]
    figures = [{"name": name, "value": 4.0, "unit": "x"} for name in names]
    path.write_text(
        json.dumps({"bench": "serve", "command": "c", "environment": {}, "figures": figures}), encoding="utf-8"
    )
    earlier = read_result(path, label="b")
    assert [figure.name for figure in earlier.figures] == ["a_tok_s_b1", "a_steady_tok_s_b1"]
    assert capacity_of([earlier]) is None
    ratios = compared("b", [Figure("b_tok_s_b1", 2.0, "x"), Figure("b_steady_tok_s_b1", 2.0, "x")], [earlier])[4:]
    assert ratios == [Figure("a_over_b_tok_s_b1", 2.0, "ratio", at_least(1.03))]
    with pytest.raises(ConfigError, match="a_tok_s_b1, which this run will also have: give another --label"):
        read_result(path, label="a")
    path.write_text(json.dumps({"bench": "serve", "command": "c", "environment": {}, "figures": []}), encoding="utf-8")
    with pytest.raises(ConfigError, match="has no figures of a server"):
        read_result(path, label="b")
    with pytest.raises(ConfigError, match="cannot be read as a result"):
        read_result(tmp_path / "none.json", label="b")


# ------------------------------------------------------------------ the engine in process


class FakeEngine:
    """Answers on a thread of its own, a token at a time to each request in turn; each turn is a step of 10 ms."""

    def __init__(self) -> None:
        self.parts = SimpleNamespace(metrics=Metrics())
        self.in_flight: list[Any] = []
        self.most_in_flight = 0
        self.prompts: list[list[int]] = []
        self._news = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, prompt: list[int], params: SamplingParams, sink: Any) -> None:
        with self._news:
            self.prompts.append(prompt)
            self.in_flight.append([sink, params.max_tokens])
            self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
            self._news.notify()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self.in_flight or self._stopped)
                if self._stopped:
                    return
                batch = list(self.in_flight)
                for one in batch:
                    one[1] -= 1
                self.in_flight = [one for one in batch if one[1]]
            self.parts.metrics.observe("step_seconds", 0.01)
            for sink, left in batch:
                sink(Delta(0, "", (7,), (), None if left else "length", 8, CachedTokens()))

    def close(self) -> None:
        with self._news:
            self._stopped = True
            self._news.notify()
        self._thread.join()


@pytest.fixture
def fake_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


def test_the_engine_in_process_is_asked_in_a_closed_loop(fake_engine: FakeEngine) -> None:
    load = Workload("loop", 3, 4, 8, 5)
    asked = _Loop(fake_engine, load).run()  # type: ignore[arg-type]
    assert sorted((one.client, one.round) for one in asked) == [
        (client, number) for client in range(3) for number in range(4)
    ]
    assert fake_engine.most_in_flight <= 3
    assert sorted(fake_engine.prompts) == sorted(
        load.prompt(client, number) for client in range(3) for number in range(4)
    )
    answers = [one.answer(None) for one in asked]
    assert {answer.tokens for answer in answers} == {5}
    for client in range(3):
        own = sorted((answer for answer in answers if answer.client == client), key=lambda answer: answer.round)
        assert all(before.ended_ns <= after.sent_ns for before, after in pairwise(own))


def test_step_time_is_measured_while_all_requests_decode(fake_engine: FakeEngine) -> None:
    calm = _Calm(fake_engine, Workload("calm", 1, 1, 8, 40))  # type: ignore[arg-type]
    calm.run()
    measured = Measured((), (), calm.begun, calm.nearly)
    assert calm.begun is not None
    assert calm.nearly is not None
    assert (calm.begun.count, calm.nearly.count) == (1, 34)
    assert measured.step_ms == pytest.approx(10)


def test_the_engine_in_process_has_the_options_that_the_server_has() -> None:
    config = config_of(["--device", "cpu", "--max-running=7", "--eager"])
    assert (config.device, config.max_running, config.eager) == ("cpu", 7, True)


# ------------------------------------------------------------------ random weights


def test_random_weights_sample_only_tokens_that_have_text(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "random"
    random_checkpoint("tiny", directory, tokenizer=tiny, device=torch.device("cpu"))
    tokenizer = Tokenizer.load(str(directory))
    model = load_model(str(directory), dtype="bfloat16", block_tokens=16, device=torch.device("cpu"))
    assert model.vocab_size > tokenizer.vocab_size
    prompts = torch.randint(3, tokenizer.vocab_size, (64, 8), generator=torch.Generator().manual_seed(0))
    plain = type(model.module).from_pretrained(directory)
    with torch.inference_mode():
        drawn = plain(prompts).logits.argmax(-1).flatten().tolist()
    assert len(set(drawn)) > 20
    assert all(tokenizer.decode([token]) not in ("", "\ufffd") for token in drawn)


def test_random_weights_are_written_once_and_never_over_something_else(tiny: Path, tmp_path: Path) -> None:
    directory = tmp_path / "random"
    random_checkpoint("tiny", directory, tokenizer=tiny, device=torch.device("cpu"))
    written = (directory / "model.safetensors").stat().st_mtime_ns
    random_checkpoint("tiny", directory, tokenizer=tiny, device=torch.device("cpu"))
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match=r"does not hold random weights of qwen3-0\.6b"):
        random_checkpoint("qwen3-0.6b", directory, tokenizer=tiny, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="does not hold random weights"):
        random_checkpoint("tiny", tiny, tokenizer=tiny, device=torch.device("cpu"))


def test_a_figure_is_its_median_over_repetitions() -> None:
    bound = at_least(0.5)
    repetitions = [[Figure("a", value, "ratio", bound), Figure("b", 7, "ms")] for value in (0.2, 0.9, 0.6)]
    assert medians([*repetitions, [Figure("a", 0.7, "ratio", bound)]]) == [
        Figure("a", pytest.approx(0.65), "ratio", bound),
        Figure("b", 7, "ms"),
    ]


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["--clients", "1,x"], "--clients is '1,x': give whole numbers with commas between them"),
        (["--clients", "0"], "--clients has 0: each must be in [1, 4096]"),
        (["--clients", "2,2"], "give each number once"),
        (["--arrivals", "80,0"], "--arrivals has 0: each must be in [1, 1000]"),
        (["--rounds", "1"], "--rounds is 1: it must be 2 or more"),
        (["--repetitions", "0"], "--repetitions is 0: it must be 1 or more"),
        (["--output-tokens", "1"], "--output-tokens is 1: it must be 2 or more"),
        (["--device", "cud"], "did you mean cuda"),
        (
            ["some-model", "--shape", "tiny"],
            "the model is 'some-model' and --shape is 'tiny': give only one of the two",
        ),
        (["--checkpoint", "x"], "--checkpoint is x, but MODEL has its own"),
        (["--label", "x"], "--label is 'x', which is not used with neither"),
        (
            ["--against", "http://127.0.0.1:1", "--shape", "tiny"],
            "--shape is 'tiny', which is not used with --against: leave it out",
        ),
        (["--against", "ftp://127.0.0.1:1"], "is no http URL"),
        (
            ["--slow-readers", "8", "--connections", "9"],
            "--connections is 9, fewer than 8 slow readers and 8 clients: give more",
        ),
    ],
)
def test_bad_options_are_refused(asked: list[str], reason: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("serve", *asked)
    assert done.exit_code != 0
    assert reason in done.stderr


def test_a_server_that_does_not_start_is_reported_with_its_log() -> None:
    with pytest.raises(SidestreamError, match=r"ended with code 2 before it was ready: .*did you mean"):
        Server("smollm2-135m-instruc", [])


def test_a_metric_is_read_by_its_whole_name() -> None:
    page = "# HELP a_total x\na_total 3.0\na_total_more 4.0\n"
    assert metric(page, "a_total") == 3
    with pytest.raises(SidestreamError, match="has no b"):
        metric(page, "b")


@pytest.fixture(scope="module")
def tried(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run that takes seconds."""
    directory = tmp_path_factory.mktemp("random") / "tiny"
    sizes = "--json --rounds 3 --prompt-tokens 16 --output-tokens 12 --engine-option kv-memory=16MiB"
    # One process starts in half the time, and is measured alike.
    more = "--engine-option threads=1 --serve-option single-process"
    model = ["--shape", "tiny", "--tokenizer", str(tiny), "--checkpoint", str(directory)]
    return [*model, *sizes.split(), *more.split()]


def test_a_server_is_measured_beside_its_engine_in_process(tried: list[str], run: Run) -> None:
    done = run("serve", "--clients", "1,2", "--repetitions", "1", *tried)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    figures = {figure["name"]: figure["value"] for figure in report["figures"]}
    assert figures["texts_identical"] == 1
    assert 0.1 < figures["served_ready_s"] < 600  # a Python process starts in more than 0.1 s
    for size in (1, 2):
        over = figures[f"served_tok_s_b{size}"] / figures[f"engine_tok_s_b{size}"]
        assert figures[f"served_over_engine_tok_s_b{size}"] == pytest.approx(over, rel=1e-3)
        assert 0 <= figures[f"served_burst_share_b{size}"] <= 1
        assert figures[f"engine_step_ms_b{size}"] > 0
    assert figures["ttft_added_ms"] == pytest.approx(
        figures["served_ttft_ms_p50_b1"] - figures["engine_ttft_ms_p50_b1"], abs=1e-3
    )
    assert figures["served_requests_per_s_poisson80"] == pytest.approx(figures["served_tok_s_b2"] / 12 * 0.8, rel=1e-3)
    assert figures["served_e2e_ms_p50_poisson80"] > figures["served_ttft_ms_p50_poisson80"] > 0
    assert report["environment"]["model"] == "tiny, random weights"


def test_slow_readers_are_measured_beside_others(tried: list[str], run: Run) -> None:
    done = run("serve", "--clients", "2", "--slow-readers", "3", "--connections", "8", *tried)
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert figures["others_tok_s_with_slow_readers"]["value"] > 0
    assert figures["others_tok_s_with_slow_readers"]["bound"] == "at least 0.95"
    assert 0 < figures["front_end_rss_gib"]["value"] < 64
    assert figures["idle_connections"]["value"] == 3
