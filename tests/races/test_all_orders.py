"""The miniatures in all orders that can make a difference: with their protection, no order has a finding; without it,
one of the first has.
"""

from __future__ import annotations

import pytest

from proof.miniatures import MINIATURES, RULES, Miniature, as_program
from sidestream_order.exhaust import exhaust

pytestmark = pytest.mark.slow

LIMIT = 1500
# Their orders are too many: work that declares nothing depends on every step of the host, and one of them fills a
# queue of a thousand places.
TOO_MANY = {
    "queue of one stream full",
    "flag read twice",
    "frame sent again after a timeout",
    "frame overwritten before it was read",
    "outputs for a reader that does not read",
}
EACH = pytest.mark.parametrize("miniature", MINIATURES, ids=lambda miniature: miniature.name)


def test_names_excluded_from_the_full_search_are_names_of_miniatures() -> None:
    assert {miniature.name for miniature in MINIATURES} >= TOO_MANY


@EACH
def test_no_order_of_a_protected_miniature_has_a_finding(miniature: Miniature) -> None:
    large = miniature.name in TOO_MANY
    done = exhaust(as_program(miniature, protected=True), limit=20 if large else LIMIT, rules=RULES)
    assert (done.problem, done.complete) == (None, not large)


@EACH
def test_one_of_the_first_orders_of_an_unprotected_miniature_has_a_finding(miniature: Miniature) -> None:
    assert exhaust(as_program(miniature, protected=False), limit=20, rules=RULES).problem is not None
