"""A hub id that is neither in the cache nor reachable is refused without the hub's client. In all other cases the
client decides.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidestream.errors import ModelError
from sidestream.models.directory import local_directory

Patch = pytest.MonkeyPatch
Change = Callable[[Path, Patch], object]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty cache in a program that has not imported the client, and a hub whose host has no address."""

    def getaddrinfo(host: str, port: object) -> list[Any]:
        host.encode("idna")
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda hub_id, **_: "from the client")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.test")
    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    monkeypatch.delitem(sys.modules, "huggingface_hub.utils", raising=False)
    return tmp_path / "models--no--such-model"


def offline(cache: Path, patch: Patch) -> None:
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def linked(cache: Path, patch: Patch) -> None:
    (cache.parent / "elsewhere" / "snapshots").mkdir(parents=True)
    cache.symlink_to(cache.parent / "elsewhere")


REFUSED: dict[str, tuple[Change, str]] = {
    "no address": (lambda cache, patch: None, "hub.test: Name or service not known"),
    "offline": (offline, "HF_HUB_OFFLINE is set"),
    "a link to nothing": (lambda cache, patch: cache.symlink_to("nothing"), "hub.test: Name or service not known"),
}
ASKED: dict[str, Change] = {
    "snapshots": lambda cache, patch: (cache / "snapshots").mkdir(parents=True),
    "snapshots offline": lambda cache, patch: ((cache / "snapshots").mkdir(parents=True), offline(cache, patch)),
    "a link to snapshots": linked,
    "an address": lambda cache, patch: patch.setattr("socket.getaddrinfo", lambda host, port: []),
    "a proxy": lambda cache, patch: patch.setenv("HTTPS_PROXY", "http://127.0.0.1:1"),
    "a proxy in lower case": lambda cache, patch: patch.setenv("all_proxy", "http://127.0.0.1:1"),
    "no host": lambda cache, patch: patch.setattr("huggingface_hub.constants.ENDPOINT", ""),
    "no host name": lambda cache, patch: patch.setattr("huggingface_hub.constants.ENDPOINT", "https://" + "a" * 64),
    "the client imported": lambda cache, patch: patch.setitem(sys.modules, "huggingface_hub.utils", sys),
}


@pytest.mark.parametrize(("change", "cause"), REFUSED.values(), ids=REFUSED)
def test_an_uncached_model_needs_no_client(cache: Path, monkeypatch: Patch, change: Change, cause: str) -> None:
    change(cache, monkeypatch)
    with pytest.raises(ModelError) as caught:
        local_directory("no/such-model")
    said = f"it is not complete in the cache {cache.parent}, and the hub cannot be reached ({cause}): "
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("change", ASKED.values(), ids=ASKED)
def test_uncertain_cases_are_left_to_the_hub_client(cache: Path, monkeypatch: Patch, change: Change) -> None:
    change(cache, monkeypatch)
    assert local_directory("no/such-model") == Path("from the client")


def test_a_string_that_is_no_hub_id_is_refused() -> None:
    import huggingface_hub.utils  # noqa: F401 - so that the client is asked

    with pytest.raises(ModelError, match=r"it is not a hub id .*no/such--model"):
        local_directory("no/such--model")
