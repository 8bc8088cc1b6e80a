from collections.abc import Iterator

import pytest

from proof.fake_backend import FakeBackend, Script
from sidestream.types import CachedTokens

from .serving import Served, serving

_SCRIPTS = {"accents": Script("héé"), "nothing": Script("")}


@pytest.fixture(scope="session")
def shared() -> Iterator[Served]:
    """One server for all tests that change nothing about it; the prompt's text chooses the reply."""

    def script(prompt: str) -> Script:
        found = next((script for word, script in _SCRIPTS.items() if word in prompt), None)
        return found or Script("Hello, world", cached=CachedTokens(device=1, host=2, disk=3))

    with serving(FakeBackend(script)) as served:
        yield served
