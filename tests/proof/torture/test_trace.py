"""The interleaving as text: what is joined, what is left out, what is marked, and how columns fit a terminal."""

from __future__ import annotations

from proof.torture import TraceLine, explain, render
from sidestream_order.findings import Finding

RACE = Finding(
    kind="race",
    message="",
    first="offload/connector.py:169 _store, `store 1 blocks`",
    second="runner/executor.py:104 launch, `decode 1`",
    streams=("store", "compute"),
    works=("store:1", "compute:9"),
    accesses=("reads", "writes"),
    memory="kv",
    start=192,
    stop=384,
)
LINES = (
    TraceLine("host", "takes device blocks 1", memory="kv", spans=((192, 384),)),
    TraceLine("host", "takes device blocks 2", memory="kv", spans=((384, 576),)),
    TraceLine("host", "takes rows 0", memory="rows", spans=((0, 1),)),
    TraceLine("host", "submits store:1 `store 1 blocks`", "store:1"),
    TraceLine("host", "submits compute:9 `decode 1`", "compute:9"),
    TraceLine("compute", "begins compute:9", "compute:9"),
    TraceLine("store", "begins store:1", "store:1", objected=True),
    TraceLine("store", "ends store:1", "store:1"),
    TraceLine("compute", "ends compute:9: it failed", "compute:9"),
)


def test_a_race_is_shown_by_two_letters_and_the_missing_edge() -> None:
    assert render(LINES, RACE).splitlines() == [
        "    host                                                                compute                    store",
        "    takes device blocks 1",
        " A  submits store:1 `store 1 blocks` reads kv[192:384]",
        " B  submits compute:9 `decode 1` writes kv[192:384], not after store:1",
        " B                                                                      begins compute:9",
        f"!A{'':97}runs store:1",
        " B                                                                      ends compute:9: it failed",
    ]
    assert explain(RACE).splitlines() == [
        "  A  store:1    reads  kv[192:384], from offload/connector.py:169 _store, `store 1 blocks`",
        "  B  compute:9  writes kv[192:384], from runner/executor.py:104 launch, `decode 1`",
        "  missing: store:1 ──▶ compute:9; compute never waited for it, so B may also run first",
    ]


def test_without_an_objection_everything_is_shown_and_nothing_is_marked() -> None:
    text = render(LINES)
    assert "takes rows 0" in text
    assert "takes device blocks 2" in text
    assert {line[:4] for line in text.splitlines()} == {"    "}


def test_a_narrow_terminal_moves_the_columns_together() -> None:
    for width in (80, 100, 140):
        lines = render(LINES, RACE, width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert lines[0].split() == ["host", "compute", "store"]
    # No narrower than the names of the columns; whoever has less room sees lines wrapped.
    assert render(LINES, RACE, width=10).splitlines()[0] == "    host  compute  store"


def test_a_host_that_did_not_poll_is_reported() -> None:
    race = Finding("race", "", "a", "b", ("store", "host"), ("store:1", "host"), ("writes", "reads"), "host", 0, 8)
    assert (
        explain(race).splitlines()[-1]
        == "  missing: store:1 ──▶ host; the host never saw store:1 done, so B may also run first"
    )
    assert " B" not in render(LINES, race)  # the host's own touches are no work of a stream


def test_other_objections_have_no_edge_to_draw() -> None:
    leak = Finding("leak", "", "a", "", ("host",), ("host",), (), "kv", 192, 384)
    assert explain(leak) == ""
    assert "takes device blocks 1" in render(LINES, leak)
    assert "takes device blocks 2" not in render(LINES, leak)


def test_nothing_is_rendered_as_nothing() -> None:
    assert render(()) == ""
