"""The border's rules: frames in their order, streams that are of one connection and one request, and news that
arrive.
"""

from __future__ import annotations

from sidestream.testing.mutations.mechanism import Edit, Equivalent, Exempt, Feature, Mutation

_FRONT_END = "sidestream.client.engine_server:Connection"
_SERVER = "sidestream.client.engine_server:EngineServer"
_CLIENT = "sidestream.client.remote:RemoteClient"
_LOOP = "sidestream.engine.loop:StepLoop"
_BORDER: frozenset[Feature] = frozenset({"border"})

MUTATIONS = (
    Mutation(
        name="frame-is-sent-once",
        hazard="H32",
        target=f"{_FRONT_END}.send_rest",
        old="        del self._unsent[:sent]\n",
        new="        del self._unsent[: sent - 1 or 1]\n",
        removes="the last byte of what a socket took is sent again with the rest",
        needs=_BORDER,
    ),
    Mutation(
        name="request-is-sent-once",
        hazard="H32",
        target=f"{_CLIENT}._write",
        old="    del self._unsent[:sent]\n",
        new="    del self._unsent[: sent - 1 or 1]\n",
        removes="the last byte of what a socket took of a request is sent again with the rest",
        needs=_BORDER,
    ),
    Mutation(
        name="frames-of-the-engine-keep-their-order",
        hazard="H32",
        target=f"{_FRONT_END}.send",
        old="        if not self._unsent:\n",
        new="        if True:\n",
        removes="news overtake the rest of the frame before them",
        needs=_BORDER,
    ),
    Mutation(
        name="frames-of-a-front-end-keep-their-order",
        hazard="H32",
        target=f"{_CLIENT}._send_frame",
        old="    self._unsent += frame\n",
        new="    self._unsent[:0] = frame\n",
        removes="a message overtakes the rest of the one before it",
        needs=_BORDER,
    ),
    Mutation(
        name="rest-of-a-frame-is-sent",
        hazard="H32",
        target=f"{_FRONT_END}.send",
        old="        self._unsent += memoryview(frame)[sent:]\n",
        new="",
        removes="what a socket did not take at once is lost",
        needs=_BORDER,
    ),
    Mutation(
        name="rest-of-a-frame-is-sent-later",
        hazard="H26",
        target=f"{_SERVER}._write",
        old="            front_end.send_rest()\n",
        new="            pass\n",
        removes="a connection that was full once says nothing more",
        needs=_BORDER,
    ),
    Mutation(
        name="request-keeps-the-version-of-its-keys",
        hazard="H14",
        target=f"{_FRONT_END}.submit",
        old="_request(message)",
        new=(
            "_request(Submit(*(self._engine.parts.scheduler.keys_version if name == 'keys_version' else getattr(message, name)"
            " for name in message.__struct_fields__)))"
        ),
        removes="keys that a front end made for the old weights are believed under the new ones",
        needs=frozenset({"border", "weights"}),
    ),
    Mutation(
        name="streams-are-not-used-again",
        hazard="H32",
        target=f"{_CLIENT}.submit",
        old="    first = self._next_stream\n",
        new="    first = next(one for one in itertools.count() if self._streams.keys().isdisjoint(range(one, one + params.n)))\n",
        removes="a request gets the streams of one that was ended and whose news, or whose end, are still on their way",
        needs=_BORDER,
        also=(
            Edit(
                f"{_FRONT_END}.submit",
                "        if not self._ids.keys().isdisjoint(streams):\n"
                '            raise EngineStopped(f"stream {message.stream} came again before it had ended: the connection is broken")\n',
                "",
            ),
        ),
    ),
    Mutation(
        name="news-belong-to-their-stream",
        hazard="H32",
        target=f"{_FRONT_END}.on_output",
        old="self._details[len(self._tokens)] = _detail(delta)",
        new="self._details[len(self._details)] = _detail(delta)",
        removes="what is said of one stream is read as if it was said of another",
        needs=_BORDER,
    ),
    Mutation(
        name="first-news-of-a-stream-say-what-all-share",
        hazard="H32",
        target=f"{_FRONT_END}.on_output",
        old="stream in self._known_streams:",
        new="self._known_streams:",
        removes="a stream's first token comes without its prompt's length, because another stream's was told",
        needs=_BORDER,
    ),
    Mutation(
        name="news-go-to-the-connection-that-asked",
        hazard="H34",
        target=f"{_FRONT_END}.submit",
        old="functools.partial(self.on_output, message.stream)",
        new="lambda delta: self.on_output(message.stream, news)",
        removes="the front end that takes the place of a dead one hears of the dead one's requests, whose streams have the same numbers",
        needs=frozenset({"border", "hang_up"}),
        also=(
            Edit(
                f"{_SERVER}.attach",
                "    front_end = Connection(connection, self._engine, self._wake)\n",
                "    front_end = Connection(connection, self._engine, self._wake)\n"
                "    for before in self._front_ends:\n        before.on_output = front_end.on_output\n",
            ),
        ),
    ),
    Mutation(
        name="front-end-that-goes-takes-its-requests-along",
        hazard="H34",
        target=f"{_FRONT_END}.close",
        old="        self._engine.abort(Handle(ids))\n",
        new="        pass\n",
        removes="requests whose front end has gone go on, and take what others wait for",
        needs=frozenset({"border", "hang_up"}),
    ),
    Mutation(
        name="lost-front-end-is-let-go",
        hazard="H34",
        target=f"{_SERVER}._write",
        old="            self._drop(front_end)\n",
        new="            pass\n",
        removes="a front end that has gone is kept, with its requests",
        needs=frozenset({"border", "hang_up"}),
    ),
    Mutation(
        name="end-of-a-connection-is-noticed",
        hazard="H34",
        target=f"{_SERVER}._read",
        old="    if not data:\n        front_end.lost = True\n        return\n",
        new="    if not data:\n        return\n",
        removes="nobody notices that a front end has gone, and its requests go on",
        needs=frozenset({"border", "hang_up"}),
    ),
    Mutation(
        name="finished-stream-is-forgotten-by-the-engine-s-side",
        hazard="H22",
        target=f"{_FRONT_END}.on_output",
        old="                self._ids.pop(stream, None)\n",
        new="                pass\n",
        removes="the engine's side keeps every stream for as long as the connection lasts",
        needs=_BORDER,
    ),
    Mutation(
        name="finished-stream-says-nothing-more",
        hazard="H22",
        target=f"{_FRONT_END}.on_output",
        old="            self._known_streams.discard(stream)\n",
        new="            pass\n",
        removes="the engine's side remembers of every stream that it was told of",
        needs=_BORDER,
    ),
    Mutation(
        name="finished-stream-is-forgotten-by-its-front-end",
        hazard="H22",
        target=f"{_CLIENT}._on_outputs",
        old="                del streams[stream]\n",
        new="                pass\n",
        removes="a front end keeps every stream for as long as the connection lasts",
        needs=_BORDER,
    ),
    Mutation(
        name="finish-that-comes-before-the-handle-counts",
        hazard="H22",
        target=f"{_FRONT_END}.submit",
        old="            if stream in self._ids:\n                self._ids[stream] = request_id\n",
        new="            self._ids[stream] = request_id\n",
        removes="a request that ends before its submitter knows its name is kept for ever",
        needs=_BORDER,
    ),
    Mutation(
        name="handle-is-kept-for-the-end",
        hazard="H32",
        target=f"{_FRONT_END}.submit",
        old="                self._ids[stream] = request_id\n",
        new="                pass\n",
        removes="the end of a stream means no request, which goes on",
        needs=frozenset({"border", "hang_up"}),
    ),
    Mutation(
        name="refused-request-leaves-no-stream",
        hazard="H22",
        target=f"{_FRONT_END}.submit",
        old="                self._ids.pop(stream, None)\n",
        new="                pass\n",
        removes="streams of a request that was refused are kept by the engine's side",
        needs=frozenset({"border", "full_queue"}),
    ),
    Mutation(
        name="refusal-is-told",
        hazard="H26",
        target=f"{_FRONT_END}.submit",
        old="        self.send(Rejected(message.stream, streams.stop, Failure.of(error)))\n",
        new="",
        removes="a client waits for ever for a request that was not taken",
        needs=frozenset({"border", "full_queue"}),
    ),
    Mutation(
        name="refused-streams-are-forgotten-by-their-front-end",
        hazard="H22",
        target=f"{_CLIENT}._on_message",
        old="for sample in (self._streams.pop(one, None) for one in range(stream, stop))",
        new="for sample in (self._streams.get(one) for one in range(stream, stop))",
        removes="a front end keeps the streams of requests that were refused",
        needs=frozenset({"border", "full_queue"}),
    ),
    Mutation(
        name="end-is-said-to-the-engine",
        hazard="H32",
        target=f"{_CLIENT}.abort",
        old="        self._send(Abort(first, stop, reason))\n",
        new="        pass\n",
        removes="a request whose client has gone goes on; its finish crosses an end that was never said",
        needs=frozenset({"border", "abort"}),
    ),
    Mutation(
        name="ended-stream-hears-nothing-more",
        hazard="H32",
        target=f"{_CLIENT}.abort",
        old="self._streams.pop(stream, None)",
        new="self._streams.get(stream)",
        removes="a client that has ended its request is told more of it",
        needs=frozenset({"border", "abort"}),
    ),
    Mutation(
        name="end-that-crosses-the-finish-is-harmless",
        hazard="H32",
        target=f"{_CLIENT}._on_outputs",
        old="            continue  # its reader has aborted it; this output crossed the Abort\n",
        new="            raise EngineStopped(f'no stream {stream}')\n",
        removes="news that cross the end of their stream break the connection of all",
        needs=frozenset({"border", "abort"}),
    ),
    Mutation(
        name="news-are-delivered-after-each-step",
        hazard="H26",
        target=f"{_LOOP}.step",
        old="    self._streams.deliver_outputs()\n",
        new="    if worked:\n        self._streams.deliver_outputs()\n",
        removes="an end that is told when there is nothing to compute is heard with the next token of somebody else",
        needs=frozenset({"border"}),
    ),
    Mutation(
        name="last-news-are-delivered-when-the-engine-ends",
        hazard="H26",
        target=f"{_LOOP}.drain",
        old="    self._streams.deliver_outputs()\n",
        new="",
        removes="clients whose requests the close aborts wait for ever",
        needs=frozenset({"border", "close"}),
    ),
)

_FALLS_BEHIND = "clients of schedules read what is there; the bound is thousands of news"

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="number-of-a-frame-is-checked",
            hazard="H32",
            target="sidestream.client.messages:FrameDecoder.feed",
            old="            if number != self.number:\n",
            new="            if number < 0:\n",
            removes="a frame that was lost, doubled or came out of order is believed",
        ),
        "connections lose, double and reorder nothing, and a rule of sending that is missing breaks frames, not whole ones",
        "client/test_messages.py::test_a_frame_out_of_its_place_ends_the_connection",
    ),
    Equivalent(
        Mutation(
            name="reader-that-falls-behind-is-aborted",
            hazard="H35",
            target=f"{_CLIENT}._on_outputs",
            old="        if outputs.is_full:\n            self.abort(outputs)\n            outputs.fail(unread_error())\n        else:\n            outputs.put(delta)\n",
            new="        outputs.put(delta)\n",
            removes="news of an answer that is not read fill the memory of a front end",
        ),
        _FALLS_BEHIND,
        "client/test_clients.py::test_a_reader_that_does_not_read_is_cut_off_and_others_go_on",
    ),
    Equivalent(
        Mutation(
            name="front-end-that-falls-behind-is-cut-off",
            hazard="H35",
            target=f"{_FRONT_END}.send",
            old="        if len(self._unsent) > MAX_UNSENT_BYTES:\n",
            new="        if len(self._unsent) < 0:\n",
            removes="news for a front end that does not read fill the memory of the engine's process",
        ),
        _FALLS_BEHIND,
        "client/test_engine_server.py::test_a_front_end_that_does_not_read_is_cut_off_at_the_bound_and_others_go_on",
    ),
    Equivalent(
        Mutation(
            name="failure-of-the-engine-is-delivered",
            hazard="H26",
            target="sidestream.engine.failures:Failures.end_engine",
            old="    self._streams.deliver_outputs()\n",
            new="",
            removes="clients of an engine that fails wait for ever",
        ),
        "an engine that raises ends a schedule",
        "client/test_clients.py::test_a_failure_of_the_engine_is_the_last_news_of_every_request",
    ),
    Equivalent(
        Mutation(
            name="stream-in-use-is-refused",
            hazard="H32",
            target=f"{_FRONT_END}.submit",
            old="        if not self._ids.keys().isdisjoint(streams):\n",
            new="        if False:\n",
            removes="a front end that uses a stream again makes the engine's side forget a request",
        ),
        "front ends use no stream again: see streams-are-not-used-again, which takes out both",
        "client/test_engine_server.py::test_nonsense_of_a_front_end_cuts_off_that_front_end_alone",
    ),
)

_BOTH_CLIENTS = "tests/client/test_clients.py asks this client what it asks the other one, which schedules look at"
_OTHER_LOOP = "a schedule's front end has one event loop; tests/client/test_clients.py closes one"
_AFTER_THE_END = "of a connection that has ended: nothing reads it any more"
_CALLS = "schedules ask for no metrics and no flush through the border; tests/client/test_clients.py does"

EXEMPT = (
    Exempt(
        "sidestream.client.base:OutputQueue._wake",
        "not self._waiter.done()",
        "a reader that was cancelled is not woken",
    ),
    Exempt(
        f"{_FRONT_END}.on_output",
        "self._known_streams.add(stream)",
        "without it each token costs more bytes and says the same",
    ),
    Exempt(f"{_FRONT_END}.close", "self._unsent.clear()", _AFTER_THE_END),
    Exempt(
        "sidestream.client.engine_server:_request",
        "keys_version=message.keys_version",
        "see request-keeps-the-version-of-its-keys",
    ),
    Exempt(
        "sidestream.client.engine_server:engine_info",
        "keys_version=scheduler.keys_version",
        "see request-keeps-the-version-of-its-keys",
    ),
    Exempt(f"{_SERVER}.run", "closing.done()", "ends the process; tests/client/test_engine_server.py closes it"),
    Exempt(
        f"{_SERVER}.finish", "front_end.send_rest()", "the last words; tests/client/test_engine_server.py reads them"
    ),
    Exempt(
        "sidestream.client.in_process:InProcessClient.on_output",
        "self._forget(outputs.number, {delta.index})",
        _BOTH_CLIENTS,
    ),
    Exempt("sidestream.client.in_process:InProcessClient.abort", "self._forget(outputs.number, ended)", _BOTH_CLIENTS),
    Exempt("sidestream.client.in_process:InProcessClient._queue_of", "self._requests.clear()", _OTHER_LOOP),
    Exempt(f"{_CLIENT}.connect", "messages.extend(decoder.feed(data))", "a list of messages"),
    Exempt(
        f"{_CLIENT}._keys_of",
        "self._keys.extend(keys, tokens, salt=cache_salt)",
        "see keys-are-made-with-the-requests-salt",
    ),
    Exempt(f"{_CLIENT}._keys_of", "keys, self.info.keys_version", "see request-keeps-the-version-of-its-keys"),
    Exempt(
        "sidestream.client.remote:_submit",
        "        checked.keys_version,\n",
        "see request-keeps-the-version-of-its-keys",
    ),
    Exempt("sidestream.client.remote:_submit", "dataclasses.replace(params, stop=())", "the engine knows no text"),
    Exempt(f"{_CLIENT}.listen", "self._calls.clear()", _OTHER_LOOP),
    Exempt(f"{_CLIENT}._on_message", "not future.done()", _CALLS),
    Exempt(f"{_CLIENT}._on_lost", "self._unsent.clear()", _AFTER_THE_END),
    Exempt(f"{_CLIENT}._on_lost", "self._streams.clear()", _AFTER_THE_END),
    Exempt(f"{_CLIENT}._on_lost", "not future.done()", _CALLS),
)
