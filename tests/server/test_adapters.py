"""LoRA adapters over HTTP: loaded by an operator, named by clients as the model."""

from __future__ import annotations

import pytest

from proof.fake_backend import FakeBackend

from .serving import serving

_ADMIN = {"authorization": "Bearer admin"}


def _backend() -> FakeBackend:
    backend = FakeBackend()
    backend.adapters.room = 2
    return backend


def test_a_loaded_adapter_is_listed_and_answers_under_its_name() -> None:
    with serving(_backend(), admin_key="admin") as served:
        body = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        reply = served.http.post("/v1/load_lora_adapter", json=body, headers=_ADMIN)
        assert reply.json() == {"lora_name": "sql", "loaded": True}
        models = served.openai.models.list().data
        assert [(one.id, getattr(one, "parent", None)) for one in models] == [("fake", None), ("sql", "fake")]
        assert served.openai.models.retrieve("sql").id == "sql"
        answer = served.openai.chat.completions.create(model="sql", messages=[{"role": "user", "content": "hi"}])
        assert (answer.model, served.backend.params[-1].adapter) == ("sql", "sql")
        text = served.openai.completions.create(model="fake", prompt="hi")
        assert (text.model, served.backend.params[-1].adapter) == ("fake", "")
        body = {"lora_name": "sql"}
        assert served.http.post("/v1/unload_lora_adapter", json=body, headers=_ADMIN).json()["loaded"] is False
        assert [one.id for one in served.openai.models.list().data] == ["fake"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "missing"}, 400, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "x"}, 400, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "fake", "lora_path": "/adapters/sql"}, 400, "lora_name"),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}, 404, "lora_name"),
        ("/v1/cache/pin", {"prompt": "hi", "ttl_s": 1, "model": "x"}, 400, "model"),
    ],
)
def test_what_cannot_be_done_with_adapters_names_the_field(
    path: str, body: dict[str, object], status: int, param: str
) -> None:
    with serving(_backend(), admin_key="admin") as served:
        reply = served.http.post(path, json=body, headers=_ADMIN)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
