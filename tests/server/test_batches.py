"""/v1/files and /v1/batches, with OpenAI's own client."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from proof.fake_backend import FakeBackend, Script
from sidestream.errors import QueueFull
from sidestream.server import batch_routes, batch_runner, batch_store

from .serving import Served, serving

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_AGAIN_S", "_PAUSE_S"):
        monkeypatch.setattr(batch_runner, name, 0.02)


@contextlib.contextmanager
def batching(directory: Path, backend: FakeBackend | None = None, **options: Any) -> Iterator[Served]:
    with serving(backend, batch_directory=str(directory), **options) as served:
        yield served


def lines(*prompts: str, url: str = "/v1/completions", **fields: Any) -> bytes:
    bodies = [{"model": "fake", "prompt": prompt, **fields} for prompt in prompts]
    asked = [{"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    return b"".join(json.dumps(one).encode() + b"\n" for one in asked)


def begin(
    client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions", **fields: Any
) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: openai.OpenAI, name: str, status: str = "completed") -> openai.types.Batch:
    until = time.monotonic() + WAIT_S
    while (batch := client.batches.retrieve(name)).status != status:
        assert time.monotonic() < until, batch
        time.sleep(0.01)
    return batch


def answers(client: openai.OpenAI, name: str | None) -> dict[str, Any]:
    assert name is not None
    return {one["custom_id"]: one for one in map(json.loads, client.files.content(name).text.splitlines())}


def test_a_batch_is_answered_and_its_errors_have_a_file_of_their_own(tmp_path: Path) -> None:
    backend = FakeBackend()
    with batching(tmp_path, backend) as served:
        client = served.openai
        content = lines("one", "two") + lines("three", model="other").replace(b'"0"', b'"2"')
        content += lines("four", url="/v1/responses").replace(b'"0"', b'"3"')
        batch = begin(client, content, metadata={"run": "7"})
        assert batch.status == "validating" and batch.metadata == {"run": "7"}
        batch = ended(client, batch.id)
        counts = batch.request_counts
        assert counts and (counts.total, counts.completed, counts.failed) == (4, 2, 2)
        found, errors = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
        assert {one["response"]["body"]["choices"][0]["text"] for one in found.values()} == {"Hello, world"}
        assert errors["2"]["response"]["status_code"] == 404 and errors["3"]["error"]["code"] == "invalid_url"
        assert set(backend.priorities) == {1_000_000}
        assert batch.in_progress_at and batch.finalizing_at and batch.completed_at and not batch.errors
        assert [one.id for one in client.batches.list()] == [batch.id]
        assert len(list(client.files.list(limit=2))) == 3
        assert client.files.retrieve(batch.input_file_id).filename == "in.jsonl"
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.input_file_id)


def test_a_stopped_server_goes_on_with_the_requests_without_an_answer(tmp_path: Path) -> None:
    def script(prompt: str) -> Script:
        return Script(hold_after=0 if prompt == "held" else None)

    backend = FakeBackend(script)
    with batching(tmp_path, backend, drain_s=0.1) as served:
        batch = begin(served.openai, lines("a", "held", "b"))
        backend.wait_until(lambda found: bool(found.held) and len(found.finished) == 2)
        served.running.stop()
        backend.wait_until(lambda found: bool(found.aborted))
    (path,) = (tmp_path / "batches").glob("*.answers")
    with path.open("ab") as file:
        file.write(b'{"id":"batch_req_')  # as `kill -9` may leave it
    again = FakeBackend()
    with batching(tmp_path, again) as served:
        batch = ended(served.openai, batch.id)
        assert sorted(answers(served.openai, batch.output_file_id)) == ["0", "1", "2"]
    assert again.prompts == ["held"]


def test_a_cancelled_batch_keeps_its_answers_and_aborts_the_rest(tmp_path: Path) -> None:
    backend = FakeBackend(lambda prompt: Script(hold_after=0 if prompt == "held" else None))
    with batching(tmp_path, backend) as served:
        client = served.openai
        batch = begin(client, lines("a", "held"))
        backend.wait_until(lambda found: bool(found.held) and bool(found.finished))
        with pytest.raises(openai.BadRequestError, match="in use by"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch.id, "cancelled")
        assert list(answers(client, batch.output_file_id)) == ["0"] and len(backend.aborted) == 1
        with pytest.raises(openai.BadRequestError, match="it is cancelled"):
            client.batches.cancel(batch.id)


def test_requests_that_a_full_queue_refuses_are_sent_again(tmp_path: Path) -> None:
    refusals = [QueueFull("the queue is full")] * 2
    with batching(tmp_path, FakeBackend(lambda _: Script(refuse=refusals.pop() if refusals else None))) as served:
        batch = ended(served.openai, begin(served.openai, lines("a")).id)
        assert not refusals and batch.request_counts and batch.request_counts.completed == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"no JSON\n", "line 1 is not a request"), (lines("a") * 2, "is given twice"), (lines(*"ab"), "at most 1")],
)
def test_a_wrong_file_fails_its_batch(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "MOST_REQUESTS", 1)
    with batching(tmp_path) as served:
        batch = ended(served.openai, begin(served.openai, content).id, "failed")
    assert batch.errors and batch.errors.data and reason in (batch.errors.data[0].message or "")
    assert str(tmp_path) not in str(batch.errors)


@pytest.mark.parametrize(
    ("call", "status", "param"),
    [
        (lambda client: client.files.create(file=b"x", purpose="fine-tune"), 400, "purpose"),
        (lambda client: begin(client, b"", endpoint="/v1/embeddings"), 400, "endpoint"),
        (lambda client: begin(client, b"", metadata={"a": 1}), 400, "metadata"),
        (lambda client: begin(client, b"", extra_body={"bogus": 1}), 400, "bogus"),
        (lambda client: client.batches.create("1h", "/v1/completions", input_file_id="x"), 400, "completion_window"),
        (lambda client: client.batches.list(limit=0), 400, "limit"),
        (lambda client: client.get("/batches?limit=000001" + "9" * 5000, cast_to=object), 400, "limit"),
        (lambda client: client.files.list(order="up"), 400, "order"),
        (lambda client: client.files.list(extra_query={"name": "x"}), 400, "name"),
        (lambda client: client.files.content("file-" + "0" * 32), 404, None),
        (lambda client: client.files.retrieve("..%2fbatches"), 404, None),
        (lambda client: client.batches.retrieve("batch_" + "0" * 32), 404, None),
    ],
)
def test_wrong_requests_are_refused(
    call: Callable[[openai.OpenAI], Any], status: int, param: str | None, tmp_path: Path
) -> None:
    with batching(tmp_path) as served, pytest.raises(openai.APIStatusError) as raised:
        if param == "completion_window":
            call = lambda client: client.batches.create(  # noqa: E731
                completion_window="1h", endpoint="/v1/completions", input_file_id="x"
            )
        call(served.openai)
    assert (raised.value.status_code, raised.value.param) == (status, param)
    assert not list((tmp_path / "files").glob("file-*.json")) or param not in ("purpose",)


@pytest.mark.parametrize(
    ("charset", "purpose", "said"),
    [
        ("punycode", b"b-z", "the form is not in the charset of its content-type: send UTF-8"),
        ("utf-8", b"", "purpose is '': this server takes batch"),
        ("utf-8", None, "purpose is missing: this server takes batch"),
    ],
)
def test_a_form_that_cannot_be_read_is_a_400(tmp_path: Path, charset: str, purpose: bytes | None, said: str) -> None:
    form = b"" if purpose is None else b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose
    with batching(tmp_path) as served:
        headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
        reply = served.http.post("/v1/files", content=form + b"\r\n--b--\r\n", headers=headers)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, said)


def test_files_are_bounded_in_number_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with batching(tmp_path, max_batch_directory_bytes=10_000) as served:
        client = served.openai
        with pytest.raises(openai.APIStatusError, match="the bound is 10000"):
            client.files.create(file=b"x" * 10_001, purpose="batch")
        monkeypatch.setattr(batch_routes, "MOST_FILE_BYTES", 5 - batch_routes._PIECE)
        with pytest.raises(openai.APIStatusError, match="split it"):
            client.files.create(file=b"x" * 2000, purpose="batch")
        monkeypatch.setattr(batch_routes, "MOST_FILE_BYTES", 1 << 20)
        client.files.create(file=b"x", purpose="batch")
        monkeypatch.setitem(batch_store._MOST, "files", 1)
        with pytest.raises(openai.BadRequestError, match="keeps 1 files"):
            client.files.create(file=b"x", purpose="batch")
        page = {"origin": "https://example.com"}
        assert served.http.post("/v1/files", files={"file": b"x"}, headers=page).status_code == 403
    assert len(list((tmp_path / "files").iterdir())) == 2


def test_answers_that_fill_the_directory_fail_the_batch(tmp_path: Path) -> None:
    backend = FakeBackend(lambda prompt: Script("x" * 4000, hold_after=0 if prompt == "held" else None))
    with batching(tmp_path, backend, max_batch_directory_bytes=5000) as served:
        batch = begin(served.openai, lines("a", "b", "held", max_tokens=4000))
        batch = ended(served.openai, batch.id, "failed")
        assert batch.errors and batch.errors.data and batch.errors.data[0].code == "batch_directory_full"
        assert len(answers(served.openai, batch.output_file_id)) == 2


def test_a_key_sees_its_own_files_only_and_its_salt_counts(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    rows = [f'[[keys]]\nname = "{name}"\nkey = "{name}"\nmax_concurrent = 1\n' for name in "ab"]
    keys.write_text(rows[0] + 'cache_salt = "s"\n' + rows[1])
    backend = FakeBackend()
    with batching(tmp_path / "batches", backend, api_keys=str(keys), admin_key="admin") as served:
        a, b, admin = (served.openai.with_options(api_key=key) for key in ("a", "b", "admin"))
        batch = ended(a, begin(a, lines(*"xyz")).id)
        for call in (lambda: b.batches.retrieve(batch.id), lambda: b.files.content(batch.output_file_id or "")):
            with pytest.raises(openai.NotFoundError):
                call()
        seen = [len(list(client.batches.list())) for client in (a, b, admin)]
        assert seen == [1, 0, 1] and len(answers(admin, batch.output_file_id)) == 3
    assert len(set(backend.cache_salts)) == 1 and backend.cache_salts[0]


def test_a_second_server_runs_the_batches_only_when_the_first_has_ended(tmp_path: Path) -> None:
    first, second = FakeBackend(), FakeBackend()
    with batching(tmp_path, second, drain_s=0.1) as other:
        with batching(tmp_path, first):
            ended(other.openai, begin(other.openai, lines("a")).id)
        with batching(tmp_path, first):
            ended(other.openai, begin(other.openai, lines("b")).id)
    assert len(first.prompts + second.prompts) == 2


def test_without_a_directory_there_are_no_files_and_batches(shared: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="no such path"):
        shared.openai.batches.list()
