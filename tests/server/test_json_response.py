"""The JSON that leaves the server: equal to Python's own, valid, never with NaN."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proof.fake_backend import FakeBackend, FakeTokenizer, Script
from sidestream.errors import InvariantError
from sidestream.server.body import to_json
from sidestream.server.responses import TokenSpeller
from sidestream.types import TokenLogprob

from .serving import serving

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_VALUES)
@example("\x85\u2028\u2029")
def test_clients_read_equal_values(value: object) -> None:
    text = to_json(value)
    assert json.loads(text) == value
    assert len(text.decode().splitlines()) == 1


def test_json_is_compact_and_only_line_ends_are_escaped() -> None:
    assert (
        to_json({"text": "né\n\\\u2028", "logprobs": [-0.5, None]})
        == '{"text":"né\\n\\\\\\u2028","logprobs":[-0.5,null]}'.encode()
    )


def test_half_a_surrogate_pair_is_never_sent() -> None:
    with pytest.raises(UnicodeEncodeError):
        to_json("\ud800")


@pytest.mark.parametrize("logprob", [math.nan, math.inf])
def test_a_non_finite_logprob_raises_an_invariant_error(logprob: float) -> None:
    for token in (TokenLogprob(65, logprob, ()), TokenLogprob(65, -0.5, ((66, logprob),))):
        with pytest.raises(InvariantError, match=r"log-probability is (nan|inf)"):
            TokenSpeller(FakeTokenizer().detokenizer()).add([token], "A", ended=False)


@pytest.mark.parametrize("stream", [False, True])
def test_replies_and_events_do_not_escape_characters(stream: bool) -> None:
    with serving(FakeBackend(Script("né"))) as served:
        reply = served.text(stream=stream)
    assert "é".encode() in reply.content
    assert reply.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
