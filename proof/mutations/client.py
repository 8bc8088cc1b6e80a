"""Rules of the client protocol: order of frames, streams of one connection and one request, delivery of outputs."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Append,
    Become,
    CallInstead,
    DropArgument,
    Never,
    Rewrite,
    SetArgument,
    SetOperand,
    Value,
)
from proof.mutations.tables import Change, Equivalent, Exempt, Feature, Mutation

_BORDER: frozenset[Feature] = frozenset({"border"})

MUTATIONS = (
    Mutation(
        name="frame-is-sent-once",
        hazard="H32",
        change=Become("del self._unsent[: sent - 1 or 1]"),
        consequence="the last byte that a socket accepted is sent again with the rest",
        needs=_BORDER,
    ),
    Mutation(
        name="request-is-sent-once",
        hazard="H32",
        change=Become("del self._unsent[: sent - 1 or 1]"),
        consequence="the last byte of a request that a socket accepted is sent again with the rest",
        needs=_BORDER,
    ),
    Mutation(
        name="frames-of-the-engine-keep-their-order",
        hazard="H32",
        change=Always(),
        consequence="outputs overtake the unsent rest of the frame before them",
        needs=_BORDER,
    ),
    Mutation(
        name="failure-of-the-engine-is-delivered",
        hazard="H26",
        consequence="clients of an engine that fails wait forever",
        needs=frozenset({"border", "device_loss"}),
    ),
    Mutation(
        name="frames-of-a-front-end-keep-their-order",
        hazard="H32",
        change=Become("self._unsent[:0] = frame"),
        consequence="a message overtakes the unsent rest of the previous message",
        needs=_BORDER,
    ),
    Mutation(
        name="rest-of-a-frame-is-sent",
        hazard="H32",
        consequence="bytes that a socket did not accept at once are lost",
        needs=_BORDER,
    ),
    Mutation(
        name="reading-thread-sends-the-rest-of-a-frame",
        hazard="H26",
        consequence="a connection sends nothing more after it was full once",
        needs=_BORDER,
    ),
    Mutation(
        name="request-keeps-the-version-of-its-keys",
        hazard="H14",
        at="request-is-submitted-to-the-engine",
        change=SetArgument(
            "_request",
            0,
            "Submit(*(self._engine.parts.scheduler.keys_version if name == 'keys_version' else getattr(message, "
            "name) for name in message.__struct_fields__))",
        ),
        consequence="keys that a front end computed for the old weights are used with the new ones",
        needs=frozenset({"border", "weights"}),
    ),
    Mutation(
        name="stream-numbers-are-not-reused",
        hazard="H32",
        change=Value(
            "next(one for one in itertools.count() if self._streams.keys().isdisjoint(range(one, one + params.n)))"
        ),
        consequence="a request gets stream numbers of an ended request whose last messages are still in flight",
        needs=_BORDER,
        also=(Change("stream-in-use-is-refused", Never()),),
    ),
    Mutation(
        name="outputs-belong-to-their-stream",
        hazard="H32",
        change=Rewrite("len(self._tokens)", "len(self._details)"),
        consequence="a message about one stream is applied to another",
        needs=_BORDER,
    ),
    Mutation(
        name="first-output-of-a-stream-has-the-prompts-counts",
        hazard="H32",
        change=SetOperand("_known_streams", "self._known_streams"),
        consequence="the first output of a stream lacks the prompt's counts, because another stream's counts were sent",
        needs=_BORDER,
    ),
    Mutation(
        name="outputs-go-to-the-connection-of-their-request",
        hazard="H34",
        at="request-is-submitted-to-the-engine",
        change=SetArgument("enqueue", 1, "lambda delta: self.on_output(message.stream, delta)"),
        consequence="outputs for a dead front end go to a new front end that uses the same stream numbers",
        needs=frozenset({"border", "hang_up"}),
        also=(
            Change(
                "front-end-is-attached",
                Append("for before in self._front_ends:\n    before.on_output = front_end.on_output"),
            ),
        ),
    ),
    Mutation(
        name="disconnect-aborts-the-requests-of-a-front-end",
        hazard="H34",
        consequence="requests of a dead front end continue, and hold blocks that others wait for",
        needs=frozenset({"border", "hang_up"}),
    ),
    Mutation(
        name="lost-front-end-is-detached",
        hazard="H34",
        consequence="the engine's side keeps a dead front end, and its requests continue",
        needs=frozenset({"border", "hang_up"}),
    ),
    Mutation(
        name="end-of-a-connection-is-detected",
        hazard="H34",
        consequence="a front end's death is not detected, and its requests continue",
        needs=frozenset({"border", "hang_up"}),
    ),
    Mutation(
        name="engine-side-drops-finished-streams",
        hazard="H22",
        consequence="the engine's side keeps every stream until the connection ends",
        needs=_BORDER,
    ),
    Mutation(
        name="engine-side-drops-records-of-finished-streams",
        hazard="H22",
        consequence="the engine's side keeps a record of every stream that it was sent",
        needs=_BORDER,
    ),
    Mutation(
        name="front-end-drops-finished-streams",
        hazard="H22",
        consequence="a front end keeps every stream until the connection ends",
        needs=_BORDER,
    ),
    Mutation(
        name="finish-before-the-handle-counts",
        hazard="H22",
        change=Always(),
        consequence="a request that ends before its client knows its id is never removed",
        needs=_BORDER,
    ),
    Mutation(
        name="handle-is-kept-until-the-end",
        hazard="H32",
        consequence="an abort of a stream matches no request, which continues",
        needs=frozenset({"border", "hang_up"}),
    ),
    Mutation(
        name="engine-side-drops-refused-streams",
        hazard="H22",
        consequence="the engine's side keeps the streams of rejected requests",
        needs=frozenset({"border", "full_queue"}),
    ),
    Mutation(
        name="refusal-is-sent",
        hazard="H26",
        consequence="a client waits forever for a rejected request",
        needs=frozenset({"border", "full_queue"}),
    ),
    Mutation(
        name="front-end-drops-refused-streams",
        hazard="H22",
        change=CallInstead("pop", "get"),
        consequence="a front end keeps the streams of rejected requests",
        needs=frozenset({"border", "full_queue"}),
    ),
    Mutation(
        name="end-is-sent-to-the-engine",
        hazard="H32",
        consequence="a request continues after its client has left; its finish crosses an abort that was never sent",
        needs=frozenset({"border", "abort"}),
    ),
    Mutation(
        name="ended-stream-receives-no-more-outputs",
        hazard="H32",
        change=CallInstead("pop", "get"),
        consequence="a client receives outputs of a request that it has aborted",
        needs=frozenset({"border", "abort"}),
    ),
    Mutation(
        name="finish-that-crosses-the-abort-is-ignored",
        hazard="H32",
        change=Become("raise EngineStopped(f'no stream {stream}')"),
        consequence="outputs that cross the abort of their stream break the connection for all requests",
        needs=frozenset({"border", "abort"}),
    ),
    Mutation(
        name="front-ends-compute-keys-with-the-requests-salt",
        hazard="H14",
        change=DropArgument("extend", "salt"),
        consequence="requests with different cache salts find each other's blocks",
        needs=frozenset({"border", "cache_salts"}),
    ),
    Mutation(
        name="outputs-are-delivered-after-each-step",
        hazard="H26",
        change=Become("if worked:\n    self._streams.deliver_outputs()"),
        consequence="in an idle engine, the end of a request is sent only with the next output of another request",
        needs=frozenset({"border"}),
    ),
    Mutation(
        name="last-outputs-are-delivered-when-the-engine-ends",
        hazard="H26",
        consequence="clients of requests that a close aborts wait forever",
        needs=frozenset({"border", "close"}),
    ),
)

_FALLS_BEHIND = "clients in schedules read all outputs immediately; the bound is thousands of outputs"

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="number-of-a-frame-is-checked",
            hazard="H32",
            change=Never(),
            consequence="a lost, duplicated or reordered frame is accepted",
        ),
        "sockets never lose, duplicate or reorder frames, and removing a rule of sending damages only parts of frames",
        noticed_by="client/test_messages.py::test_a_frame_out_of_its_place_ends_the_connection",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="reader-that-falls-behind-is-aborted",
            hazard="H35",
            change=Never(),
            consequence="unread outputs of a request fill the memory of a front end",
        ),
        _FALLS_BEHIND,
        noticed_by="client/test_clients.py::test_a_reader_that_does_not_read_is_aborted_and_others_continue",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="front-end-that-falls-behind-is-cut-off",
            hazard="H35",
            change=Never(),
            consequence="outputs for a front end that does not read fill the memory of the engine process",
        ),
        _FALLS_BEHIND,
        noticed_by="client/test_engine_server.py::test_a_front_end_that_does_not_read_is_disconnected_and_others_continue",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="stream-in-use-is-refused",
            hazard="H32",
            change=Never(),
            consequence="a front end that reuses a stream number makes the engine's side lose a request",
        ),
        "front ends never reuse a stream number: see stream-numbers-are-not-reused, which removes both rules",
        noticed_by="client/test_engine_server.py::test_nonsense_of_a_front_end_cuts_off_that_front_end_alone",
        unreached=True,
    ),
)

_BOTH_CLIENTS = "tests/client/test_clients.py runs the same tests for this client and for the one that schedules use"
_OTHER_LOOP = "a schedule's front end has one event loop; tests/client/test_clients.py closes one"
_AFTER_THE_END = "the connection has ended, so these values are not read any more"
_CALLS = "schedules request no metrics and no flush through front ends; tests/client/test_clients.py does"

EXEMPT = (
    Exempt("OutputQueue._wake", ("done",), "a cancelled reader is not woken"),
    Exempt("Connection.on_output", ("add",), "without it, messages are longer, but have the same content"),
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
)
