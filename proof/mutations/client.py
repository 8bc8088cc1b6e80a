"""Rules of the client protocol: order of frames, streams of one connection and one request, delivery of outputs."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Append,
    Become,
    CallInstead,
    DropArgument,
    DropOperand,
    Never,
    Rewrite,
    SetArgument,
    Value,
)
from proof.mutations.tables import Change, Exempt, Fault, Feature

_BORDER: frozenset[Feature] = frozenset({"border"})

MUTATIONS = (
    Fault("H32", "the last byte that a socket accepted is sent again with the rest").without(
        "frame-is-sent-once", Become("del self._unsent[: sent - 1 or 1]"), needs=_BORDER
    ),
    Fault("H32", "the last byte of a request that a socket accepted is sent again with the rest").without(
        "request-is-sent-once", Become("del self._unsent[: sent - 1 or 1]"), needs=_BORDER
    ),
    Fault("H32", "outputs overtake the unsent rest of the frame before them").without(
        "frames-of-the-engine-keep-their-order", Always(), needs=_BORDER
    ),
    Fault("H26", "clients of an engine that fails wait forever").without(
        "failure-of-the-engine-is-delivered", needs={"border", "device_loss"}
    ),
    Fault("H32", "a message overtakes the unsent rest of the previous message").without(
        "frames-of-a-front-end-keep-their-order", Become("self._unsent[:0] = frame"), needs=_BORDER
    ),
    Fault("H32", "bytes that a socket did not accept at once are lost").without(
        "rest-of-a-frame-is-sent", needs=_BORDER
    ),
    Fault("H26", "a connection sends nothing more after it was full once").without(
        "reading-thread-sends-the-rest-of-a-frame", needs=_BORDER
    ),
    Fault("H14", "keys that a front end computed for the old weights are used with the new ones").without(
        "request-keeps-the-version-of-its-keys",
        SetArgument(
            "_request",
            0,
            "Submit(*(self._engine.parts.scheduler.keys_version if name == 'keys_version' else getattr(message, "
            "name) for name in message.__struct_fields__))",
        ),
        at="request-is-submitted-to-the-engine",
        needs={"border", "weights"},
    ),
    Fault("H32", "a request gets stream numbers of an ended request whose last messages are still in flight").without(
        "stream-numbers-are-not-reused",
        Value("next(one for one in itertools.count() if self._streams.keys().isdisjoint(range(one, one + params.n)))"),
        Change("stream-in-use-is-refused", Never()),
        needs=_BORDER,
    ),
    Fault("H32", "a message about one stream is applied to another").without(
        "outputs-belong-to-their-stream", Rewrite("len(self._columns.tokens)", "len(self._details)"), needs=_BORDER
    ),
    Fault(
        "H32", "the first output of a stream lacks the prompt's counts, because another stream's counts were sent"
    ).without("first-output-of-a-stream-has-the-prompts-counts", DropOperand("is_new"), needs=_BORDER),
    Fault("H34", "outputs for a dead front end go to a new front end that uses the same stream numbers").without(
        "outputs-go-to-the-connection-of-their-request",
        SetArgument("enqueue", 1, "lambda delta: self.on_output(message.stream, delta)"),
        Change(
            "front-end-is-attached",
            Append("for before in self._front_ends:\n    before.on_output = front_end.on_output"),
        ),
        at="request-is-submitted-to-the-engine",
        needs={"border", "hang_up"},
    ),
    Fault("H34", "requests of a dead front end continue, and hold blocks that others wait for").without(
        "disconnect-aborts-the-requests-of-a-front-end", needs={"border", "hang_up"}
    ),
    Fault("H34", "the engine's side keeps a dead front end, and its requests continue").without(
        "lost-front-end-is-detached", needs={"border", "hang_up"}
    ),
    Fault("H34", "a front end's death is not detected, and its requests continue").without(
        "end-of-a-connection-is-detected", needs={"border", "hang_up"}
    ),
    Fault("H22", "the engine's side keeps every stream until the connection ends").without(
        "engine-side-drops-finished-streams", needs=_BORDER
    ),
    Fault("H22", "a front end keeps every stream until the connection ends").without(
        "front-end-drops-finished-streams", needs=_BORDER
    ),
    Fault("H22", "a request that ends before its client knows its id is never removed").without(
        "finish-before-the-handle-counts", Always(), needs=_BORDER
    ),
    Fault("H32", "an abort of a stream matches no request, which continues").without(
        "handle-is-kept-until-the-end", needs={"border", "hang_up"}
    ),
    Fault("H22", "the engine's side keeps the streams of rejected requests").without(
        "engine-side-drops-refused-streams", needs={"border", "full_queue"}
    ),
    Fault("H26", "a client waits forever for a rejected request").without(
        "refusal-is-sent", needs={"border", "full_queue"}
    ),
    Fault("H22", "a front end keeps the streams of rejected requests").without(
        "front-end-drops-refused-streams", CallInstead("pop", "get"), needs={"border", "full_queue"}
    ),
    Fault(
        "H32", "a request continues after its client has left; its finish crosses an abort that was never sent"
    ).without("end-is-sent-to-the-engine", needs={"border", "abort"}),
    Fault("H32", "a client receives outputs of a request that it has aborted").without(
        "ended-stream-receives-no-more-outputs", CallInstead("pop", "get"), needs={"border", "abort"}
    ),
    Fault("H32", "outputs that cross the abort of their stream break the connection for all requests").without(
        "finish-that-crosses-the-abort-is-ignored",
        Become("raise EngineStopped(f'no stream {stream}')"),
        needs={"border", "abort"},
    ),
    Fault("H14", "requests with different cache salts find each other's blocks").without(
        "front-ends-compute-keys-with-the-requests-salt",
        DropArgument("extend", "salt"),
        needs={"border", "cache_salts"},
    ),
    Fault(
        "H26", "in an idle engine, the end of a request is sent only with the next output of another request"
    ).without(
        "outputs-are-delivered-after-each-step",
        Become("if worked:\n    self._streams.deliver_outputs()"),
        needs={"border"},
    ),
    Fault("H26", "clients of requests that a close aborts wait forever").without(
        "last-outputs-are-delivered-when-the-engine-ends", needs={"border", "close"}
    ),
)

_FALLS_BEHIND = "clients in schedules read all outputs immediately; the bound is thousands of outputs"

EQUIVALENT = (
    Fault("H32", "a lost, duplicated or reordered frame is accepted")
    .without("number-of-a-frame-is-checked", Never())
    .unreached(
        "sockets never lose, duplicate or reorder frames, and removing a rule of sending damages only parts of frames",
        "client/test_messages.py::test_a_frame_out_of_its_place_ends_the_connection",
    ),
    Fault("H35", "unread outputs of a request fill the memory of a front end")
    .without("reader-that-falls-behind-is-aborted", Never())
    .unreached(
        _FALLS_BEHIND, "client/test_clients.py::test_a_reader_that_does_not_read_is_aborted_and_others_continue"
    ),
    Fault("H35", "outputs for a front end that does not read fill the memory of the engine process")
    .without("front-end-that-falls-behind-is-cut-off", Never())
    .unreached(
        _FALLS_BEHIND,
        "client/test_engine_server.py::test_a_front_end_that_does_not_read_is_disconnected_and_others_continue",
    ),
    Fault("H32", "a front end that reuses a stream number makes the engine's side lose a request")
    .without("stream-in-use-is-refused", Never())
    .unreached(
        "front ends never reuse a stream number: see stream-numbers-are-not-reused, which removes both rules",
        "client/test_engine_server.py::test_nonsense_of_a_front_end_cuts_off_that_front_end_alone",
    ),
)

_BOTH_CLIENTS = "tests/client/test_clients.py runs the same tests for this client and for the one that schedules use"
_OTHER_LOOP = "a schedule's front end has one event loop; tests/client/test_clients.py closes one"
_AFTER_THE_END = "the connection has ended, so these values are not read any more"
_CALLS = "schedules request no metrics and no flush through front ends; tests/client/test_clients.py does"

EXEMPT = (
    Exempt("OutputQueue._wake", ("done",), "a cancelled reader is not woken"),
    Exempt("Connection.send_outputs", ("clear",), "without it, every message has all outputs before, too"),
    Exempt("Connection.close", ("clear",), _AFTER_THE_END),
    Exempt("_request", ("keys_version",), "see request-keeps-the-version-of-its-keys"),
    Exempt("_status", ("paused",), "the health says it; see tests/client/test_clients.py"),
    Exempt("engine_info", ("keys_version",), "see request-keeps-the-version-of-its-keys"),
    Exempt("EngineServer.run", ("done",), "it ends the process; tests/client/test_engine_server.py closes the server"),
    Exempt("EngineServer.finish", ("send_rest",), "the last messages; tests/client/test_engine_server.py reads them"),
    Exempt("InProcessClient.on_output", ("_forget",), _BOTH_CLIENTS),
    Exempt("InProcessClient.abort", ("_forget",), _BOTH_CLIENTS),
    Exempt("InProcessClient._queue_of", ("clear",), _OTHER_LOOP),
    Exempt("_first_messages", ("extend",), "a list of messages"),
    Exempt("RemoteClient._keys_of", ("keys_version",), "see request-keeps-the-version-of-its-keys"),
    Exempt("RemoteClient.listen", ("clear",), _OTHER_LOOP),
    Exempt("RemoteClient._on_message", ("done",), _CALLS),
    Exempt("RemoteClient._on_lost", ("clear", "clear"), _AFTER_THE_END),
    Exempt("RemoteClient._on_lost", ("done",), _CALLS),
    Exempt("_submit", ("keys_version",), "see request-keeps-the-version-of-its-keys"),
    Exempt("_submit", ("replace",), "the engine does not use stop strings"),
    Exempt("with_token_ids", ("replace", "replace"), "a copy of parameters"),
    Exempt("_with_text", ("replace",), "a copy of a delta"),
)
