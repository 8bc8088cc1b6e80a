"""Taking a rule out, and putting it back."""

from __future__ import annotations

import inspect
import traceback

import pytest

from sidestream.errors import InvariantError
from sidestream.kv.pool import FencedPool, Lease
from sidestream.kv.prefix import PrefixIndex
from sidestream.testing.mutations import Edit, Mutation, applied, find, source_of

POOL = "sidestream.kv.pool:FencedPool"


def mutation(target: str, old: str, new: str, *also: Edit) -> Mutation:
    return Mutation(name="tried", hazard="H1", target=target, old=old, new=new, removes="something", also=also)


def test_a_rule_is_gone_inside_and_back_outside_also_for_objects_that_were_there_before() -> None:
    pool = FencedPool("blocks", 2)
    bound = pool.take(1).release
    with applied(mutation("sidestream.kv.pool:Lease.release", "self.pool._release(self.ids, tuple(after))", "pass")):
        bound()
        assert pool.num_used == 1
    pool.take(1).release()
    assert pool.num_used == 1


def test_the_code_is_back_after_an_error() -> None:
    before = PrefixIndex.clear.__code__
    with pytest.raises(ZeroDivisionError), applied(find("reset-removes-keys")):
        assert PrefixIndex.clear.__code__ is not before
        1 / 0  # noqa: B018
    assert PrefixIndex.clear.__code__ is before


def test_two_mutations_of_one_function_at_once_are_refused_and_the_first_stays() -> None:
    first, second = find("release-adds-to-earlier-fences"), find("last-release-frees")
    before = FencedPool._release.__code__
    with applied(first):
        during = FencedPool._release.__code__
        with pytest.raises(InvariantError, match="is changed already: end the other mutation first"), applied(second):
            pass
        assert FencedPool._release.__code__ is during
    assert FencedPool._release.__code__ is before
    with applied(second):
        pass


def test_a_mutation_of_which_one_edit_does_not_fit_changes_nothing() -> None:
    before = Lease.release.__code__
    broken = mutation(
        "sidestream.kv.pool:Lease.release", "self._open = False", "pass", Edit(f"{POOL}.take", "no such text", "")
    )
    with pytest.raises(InvariantError, match="'no such text' occurs 0 times"), applied(broken):
        pass
    assert Lease.release.__code__ is before


@pytest.mark.parametrize(
    ("target", "old", "message"),
    [
        (f"{POOL}.take", "block_id", "occurs 15 times"),
        (f"{POOL}.fetch", "x", "no fetch in"),
        ("sidestream.kv.pool:PoolExhausted", "x", "is no function"),
    ],
)
def test_what_does_not_fit_the_code_says_so(target: str, old: str, message: str) -> None:
    with pytest.raises(InvariantError, match=message), applied(mutation(target, old, "")):
        pass


def test_overlapping_edits_are_refused() -> None:
    twice = mutation(
        f"{POOL}._evict",
        "    self._index.remove_all(block_ids)\n",
        "",
        Edit(f"{POOL}._evict", "self._index.remove_all(block_ids)", ""),
    )
    with pytest.raises(InvariantError, match="the edits overlap"), applied(twice):
        pass


def test_an_error_in_changed_code_points_at_the_line_of_the_original() -> None:
    lines, first = inspect.getsourcelines(FencedPool.take)
    at = next(number for number, line in enumerate(lines) if "return Lease(" in line)
    longer = mutation(
        f"{POOL}.take",
        "return Lease(self, block_ids, pending)",
        "raise ZeroDivisionError",
        Edit(
            f"{POOL}.take",
            "        self._references[block_id] = 1\n",
            "        self._references[block_id] = 1\n        pass\n        pass\n",
        ),
    )
    with applied(longer), pytest.raises(ZeroDivisionError) as caught:
        FencedPool("blocks", 1).take(1)
    assert traceback.extract_tb(caught.tb)[-1].lineno == first + at


def test_a_property_a_static_method_and_a_function_can_be_changed() -> None:
    assert source_of(f"{POOL}.num_free").function is FencedPool.num_free.fget
    assert source_of("sidestream.offload.worker:OffloadWorker._wants_more").text.startswith(
        "@staticmethod\ndef _wants_more"
    )
    assert source_of("sidestream.kv.pool:merge_fences").function.__name__ == "merge_fences"
