"""The collection itself: complete, short enough to be read, and repeatable."""

from __future__ import annotations

import inspect

import pytest

from proof.miniatures import MINIATURES, Caught, Miniature, Outcome, run_miniature
from proof.mutations import HAZARDS
from sidestream.errors import ConfigError


def test_every_hazard_has_a_miniature() -> None:
    hazards = {miniature.hazard for miniature in MINIATURES}
    assert set(HAZARDS) <= hazards
    assert hazards <= set(HAZARDS) | {"P1", "P2", "P5"}


def test_each_miniature_has_a_name_of_its_own_a_description_and_a_page_at_most() -> None:
    assert len({miniature.name for miniature in MINIATURES}) == len(MINIATURES)
    for miniature in MINIATURES:
        assert miniature.run.__doc__ and miniature.protection.endswith("."), miniature.name
        assert len(inspect.getsource(miniature.run).splitlines()) <= 40, miniature.name


def test_the_same_policy_and_seed_are_caught_in_the_same_way() -> None:
    for miniature in MINIATURES:
        first, second = (run_miniature(miniature, "random", 3, protected=False) for _ in range(2))
        assert first == second, miniature.name


def test_a_finding_is_reported_with_every_oracle_that_noticed() -> None:
    def play(device: object, protected: bool) -> Outcome:
        return Outcome((1,), (2,), (3,), (4,), leaked=5, late=("never",))

    caught = run_miniature(Miniature("all wrong", "H1", "None.", play), "random", 0, protected=False)
    assert caught == Caught(("tokens", "accept length", "balance", "order"), "got (1,), expected (2,)")
    assert caught.oracle == "tokens"


def test_a_deadlock_is_caught_as_an_order() -> None:
    def play(device, protected):  # type: ignore[no-untyped-def]
        stream, event = device.stream("a"), device.event("e")
        stream.capture(lambda: event.record(stream))
        device.wait_host(event.fence, reason="step")

    caught = run_miniature(Miniature("stuck", "H1", "None.", play), "random", 0, protected=False)
    assert caught is not None and caught.oracle == "order"
    assert "no actor can run" in caught.detail


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(ConfigError, match="policy is 'sometimes'"):
        run_miniature(MINIATURES[0], "sometimes", 0, protected=True)
