"""Order of messages to the engine thread."""

from __future__ import annotations

from sidestream.engine.inbox import Inbox


def test_no_message_overtakes_one_that_must_wait() -> None:
    inbox = Inbox()
    said: list[str] = []
    for name, anytime in (("first", True), ("second", False), ("third", True)):
        inbox.put(lambda name=name: said.append(name), anytime=anytime)  # type: ignore[misc]
    while (message := inbox.take(anytime=True)) is not None:
        message()
    assert said == ["first"]
    while (message := inbox.take()) is not None:
        message()
    assert said == ["first", "second", "third"]
