"""The engine's end of a connection: one message a commit, front ends that die, do not read or talk nonsense, and its
own end.
"""

from __future__ import annotations

import asyncio
import copy
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from border_rig import Remote, ask, border, check_nothing_left, read_all, run, tokens_of
from engine_rig import PATIENCE_S, Rig, prompts

from proof.toy import ToyModel
from sidestream.client import engine_server, messages, pulse, remote
from sidestream.client.engine_server import Connection
from sidestream.client.remote import RemoteClient
from sidestream.config import WATCHDOG_OPTION, SamplingParams
from sidestream.errors import ConfigError, EngineStopped, QueueFull, RaceError
from sidestream.processes import frames
from sidestream.processes.frames import FrameEncoder
from sidestream.version import VERSION
from sidestream_kv.metrics import MetricsSnapshot

PROMPT = prompts(71, 1, longest=12)[0]
OTHER = [5, 6, 7]


class Raw:
    """A front end that says and hears plain messages."""

    def __init__(self, made: Remote, **options: Any) -> None:
        self.socket = made.attach(**options)
        self._encoder = FrameEncoder()
        self._decoder = messages.decoder_of_outputs()
        self._inbox: list[Any] = []
        assert isinstance(self.read(), messages.Welcome)

    def send(self, message: Any) -> None:
        self.socket.sendall(self._encoder.encode(message))

    def submit(self, prompt: list[int], max_tokens: int = 8, *, stream: int = 0, **params: Any) -> None:
        self.send(submission(prompt, max_tokens, stream=stream, **params))

    def read(self) -> Any:
        """The next message; None at the connection's end."""
        while not self._inbox:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._inbox.extend(self._decoder.feed(data))
        return self._inbox.pop(0)

    def tokens(self, samples: int = 1) -> dict[int, list[int]]:
        """By stream, until so many have ended."""
        told: dict[int, list[int]] = {}
        while samples:
            news = self.read()
            assert isinstance(news, messages.Outputs), news
            for entry, (stream, token) in enumerate(zip(news.streams, news.tokens, strict=True)):
                detail = news.details.get(entry)
                told.setdefault(stream, []).extend([token] if detail is None else detail.token_ids)
                samples -= detail is not None and detail.finish_reason is not None
        return told


def submission(prompt: list[int], max_tokens: int = 8, *, stream: int = 0, **params: Any) -> messages.Submit:
    body = b"".join(token.to_bytes(4, "little") for token in prompt)
    # Without keys, as for an engine that has no prefix cache, under a version that no engine has: the engine makes
    # them.
    return messages.Submit(
        stream, body, b"", -1, SamplingParams(max_tokens=max_tokens, **params), 0, max_tokens, 0, b""
    )


@pytest.fixture
def made_frames(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every message that a server sends, in order."""
    sent: list[Any] = []
    send = Connection.send

    def watched(front_end: Connection, message: Any) -> None:
        sent.append(copy.deepcopy(message))  # the lists of an `Outputs` are cleared when it was sent
        send(front_end, message)

    monkeypatch.setattr(Connection, "send", watched)
    return sent


# ------------------------------------------------------------------ news


def test_all_outputs_of_a_commit_for_a_front_end_are_one_message(made_frames: list[Any]) -> None:
    with border("remote") as made:
        clients = [made.connect() for _ in range(2)]

        async def use() -> None:
            hold = made.rig.hold("compute")
            pairs = [(client, prompt) for client in clients for prompt in (PROMPT, OTHER)]
            asking = [asyncio.ensure_future(ask(*pair, 10)) for pair in pairs]
            await asyncio.sleep(0)
            await asyncio.to_thread(made.rig.turn_until, lambda: made.rig.engine.unfinished == 4)
            hold.release()
            await asyncio.gather(*asking)

        run(use())
        news = [message for message in made_frames if isinstance(message, messages.Outputs)]
        assert sum(len(message.streams) for message in news) >= 40
        assert max(len(message.streams) for message in news) == 2  # both requests of a front end
        assert len(news) <= 2 * made.rig.engine.num_steps
        assert len(news) < 30  # two front ends, ten tokens each: a message for each token would make 40


def test_a_token_costs_two_numbers_once_a_stream_is_known(made_frames: list[Any]) -> None:
    with border("remote") as made:
        run(ask(made.connect(), PROMPT, 10))
        news = [message for message in made_frames if isinstance(message, messages.Outputs)]
        assert [len(message.details) for message in news] == [1, *[0] * (len(news) - 2), 1]


def test_keys_made_by_a_front_end_equal_those_of_the_engine() -> None:
    """So that what one has computed is found by others, and on disk."""
    prompt = list(range(1, 22))
    with border("remote") as made:
        made.rig.ask(prompt)
        assert run(ask(made.connect(), prompt))[-1].cached.total == 20


# ------------------------------------------------------------------ front ends that go


def test_a_front_end_receives_no_outputs_of_its_predecessor() -> None:
    with border("remote") as made:
        gone, hold = Raw(made), made.rig.hold("compute")
        gone.submit(PROMPT, 60, n=3)
        made.rig.turn_until(lambda: made.rig.engine.unfinished == 3)
        gone.socket.close()
        made.rig.turn_until(lambda: not made.front_ends)
        new = Raw(made)
        new.submit(OTHER, 6, n=3)
        hold.release()
        assert new.tokens(3) == {stream: made.rig.model.expected(OTHER, 6) for stream in range(3)}
        check_nothing_left(made)
        assert made.rig.counted("requests_total", "abort") == 3
        assert made.rig.engine.parts.blocks.num_used == 0


def test_a_client_that_is_closed_has_its_requests_aborted() -> None:
    with border("remote") as made:
        client, other = made.connect(), made.connect()

        async def use() -> None:
            hold = made.rig.hold("compute")
            answer = client.submit(PROMPT, SamplingParams(max_tokens=60))
            calls = asyncio.ensure_future(client.operate("flush", timeout_s=1.0))
            await asyncio.sleep(0)
            client.close()
            client.close()
            for waiting in (answer.read(), calls):
                with pytest.raises(EngineStopped, match="this front end has closed the connection"):
                    await waiting
            hold.release()
            assert tokens_of(await ask(other, OTHER)) == made.rig.model.expected(OTHER, 8)

        run(use())
        check_nothing_left(made)
        assert made.rig.counted("requests_total", "abort") == 1


# ------------------------------------------------------------------ front ends that do not read


def test_a_front_end_that_does_not_read_is_disconnected_and_others_continue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_server, "MAX_UNSENT_BYTES", 1000)
    kept: list[int] = []
    with border("remote", model=ToyModel(max_model_len=2048), blocks=400, max_model_len=2048) as made:
        deaf, other = Raw(made, send_buffer=2048), made.connect()
        front_end = made.front_ends[0]
        send = front_end.send_outputs
        front_end.send_outputs = lambda: send() or kept.append(len(front_end._unsent))  # type: ignore[func-returns-value]
        deaf.submit(PROMPT, 1000, logprobs=5)
        news = run(ask(other, OTHER, 300))
        assert tokens_of(news) == made.rig.model.expected(OTHER, 300)
        check_nothing_left(made)
        assert made.rig.counted("requests_total", "abort") == 1
        assert made.front_ends != () and front_end not in made.front_ends
        assert 0 < max(kept) < 2000  # the bound, and the message that broke it
        assert not front_end._unsent
    assert "a front end does not read, and " in caplog.text


def test_outputs_that_a_socket_did_not_accept_are_sent_once_they_are_read() -> None:
    with border("remote") as made:
        slow = Raw(made, send_buffer=2048)
        slow.submit(PROMPT, 80, logprobs=5)
        made.rig.turn_until(lambda: made.rig.counted("requests_total", "length") == 1)
        made.rig.turn()
        (front_end,) = made.front_ends
        assert front_end.has_rest
        assert slow.tokens() == {0: made.rig.model.expected(PROMPT, 80)}


def test_last_words_are_sent_though_a_socket_does_not_take_them_at_once() -> None:
    with border("remote") as made:
        slow = Raw(made, send_buffer=2048)
        slow.submit(PROMPT, 80, logprobs=5)
        made.rig.turn_until(lambda: made.rig.counted("requests_total", "length") == 1)
        made.rig.turn()
        made._owner.sendall(made._encoder.encode(messages.Close(0.0)))
        made.rig.turn_until(lambda: made.rig.engine.health().status != "ok")
        assert slow.tokens() == {0: made.rig.model.expected(PROMPT, 80)}
        made.close()
        assert made.last_words() == [messages.Reply(0, None)]


# ------------------------------------------------------------------ front ends that talk nonsense


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: os.urandom(64).replace(b"\0", b"\1").join([b"\xff\xff\xff\xff", b""]), "a frame has"),
        (lambda: frames._HEAD.pack(3, 1) + b"\xc1\xc1\xc1", "a message cannot be read"),
        (lambda: frames._HEAD.pack(3, 2) + b"abc", "frame 2 came in place of frame 1"),
        (lambda: FrameEncoder().encode(messages.Status("ok", "")), "a message cannot be read"),
        (lambda: FrameEncoder().encode(messages.Close(0.0)), "a front end may not send Close"),
        (lambda: FrameEncoder().encode(messages.Attach()), "a front end may not send Attach"),
        (
            lambda: FrameEncoder().encode(msgspec.structs.replace(submission(PROMPT), prompt=b"abc")),
            "a message cannot be executed",
        ),
        (
            lambda: FrameEncoder().encode(msgspec.structs.replace(submission(PROMPT), cache_salt=b"\xff")),
            "a message cannot be executed",
        ),
        (lambda: FrameEncoder().encode(messages.Count("no_such_total", 1.0, ())), "a message cannot be executed"),
        (lambda: repeated(submission(PROMPT, 60)), "stream 0 is submitted before it has ended"),
    ],
)
def test_nonsense_of_a_front_end_cuts_off_that_front_end_alone(
    data: Callable[[], bytes], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with border("remote") as made:
        raw, other = Raw(made), made.connect()
        raw.socket.sendall(data())
        while raw.read() is not None:
            pass
        assert tokens_of(run(ask(other, OTHER))) == made.rig.model.expected(OTHER, 8)
        check_nothing_left(made)
        assert made.rig.engine.health().status == "ok"
    assert f"a front end is cut off: {words}" in caplog.text


def repeated(message: Any) -> bytes:
    encoder = FrameEncoder()
    return encoder.encode(message) + encoder.encode(message)


def test_a_call_that_does_not_exist_is_answered_with_an_error() -> None:
    with border("remote") as made:
        raw = Raw(made)
        raw.send(messages.Call(7, "sing"))
        reply = raw.read()
        assert (reply.number, str(reply.failure.error())) == (7, "no call 'sing'")


def test_ending_an_unknown_stream_has_no_effect() -> None:
    with border("remote") as made:
        raw = Raw(made)
        raw.send(messages.Abort(5, 9, "abort"))
        raw.submit(PROMPT, 4, stream=9)
        assert raw.tokens() == {9: made.rig.model.expected(PROMPT, 4)}
        raw.send(messages.Abort(9, 10, "stop"))
        raw.submit(OTHER, 4, stream=10)
        assert raw.tokens() == {10: made.rig.model.expected(OTHER, 4)}
        assert made.rig.counted("requests_total", "length") == 2


# ------------------------------------------------------------------ the welcome


def engine_end(*sent: Any) -> socket.socket:
    """A connection on which an engine has said this; what it says in place of the last one, None, is its end."""
    ours, theirs = socket.socketpair()
    encoder = FrameEncoder()
    with theirs:
        theirs.sendall(b"".join(encoder.encode(message) for message in sent))
    return ours


def info() -> Any:
    rig = Rig()
    try:
        return engine_server.engine_info(rig.engine, model="toy", model_name="toy")
    finally:
        rig.close()


def test_an_engine_of_another_version_is_refused_by_both_names() -> None:
    connection = engine_end(messages.Welcome(msgspec.structs.replace(info(), version="0.0.1")))
    with pytest.raises(
        ConfigError,
        match=rf"^the engine runs Sidestream 0\.0\.1, this front end {VERSION}: restart both from one installation$",
    ):
        RemoteClient.connect(connection)
    assert connection.fileno() == -1


def test_an_engine_that_ends_before_it_serves_is_reported() -> None:
    connection = engine_end()
    with pytest.raises(EngineStopped, match="the engine's process has ended before it served"):
        RemoteClient.connect(connection)
    assert connection.fileno() == -1


def test_a_first_message_that_is_no_welcome_breaks_the_connection() -> None:
    with pytest.raises(EngineStopped, match="the engine's first message is a Status, not a Welcome"):
        RemoteClient.connect(engine_end(messages.Status("ok", "")))


def test_a_message_sent_directly_after_the_welcome_is_received() -> None:
    client = RemoteClient.connect(engine_end(messages.Welcome(info()), messages.Status("failed", "DeviceLost: gone")))
    health = client.health()
    client.close()
    assert (health.status, health.detail) == ("failed", "DeviceLost: gone")


def test_an_end_of_the_engine_process_is_reported_with_its_exit_status() -> None:
    client = RemoteClient.connect(engine_end(messages.Welcome(info())), why_gone=lambda: "it was killed by SIGKILL")

    async def use() -> None:
        with pytest.raises(
            EngineStopped, match=r"^the engine is failed: the engine's process has ended: it was killed by SIGKILL$"
        ):
            for _ in range(2):  # the end may be noticed by the first one
                await client.submit(PROMPT, SamplingParams(max_tokens=4)).read()

    run(use())
    assert client.health().status == "failed"


# ------------------------------------------------------------------ the end


def test_the_owner_s_end_closes_the_engine() -> None:
    made = Remote(Rig())
    client = made.connect()
    run(ask(client, PROMPT))
    made._owner.close()
    made.thread.join(PATIENCE_S)
    assert not made.thread.is_alive()
    assert made.rig.engine.health().status == "draining"
    made.tidy()


def test_nonsense_of_the_owner_closes_the_engine() -> None:
    made = Remote(Rig())
    made._owner.sendall(frames._HEAD.pack(3, 9) + b"abc")
    made.thread.join(PATIENCE_S)
    assert not made.thread.is_alive()
    made.tidy()


def test_waiting_calls_do_not_delay_the_end_of_the_server() -> None:
    with border("remote", slots=16) as made:
        client = made.connect()

        async def use() -> None:
            made.rig.hold("store")
            await ask(client, list(range(1, 22)), 4)
            flushes = [asyncio.ensure_future(client.operate("flush", timeout_s=1000.0)) for _ in range(6)]
            await asyncio.sleep(0)
            await client.metrics_snapshot()  # they are under way
            await asyncio.to_thread(made.close)
            for flush in flushes:
                with pytest.raises(EngineStopped):
                    await flush

        run(use())


def test_the_owner_receives_the_error_of_closing() -> None:
    made = Remote(Rig())
    close = made.rig.close

    def close_and_raise(**options: Any) -> None:
        close(**options)
        raise RaceError("the order of 1 accesses was wrong")

    made.rig.close = close_and_raise  # type: ignore[method-assign]
    made.close()
    (reply,) = made.last_words()
    assert isinstance(reply.failure.error(), RaceError)
    made.tidy()


def test_a_refusal_names_the_stream_and_nothing_more_comes_of_it() -> None:
    with border("remote", max_running=1, max_waiting=1) as made:
        raw, hold = Raw(made), made.rig.hold("compute")
        raw.submit(PROMPT, 4, n=2)
        raw.submit(OTHER, 4, stream=2)
        refused = raw.read()
        assert isinstance(refused, messages.Rejected)
        assert (refused.stream, refused.failure.kind) == (2, "QueueFull")
        hold.release()
        assert raw.tokens(2) == {stream: made.rig.model.expected(PROMPT, 4) for stream in range(2)}


def test_a_refusal_is_sent_to_the_samples_that_are_left_when_the_first_one_was_ended() -> None:
    """The end of the first sample crosses the refusal of all."""
    with border("remote", max_waiting=1, max_running=2) as made:
        client = made.connect()

        async def use() -> None:
            hold = made.rig.hold("compute")
            taken = client.submit([5, 6, 7], SamplingParams(max_tokens=5, n=3))
            refused = client.submit([6, 7, 8], SamplingParams(max_tokens=5, n=2))
            client.abort(refused, "stop", index=0)
            with pytest.raises(QueueFull):
                await refused.read()
            hold.release()
            await read_all(taken, 3)

        run(use())
        check_nothing_left(made)


def test_an_engine_that_does_not_answer_is_stalled_and_shows_its_last_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_METRICS_S", 0.05)
    monkeypatch.setattr(pulse, "PULSE_S", 0.0)
    ours, engine = socket.socketpair()
    encoder, decoder = FrameEncoder(), messages.decoder_of_requests()
    engine.sendall(encoder.encode(messages.Welcome(msgspec.structs.replace(info(), watchdog_timeout_s=0.05))))
    client = RemoteClient.connect(ours)

    def answer() -> None:
        for message in decoder.feed(engine.recv(1 << 16)):
            snapshot = MetricsSnapshot({"steps_total": {(): 7.0}}, {})
            engine.sendall(
                encoder.encode(message if isinstance(message, messages.Ping) else messages.Reply(1, snapshot=snapshot))
            )

    async def use() -> None:
        with pytest.raises(EngineStopped, match="does not answer, and has sent no metrics yet"):
            await client.metrics_snapshot()
        answer()
        while client._known_metrics is None:
            await asyncio.sleep(0)
        while client.health().status == "ok":
            await asyncio.sleep(0.001)
        assert client.health().detail == (
            f"the engine's process has not answered for more than 0.05 s ({WATCHDOG_OPTION})"
        )
        known = await client.metrics_snapshot()
        assert known.values["steps_total"] == {(): 7.0}
        assert known.values["metrics_age_seconds"][()] > 0.05
        with pytest.raises(EngineStopped, match="the engine is stalled: the engine's process has not answered"):
            client.submit(PROMPT, SamplingParams(max_tokens=4))
        with pytest.raises(EngineStopped, match="the engine is stalled"):
            await client.operate("flush", timeout_s=60)
        answer()
        while client.health().status == "stalled":
            await asyncio.sleep(0.001)
        client.submit(PROMPT, SamplingParams(max_tokens=4))

    run(use())
    client.close()
    engine.close()
