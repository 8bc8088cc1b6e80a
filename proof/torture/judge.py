"""Checks of an idle engine, and of the output that its clients received. Each function yields its findings as
sentences. Reads private state on purpose, because the engine's bookkeeping is under test. Called by the thread that
runs the engine. Codes such as H15 name the hazards of docs/ordering.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from proof.torture.contents import Contents
from proof.torture.oracle import Sample
from proof.torture.script import ScriptedDevice, ScriptedTier
from proof.torture.workload import Workload
from proof.toy import ToyDraftHead
from sidestream.attention.states import StatePool
from sidestream.engine import Engine
from sidestream.errors import InvariantError
from sidestream.schedule.scheduler import Scheduler
from sidestream.types import BatchPlan, Result
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.offload.tiers.shared_pool import SharedPool
from sidestream_kv.types import Key

# Log-probabilities computed in batches of different sizes may differ by rounding.
_TOLERANCE = 1e-4


def unended(engine: Engine) -> Iterator[str]:
    """Requests that an engine still counts as unfinished, or keeps a stream for."""
    if engine.unfinished:
        yield f"{engine.unfinished} requests are counted as unfinished"
    if engine.streams:
        yield f"{len(engine.streams)} output streams are kept"


def unbalanced(engine: Engine, disk: ScriptedTier | None) -> Iterator[str]:
    """Resources that an idle engine still holds besides those of `unended`."""
    parts = engine.parts
    for name, things in _kept(engine).items():
        if things:
            yield f"{things} {name} are kept"
    pools = [
        parts.blocks,
        parts.scheduler.slots,
        parts.executor._mailbox._pool,
        *([parts.tiers.host.pool] if parts.tiers is not None else []),
        *([parts.states] if parts.states is not None else []),
    ]
    for pool in pools:
        try:
            pool.check()
        except InvariantError as error:
            yield str(error)
        if pool.num_used:
            yield f"{pool.num_used} of {pool.size} {pool.name} are still in use"
    if disk is not None:
        index = disk.index
        if len(index._idle) != len(index):
            yield f"{len(index) - len(index._idle)} entries on disk are still pinned"
        if index._writing:
            yield f"{len(index._writing)} entries on disk are still being written"
        if index._leaving:
            yield f"{index._leaving} entries are neither on disk nor gone"
    if stalls := set(parts.device.host_waits()) - {"step"}:
        yield f"the engine's thread was blocked: {', '.join(sorted(stalls))}"


def wrong_accept_lengths(
    head: ToyDraftHead, scheduler: Scheduler, batch: BatchPlan, results: Sequence[Result]
) -> Iterator[str]:
    """Rows whose accept length differs from the one that `head` computes from the request's tokens. Call it before the
    step's commit.
    """
    sampling = (row for row in batch.rows if row.samples)
    for row, result in zip(sampling, results, strict=True):
        request = scheduler.get(row.request_id)
        if (
            not row.drafts
            or isinstance(result, int)
            or not result.finite
            or request is None
            or request.epoch != row.epoch
        ):
            continue
        drafts = head.drafts(request.tokens, head.hidden(request.tokens))[: row.drafts]
        right = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, result.token_ids, strict=False))
        )
        if right != len(result.token_ids) - 1:
            yield (
                f"request {row.request_id} advanced by {len(result.token_ids)} tokens after its {len(request.tokens)}: "
                f"{right} of {row.drafts} drafts were right (H19)"
            )


def disagreements(engine: Engine) -> Iterator[str]:
    """What the engine's self-check has reported."""
    metrics = engine.parts.metrics
    if rows := metrics.value("self_check_disagreements_total"):
        yield f"{rows:.0f} rows of steps that ran twice differ"
    if blocks := metrics.value("self_check_blocks_total", "mismatch"):
        yield f"{blocks:.0f} blocks in host memory do not match their checksum"


def still_findable(engine: Engine, disk: ScriptedTier | None) -> Iterator[str]:
    """Blocks that are still findable although the cache was just reset (H8). `disk`: if it is not shared."""
    parts = engine.parts
    counts = {
        "device": parts.blocks.num_keys + (0 if parts.states is None else parts.states.num_keys),
        "host": parts.tiers.host.pool.num_keys
        if parts.tiers and not isinstance(parts.tiers.host.pool, SharedPool)
        else 0,
        "disk": len(disk.index) if disk else 0,
    }
    for tier, count in counts.items():
        if count:
            yield f"{count} blocks of the {tier} tier are findable right after the reset (H8)"


def wrong_blocks(engine: Engine, device: ScriptedDevice, contents: Contents) -> Iterator[str]:
    """Blocks of device and host tier that are findable under a key but do not hold that key's content."""
    parts = engine.parts
    tiers = [("kv", parts.blocks), *([("host", parts.tiers.host.pool)] if parts.tiers is not None else [])]
    for memory, pool in tiers:
        data, size = device.memory(memory).data.numpy(), parts.layout.block_bytes
        for key, item in _findable(pool):
            if isinstance(pool, SharedPool) and pool._changed([item]):  # another engine has evicted it a moment ago
                continue
            payload, partial = data[item * size : (item + 1) * size].tobytes(), pool.is_partial(item)
            yield from differing(f"{pool.name} {item}", key, payload, contents, partial=partial)


def wrong_when_published(
    device: ScriptedDevice, contents: Contents, what: str, memory: str, where: slice, key: Key, partial: bool
) -> Iterator[str]:
    """Check a block that becomes findable under `key`: do the bytes `where` of `memory` hold the key's content?
    `partial`: only in the layers without a sliding window.

    Recurrent states and entries on disk are compared later, when the engine is idle (`wrong_states`, `wrong_entries`).
    """
    if memory in ("kv", "host") and where.stop - where.start == contents.block_bytes:
        payload = device.memory(memory).data[where].numpy().tobytes()
        yield from differing(f"published: {what}", key, payload, contents, partial=partial)


def wrong_states(engine: Engine, device: ScriptedDevice, contents: Contents) -> Iterator[str]:
    """Findable checkpoints of recurrent states that do not hold the state at the end of their key's block, or whose
    block is not findable.
    """
    parts = engine.parts
    region = parts.state_region
    if parts.states is None or region is None:
        return
    memory = device.memory("kv").data[region.first_byte : region.stop_byte]
    pool = StatePool(memory, region.layout, block_tokens=parts.layout.block_tokens, state_bytes=region.state_bytes)
    numbers = pool.layer(0)["recurrent", 0]
    for key, item in _findable(parts.states):
        found, expected = int(numbers[item, -1]), contents.states.get(key)
        if found != expected:
            yield f"state {item} is findable as {key.hex()[:8]} and holds {found}, the reference is {expected} (H15)"
        if parts.blocks.get(key) is None:
            yield f"state {item} is findable as {key.hex()[:8]}, its block is not (H15)"


def wrong_entries(disk: ScriptedTier, contents: Contents, *, damaged: bool) -> Iterator[str]:
    """Published entries on disk whose payload is not the key's content. `damaged`: the workload damages files, so
    entries that cannot be read are no finding.
    """
    # Reads another thread's index, which is safe because no thread writes now.
    for key, entry in [(entry.key, entry) for entry in disk.index.entries]:
        payload = disk.peek(entry)
        if payload is not None:
            yield from differing(f"disk entry {entry.serial}", key, payload, contents)
        elif not damaged:
            yield f"disk entry {entry.serial} is published as {key.hex()[:8]}, but cannot be read"


def stray_records(disk: ScriptedTier, *, damaged: bool) -> Iterator[str]:
    """Differences between the records on disk and the findable entries, after a close. `damaged`: the workload damages
    slots. The tier deletes a damaged entry when it is read, also by `wrong_entries`, so entries may lack a record.
    """
    records, entries = disk.strays()
    yield from (f"the record {name} is left on disk without a findable entry" for name in sorted(records))
    yield from () if damaged else (f"entry {name} is findable without a record" for name in sorted(entries))


def wrong_answer(
    workload: Workload, number: int, received: Sample, expected: Sample, *, over: bool
) -> Iterator[tuple[str, str]]:
    """Oracle and message for each error in one client's output.

    over   the engine is closed or dead for this client, so a prefix of the answer or an abort is also correct
    """
    asked = workload.requests[number]
    count, who = len(received.tokens), f"request {number}"
    if received.reason is None and not over:
        yield "answered", f"{who} never ended: it received {count} of {len(expected.tokens)} tokens"
    if received.reason == "abort" and asked.abort_at is None and workload.closes_at is None and not over:
        yield "answered", f"{who} was aborted, although its client did not ask for it"
    # After a restart, clients may repeat a request later than its abort. With front ends, an abort may arrive late.
    restarts = {"ranks", "failing_step"} <= workload.features or any(
        event.kind in ("crash", "restart", "device_lost", "copies_lost", "rank_lost") for event in workload.events
    )
    in_step = not restarts and not workload.front_ends
    if asked.abort_at is not None and in_step and count > (asked.abort_at - asked.at) * (1 + workload.drafts):
        yield (
            "answered",
            f"{who} received {count} tokens, although its client left {asked.abort_at - asked.at} steps after it came",
        )
    if received.reason == "error" and not workload.features & {
        "bad_logits",
        "device_loss",
        "failing_step",
        "rank_loss",
    }:
        yield "answered", f"{who} ended with an error: {received.error}"
    if received.tokens != expected.tokens[:count]:
        at = next(
            (at for at, pair in enumerate(zip(received.tokens, expected.tokens, strict=False)) if pair[0] != pair[1]),
            len(expected.tokens),
        )
        yield "tokens", f"{who} received {received.tokens}, the reference is {expected.tokens}: differs at {at}"
        return
    if received.reason in ("stop", "length"):
        if (received.reason, count, received.text) != (expected.reason, len(expected.tokens), expected.text):
            said, right = (
                (received.reason, count, received.text),
                (expected.reason, len(expected.tokens), expected.text),
            )
            yield "tokens", f"{who} ended as {said}, the reference as {right} (reason, tokens, text)"
    elif not expected.text.startswith(received.text):
        yield "tokens", f"{who} received the text {received.text!r}, the reference is {expected.text!r}"
    pairs = list(zip(received.logprobs, expected.logprobs, strict=False))
    if len(received.logprobs) > len(expected.logprobs) or any(abs(mine - right) > _TOLERANCE for mine, right in pairs):
        yield "tokens", f"{who} received log-probabilities {received.logprobs}, the reference is {expected.logprobs}"


def differing(what: str, key: Key, payload: bytes, contents: Contents, *, partial: bool = False) -> Iterator[str]:
    """What is wrong with the bytes of a block that is findable under `key`. `partial`: its layers with a sliding window
    are not compared.
    """
    right = contents.blocks.get(key)
    if partial and right is not None:
        payload, right = (b"".join(data[layer] for layer in contents.without_window) for data in (payload, right))
    if key in contents.parts:
        if wrong := [at for at, data in contents.parts[key] if payload[at : at + len(data)] != data]:
            yield f"{what} is findable as {key.hex()[:8]}, but is not that state or page, from byte {wrong[0]} on (H15)"
    elif right is None:
        yield f"{what} is findable under {key.hex()[:8]}, which no request has"
    elif payload != right:
        where = [at for at, (mine, its) in enumerate(zip(payload, right, strict=True)) if mine != its]
        found = f"{what} is findable as {key.hex()[:8]}"
        yield f"{found}, but {len(where)} of its {len(right)} bytes are wrong, the first at {where[0]}"


def _findable(pool: FencedPool) -> list[tuple[Key, int]]:
    return list(pool._index._id_of.items())


def _kept(engine: Engine) -> dict[str, int]:
    """Number of objects that the engine keeps for requests, transfers and steps, by name, without output streams."""
    kept: dict[str, int] = {**engine.parts.scheduler.sizes()}
    return kept if engine.parts.transfers is None else kept | engine.parts.transfers.sizes()
