"""Which adapter lies in which slot: a slot is free when no request uses it, and its adapter is served once it is
there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sidestream.config import SamplingParams
from sidestream.engine.adapters import LoadedAdapters
from sidestream.errors import CallTimeout, DeviceLost, EngineStopped, ModelNotFound, RequestRejected
from sidestream.ranks.fences import Progress
from sidestream.ranks.leader import ADAPTER_PUTS, ADAPTER_READS, Ranks
from sidestream.ranks.messages import AdapterPut, AdapterRead, Failed, Passed
from sidestream.schedule.limits import CheckedRequest


class Adapter:
    def __init__(self, digest: str) -> None:
        self.digest = digest


class Matrices:
    slots = 2

    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def read(self, path: str) -> Adapter:
        return Adapter(path)

    def put(self, slot: int, adapter: Adapter) -> None:
        self.held[slot] = adapter.digest


class Fence:
    stream, failure = "compute", None

    def __init__(self, *, polls: int = 0, failure: BaseException | None = None) -> None:
        self.polls, self.failure = polls, failure

    def poll(self) -> bool:
        self.polls -= 1
        return self.polls < 0


class Sent(list[Any]):
    """A transport that keeps what it is given."""

    send = list.append


def loaded(
    fence: Fence | None = None, turn: Callable[[float], None] = lambda seconds: None, ranks: Ranks | None = None
) -> LoadedAdapters:
    def enqueue(work: Callable[[], None], *, label: str) -> Fence:
        work()
        return fence or Fence()

    def call(work: Callable[[], None], *, timeout_s: float) -> None:
        work()

    def keys_of(tokens: Any, salt: str) -> tuple[list[bytes], int]:
        return [salt.encode()], 0

    parts: Any = SimpleNamespace(adapters=Matrices(), executor=SimpleNamespace(enqueue=enqueue), ranks=ranks)
    return LoadedAdapters(parts, keys_of=keys_of, call=call, wait_a_turn=turn)


def ask(adapters: LoadedAdapters, name: str, n: int = 1, salt: str = "") -> CheckedRequest:
    return adapters.admit(CheckedRequest((1,), SamplingParams(adapter=name, n=n), [b""], 0, 0, 1, 0, salt))


def test_a_slot_is_free_when_all_samples_that_use_it_have_ended() -> None:
    adapters = loaded()
    for name in "ab":
        adapters.load(name, f"path {name}", timeout_s=1.0)
    slot = ask(adapters, "a", n=2).adapter
    adapters.unload("a")
    for _ in range(2):
        with pytest.raises(RequestRejected, match="all 2 slots are in use"):
            adapters.load("c", "path c", timeout_s=1.0)
        adapters.ended(slot)
    adapters.load("c", "path c", timeout_s=1.0)
    assert adapters.names == {"b": 3 - slot, "c": slot}


def test_keys_depend_on_the_adapter_and_on_the_requests_salt() -> None:
    adapters = loaded()
    for name, path in (("a", "same"), ("b", "other")):
        adapters.load(name, path, timeout_s=1.0)
    keys = {ask(adapters, name, salt=salt).keys[0] for name in ("a", "b") for salt in ("", "x")}
    assert len(keys) == 4 and ask(adapters, "a").keys[0] in keys
    other = loaded()
    other.load("again", "same", timeout_s=1.0)
    assert ask(other, "again").keys == ask(adapters, "a").keys


def test_an_adapter_is_served_once_its_matrices_are_on_the_device() -> None:
    known: list[dict[str, int]] = []
    adapters = loaded(Fence(polls=2), lambda seconds: known.append(adapters.names))
    adapters.load("a", "path", timeout_s=1.0)
    assert known == [{}, {}] and adapters.names == {"a": 1}


def test_an_adapter_that_does_not_reach_the_device_is_not_served() -> None:
    adapters = loaded(Fence(failure=OSError("lost")))
    with pytest.raises(EngineStopped, match="did not reach the device: lost"):
        adapters.load("a", "path", timeout_s=1.0)
    with pytest.raises(ModelNotFound, match="no adapter 'a' is loaded"):
        ask(adapters, "a")


def test_an_adapter_that_comes_too_late_is_not_served() -> None:
    adapters = loaded(Fence(polls=1000))
    with pytest.raises(CallTimeout, match="did not reach the device within 0 s: it is not loaded"):
        adapters.load("a", "path", timeout_s=0.0)
    assert not adapters.names


def test_an_adapter_is_put_once_every_rank_has_read_it() -> None:
    sent: Any = Sent()
    ranks, known = Ranks(3, sent, progress=Progress(3)), list[int]()

    def turn(seconds: float) -> None:
        assert not adapters.names
        known.append(len(sent))
        if len(known) in (2, 3):
            ranks.take_in(len(known) - 1, Passed(((ADAPTER_READS, 1),)))
        if len(known) in (4, 5):
            ranks.take_in(len(known) - 3, Passed(((ADAPTER_PUTS, 1),)))

    adapters = loaded(turn=turn, ranks=ranks)
    adapters.load("a", "path", timeout_s=1.0)
    assert known == [1, 1, 1, 2, 2]
    assert sent == [AdapterRead(1, "path", "path"), AdapterPut(1, 1)]
    assert adapters.names == {"a": 1}


def test_an_adapter_that_a_rank_cannot_read_is_served_by_none() -> None:
    sent: Any = Sent()
    ranks = Ranks(2, sent, progress=Progress(2))

    def turn(seconds: float) -> None:
        ranks.take_in(1, Failed(ADAPTER_READS, 1, "ModelError", "it is damaged"))
        ranks.take_in(1, Passed(((ADAPTER_READS, 1), (ADAPTER_PUTS, 1))))

    adapters = loaded(turn=turn, ranks=ranks)
    with pytest.raises(RequestRejected, match="the adapter is not loaded: on rank 1: it is damaged"):
        adapters.load("a", "path", timeout_s=1.0)
    assert not adapters.names and len(sent) == 1


def test_a_rank_that_is_lost_ends_the_wait_for_its_adapter() -> None:
    transport: Any = SimpleNamespace(send=lambda message: None, kill=lambda: None)
    ranks = Ranks(2, transport, progress=Progress(2))
    adapters = loaded(turn=lambda seconds: ranks.lose(DeviceLost("rank 1 is lost")), ranks=ranks)
    with pytest.raises(EngineStopped, match="rank 1 is lost"):
        adapters.load("a", "path", timeout_s=1.0)


@pytest.mark.parametrize("name", ["", "two words", "x" * 257])
def test_names_that_no_client_can_send_are_refused(name: str) -> None:
    with pytest.raises(RequestRejected, match="lora_name is"):
        loaded().load(name, "path", timeout_s=1.0)


def test_one_adapter_of_a_name_is_loaded_if_two_come_at_once() -> None:
    adapters, refused = loaded(Fence(polls=3)), list[str]()

    def load() -> None:
        try:
            adapters.load("a", "path", timeout_s=1.0)
        except RequestRejected as error:
            refused.append(str(error))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1 and adapters.names == {"a": 1}
