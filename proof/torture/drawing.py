"""Draws the workload of a seed. Each kind of complication has a random generator of its own, so that a new kind changes
only the workloads that it is drawn for.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from proof.torture.workload import (
    BLOCK_PART,
    BLOCK_TOKENS,
    DAMAGE,
    FAULTS_OF,
    HEADER_PART,
    LARGE_VOCAB,
    LOAD_DEADLINE_S,
    LONGEST_PROMPT,
    NEUTRAL,
    OF_STORE,
    VOCAB,
    Asked,
    Event,
    EventKind,
    Fault,
    FaultKind,
    Operation,
    Workload,
    blocks_for,
)

# Duration of an operation, in load deadlines, that is longer than any request waits for a load.
_ENDLESS = 3000
_LONG = 100
# Repetition, presence and frequency penalty.
_PENALTIES = (NEUTRAL, (1.5, 0.0, 0.0), (1.0, 2.0, 2.0), (2.0, 1.0, 2.0))
# For requests with a temperature. With these penalties, the toy model's best token becomes unlikely once it was
# sampled. No logit bias is needed, so steps in CUDA graphs, which do not support biases, are tested too.
_HARSH = (10.0, 2.0, 2.0)
# The toy model gives one token a logit of 100, and all others 0. Another token with this bias has the same logit. If
# its id is lower, it is sampled until a penalty lowers its logit.
_TIE = 100.0
# Virtual seconds after which another slot is ready, if a host tier grows while steps of several ranks run.
_SLOT_S = (8e-6, 12e-6)
_SLOWEST_PIN_S = 2.0
# What engines share: a store, a directory, host memory.
_SHARED = ((True, False, False), (False, True, False), (False, False, True), (True, True, True), (True, True, True))


def draw_workload(seed: int) -> Workload:
    """Draw the workload of a seed. The result is the same in every process."""
    workload = _draw_workload(seed)
    # A generator of its own, so that the other parts of existing workloads do not change.
    rng = random.Random(f"sidestream pinning {seed}")
    pin_s = rng.choice((0.1, 0.5, 2.0)) if workload.slots and rng.random() < 0.2 else 0.0
    workload = dataclasses.replace(workload, pin_s=pin_s)
    workload = _draw_ties(random.Random(f"sidestream ties {seed}"), workload)
    workload = _draw_states(random.Random(f"sidestream states {seed}"), workload)
    workload = _draw_returns(random.Random(f"sidestream returns {seed}"), workload)
    workload = _draw_slow_loads(random.Random(f"sidestream slow loads {seed}"), workload)
    workload = _draw_border(random.Random(f"sidestream front ends {seed}"), workload)
    workload = _draw_ranks(random.Random(f"sidestream ranks {seed}"), workload)
    workload = _draw_identities(random.Random(f"sidestream identities {seed}"), workload)
    workload = _draw_damage(random.Random(f"sidestream damage {seed}"), workload)
    workload = _draw_loss(random.Random(f"sidestream loss {seed}"), workload)
    workload = _draw_self_check(random.Random(f"sidestream self-check {seed}"), workload)
    workload = _draw_second_failure(random.Random(f"sidestream second failure {seed}"), workload)
    workload = _draw_lost_rank(random.Random(f"sidestream lost rank {seed}"), workload)
    workload = _draw_failing_rank(random.Random(f"sidestream failing rank {seed}"), workload)
    workload = _draw_window(random.Random(f"sidestream window {seed}"), workload)
    workload = _draw_lag(random.Random(f"sidestream lag {seed}"), workload)
    large = workload.layer_groups and random.Random(f"sidestream large groups {seed}").random() < 1 / 4
    turn_blocks = 1 + random.Random(f"sidestream turns {seed}").randrange(2)
    workload = dataclasses.replace(workload, large_groups=large, turn_blocks=turn_blocks)
    workload = _draw_grammars(random.Random(f"sidestream grammars {seed}"), workload)
    workload = _draw_shared(random.Random(f"sidestream joint {seed}"), workload)
    return _draw_vocabulary(random.Random(f"sidestream vocabulary {seed}"), workload)


def _draw_shared(rng: random.Random, workload: Workload) -> Workload:
    """Let one of six engines with a host tier share something with other engines: host memory, the directory of the
    disk tier, a store whose calls fail, or several of these. Left out are engines with several ranks, whose tiers
    proof.ranks makes, and models whose blocks are not all of one kind: with a recurrent state or a sliding window.
    """
    alone = workload.ranks > 1 or workload.states > 0 or workload.window > 0
    if rng.random() >= 1 / 6 or not workload.slots or alone:
        return workload
    can = [True, workload.disk_blocks > 0, not workload.pin_s]
    store, disk, memory = (able and chosen for able, chosen in zip(can, rng.choice(_SHARED), strict=True))
    faults = [_draw_fault(rng, each) for each in rng.choices(OF_STORE, k=rng.choice((1, 1, 2)) if store else 0)]
    lies = [dataclasses.replace(fault, every=1, place=rng.choice((rng.random(), 1.0)), entries=100) for fault in faults]
    faults = [lie if lie.kind in DAMAGE else fault for fault, lie in zip(faults, lies, strict=True)]
    return dataclasses.replace(
        workload, store=store, shared_disk=disk, shared_memory=memory, faults=(*workload.faults, *faults)
    )


def _draw_vocabulary(rng: random.Random, workload: Workload) -> Workload:
    """Use a large vocabulary in one workload of eight: its prompts have the same tokens under other ids, most of which
    do not fit into 16 bits.
    """
    if rng.random() >= 1 / 8:
        return workload
    requests = tuple(
        dataclasses.replace(asked, prompt=tuple(LARGE_VOCAB - 729 * (VOCAB - token) for token in asked.prompt))
        for asked in workload.requests
    )
    return dataclasses.replace(workload, requests=requests, vocab=LARGE_VOCAB)


def _draw_grammars(rng: random.Random, workload: Workload) -> Workload:
    """Let half of the requests have a grammar in one workload of six without drafts."""
    if workload.drafts or rng.random() >= 1 / 6:
        return workload
    forms = ("", "", "2 100", f"3 {rng.randint(1, 8)}")
    requests = tuple(dataclasses.replace(asked, grammar=rng.choice(forms)) for asked in workload.requests)
    return dataclasses.replace(workload, requests=requests)


def _draw_lag(rng: random.Random, workload: Workload) -> Workload:
    """In half of the workloads with ranks and a host tier that grows, let the memory of the other ranks take much
    longer, so that rank 0 depends on their reports.
    """
    if workload.ranks == 1 or not workload.pin_s or rng.random() < 0.5:
        return workload
    return dataclasses.replace(workload, pin_lag=min(200.0, _SLOWEST_PIN_S / workload.pin_s))


def _draw_window(rng: random.Random, workload: Workload) -> Workload:
    """Give some layers a sliding window in one workload of four. In most of those with a host tier, a long prompt
    returns from host memory, and then shorter prompts that begin alike: they need blocks that lack layers by then.
    """
    if rng.random() >= 1 / 4:
        return workload
    window = rng.choice((2, 3, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS))
    workload = dataclasses.replace(workload, window=window)
    keeps_its_own = workload.meanwhile or workload.ranks > 1 or workload.pin_s > 0 or workload.closes_at is not None
    if not workload.slots or keeps_its_own or rng.random() < 0.3:
        return workload
    prompt, other = (_draw_tokens(rng, rng.randint(20, 32)) for _ in range(2))
    requests, at = [], 0
    for number, asked in enumerate(workload.requests):
        begin = prompt[: rng.randint(2 * BLOCK_TOKENS, len(prompt))]
        shorter = (*begin, *_draw_tokens(rng, rng.randint(1, 6)))
        given = (prompt, other, prompt, shorter)[number % 4]
        requests.append(dataclasses.replace(asked, at=at, prompt=given, abort_at=None))
        at += rng.choice((4, 6, 8, 12))
    blocks = max(map(blocks_for, requests)) + rng.choice((0, 1, 2, 4))
    return dataclasses.replace(workload, requests=tuple(requests), blocks=blocks, slots=max(workload.slots, 40))


def _draw_self_check(rng: random.Random, workload: Workload) -> Workload:
    """Run steps twice in one workload of six. Models with recurrent states are left out, because their steps cannot run
    twice.
    """
    if rng.random() >= 1 / 6 or workload.states:
        return workload
    return dataclasses.replace(workload, self_check=rng.choice((0.5, 1.0, 1.0)))


def _draw_second_failure(rng: random.Random, workload: Workload) -> Workload:
    """Let a step raise, too, in half of the workloads with logits that are not finite. Workloads with several ranks are
    left out: see `_draw_failing_rank`.
    """
    if "bad_logits" not in workload.features or workload.ranks > 1 or rng.random() < 0.5:
        return workload
    return dataclasses.replace(workload, faults=(*workload.faults, Fault("forward", "lost", rng.randrange(30), 0)))


def _draw_identities(rng: random.Random, workload: Workload) -> Workload:
    """Let blocks with equal tokens have different keys. In one workload of eight, some requests have a cache salt. In
    another one of eight, a prompt differs from an earlier prompt only in the first block.
    """
    chance, requests = rng.random(), list(workload.requests)
    if chance < 1 / 8:
        salts = rng.choice((("", "one"), ("", "", "one"), ("one", "two")))
        requests = [dataclasses.replace(asked, salt=rng.choice(salts)) for asked in requests]
    elif chance < 2 / 8 and not workload.meanwhile and len(requests) > 1:
        twin = rng.randrange(1, len(requests))
        room = workload.blocks * BLOCK_TOKENS - requests[twin].max_tokens
        prompt = max((asked.prompt for asked in requests[:twin]), key=len)[:room]
        requests[twin] = dataclasses.replace(requests[twin], prompt=(1 + prompt[0] % (VOCAB - 1), *prompt[1:]))
    return dataclasses.replace(workload, requests=tuple(requests))


def _draw_loss(rng: random.Random, workload: Workload) -> Workload:
    """Lose the device in one workload of twelve; with several ranks, that of rank 0."""
    if rng.random() >= 1 / 12:
        return workload
    kind: EventKind = rng.choice(("device_lost", "copies_lost")) if workload.slots else "device_lost"
    return _with_loss(rng, workload, kind)


def _draw_lost_rank(rng: random.Random, workload: Workload) -> Workload:
    """Lose a rank in one of five workloads with ranks whose device is not lost."""
    if workload.ranks == 1 or rng.random() >= 1 / 5 or "device_loss" in workload.features:
        return workload
    return _with_loss(rng, workload, "rank_lost")


def _draw_failing_rank(rng: random.Random, workload: Workload) -> Workload:
    """Let a step fail on one rank, in one of five workloads with ranks that lose no rank and no device. In a quarter of
    these workloads, the engine closes with requests running, and the step may be in flight by then. Workloads with such
    a step have no logits that are not finite: the toy model does not tell the other ranks of them.
    """
    if workload.ranks == 1 or rng.random() >= 1 / 5 or workload.features & {"rank_loss", "device_loss"}:
        return workload
    first, closes_at = rng.randrange(8 * workload.ranks), workload.closes_at
    if closes_at is None and rng.random() < 1 / 5:
        closes_at = rng.randint(1, max(asked.at for asked in workload.requests) + 3)
    if closes_at is not None and rng.random() < 0.7:
        first = rng.randrange(max(0, closes_at - 2) * workload.ranks, max(1, closes_at) * workload.ranks)
    events = tuple(event for event in workload.events if event.kind not in ("crash", "restart"))
    faults = (fault for fault in workload.faults if (fault.operation, fault.kind) != ("forward", "nan"))
    return dataclasses.replace(
        workload, faults=(*faults, Fault("forward", "lost", first, 0)), events=events, closes_at=closes_at
    )


def _with_loss(rng: random.Random, workload: Workload, kind: EventKind) -> Workload:
    """The workload with the loss of a device or rank. If the engine closes with requests running, the loss is often
    just before, so that the close discovers it.
    """
    at = rng.randint(1, max(asked.at for asked in workload.requests) + 6)
    if workload.closes_at is not None and rng.random() < 0.7:
        at = workload.closes_at
    lost = Event(at if workload.closes_at is None else min(at, workload.closes_at), kind)
    events = (event for event in workload.events if event.kind not in ("crash", "restart"))
    return dataclasses.replace(workload, events=tuple(sorted((*events, lost), key=lambda event: event.at)))


def _draw_damage(rng: random.Random, workload: Workload) -> Workload:
    """Choose the damaged byte of files: the last byte, any byte, a byte of the header, or a byte of the block. Some
    faults damage several files, or exchange two.
    """

    def drawn(fault: Fault) -> Fault:
        if fault.kind not in DAMAGE or rng.random() < 1 / 3:
            return fault
        place = rng.choice((1.0, rng.random(), HEADER_PART * rng.random(), 1.0 - BLOCK_PART * rng.random()))
        kind: FaultKind = "swapped" if rng.random() < 0.4 else fault.kind
        return dataclasses.replace(fault, kind=kind, place=place, entries=rng.choice((1, 1, 2, 5)))

    return dataclasses.replace(workload, faults=tuple(map(drawn, workload.faults)))


def _draw_ranks(rng: random.Random, workload: Workload) -> Workload:
    """Use several ranks in one workload of eight.

    Such a workload has no weight updates and no failing steps, because a failed step ends an engine with ranks. If the
    host tier grows, it mostly does so slot by slot, about as fast as steps complete blocks: so a deferred block is
    stored right after its step, which other ranks may not have ended. These steps are eager and may complete two blocks
    or more, and most of them have no other step in flight.
    """
    if rng.random() >= 1 / 8:
        return workload
    ranks = rng.choice((2, 2, 4))
    if workload.pin_s and rng.random() < 0.8:
        slots = max(workload.slots, 64)
        workload = dataclasses.replace(
            workload,
            pin_s=slots * rng.choice(_SLOT_S),
            slots=slots,
            captured=False,
            chunk_tokens=max(workload.chunk_tokens, 2 * BLOCK_TOKENS),
            asynchronous=workload.asynchronous and rng.random() < 0.25,
        )
    return dataclasses.replace(
        workload,
        ranks=ranks,
        events=tuple(event for event in workload.events if event.kind != "weights"),
        faults=tuple(fault for fault in workload.faults if (fault.operation, fault.kind) != ("forward", "lost")),
    )


def _draw_states(rng: random.Random, workload: Workload) -> Workload:
    """Give the model a recurrent state in three workloads of ten (with drafts: in two of ten). Tiers get more room,
    because a checkpoint takes several blocks. Workloads with drafts and penalties are left out: few of them detect a
    missing penalty, and those must stay as they are.
    """
    if rng.random() >= (0.2 if workload.drafts else 0.3) or (workload.drafts and "sampling" in workload.features):
        return workload
    few = workload.max_running + 1
    return dataclasses.replace(
        workload,
        states=rng.choice((2, few, few + 1, few + 2, 3 * few)),
        slots=workload.slots and workload.slots + rng.choice((3, 6, 12, 24)),
        disk_blocks=workload.disk_blocks and workload.disk_blocks + rng.choice((3, 9, 24)),
        chunk_tokens=rng.choice((4, 8)),
    )


def _draw_ties(rng: random.Random, workload: Workload) -> Workload:
    """In half of the workloads with drafts and penalties, let three tokens tie in every request. Drafts guess them, and
    in an accepted run, only the penalty of a draft before makes the next token another one.
    """
    if not workload.drafts or "penalties" not in workload.features or rng.random() >= 0.5:
        return workload
    ties = tuple((token, _TIE) for token in (1, 2, 3))
    requests = (
        dataclasses.replace(asked, hot=False, penalties=_PENALTIES[2], bias=ties) for asked in workload.requests
    )
    return dataclasses.replace(workload, requests=tuple(requests))


def _draw_returns(rng: random.Random, workload: Workload) -> Workload:
    """Let two short prompts return in turn, in three of ten workloads with states and a host tier. So short a load is
    submitted whole, and a step joins it before its first bytes have arrived: those of the state.
    """
    if not workload.states or not workload.slots or workload.meanwhile or rng.random() >= 0.3:
        return workload
    prompts = [_draw_tokens(rng, rng.randint(5, 12)) for _ in range(2)]
    requests, at = [], 0
    for number, asked in enumerate(workload.requests):
        requests.append(dataclasses.replace(asked, at=at, prompt=prompts[number % 2], abort_at=None))
        at += rng.choice((3, 4, 6, 8))
    return dataclasses.replace(
        workload,
        requests=tuple(requests),
        blocks=max(map(blocks_for, requests)) + rng.choice((0, 1, 2)),
        slots=max(workload.slots, 40),
        states=workload.max_running + rng.choice((1, 1, 2)),
        faults=(*workload.faults, _slow_loads(rng)),
    )


def _draw_slow_loads(rng: random.Random, workload: Workload) -> Workload:
    """Slow down loads in one of eight workloads with a host tier, so that steps wait for them."""
    if not workload.slots or rng.random() >= 1 / 8:
        return workload
    return dataclasses.replace(workload, faults=(*workload.faults, _slow_loads(rng)))


def _slow_loads(rng: random.Random) -> Fault:
    return Fault("load", "slow", 0, rng.choice((1, 1, 2, 3)), rng.choice((0.3, 0.9, 1.5)) * LOAD_DEADLINE_S)


def _draw_border(rng: random.Random, workload: Workload) -> Workload:
    """Put front ends between clients and engine in one workload of six. In these workloads, more clients abort, front
    ends die, and the queue may be full.
    """
    if rng.random() >= 1 / 6:
        return workload
    requests = tuple(
        dataclasses.replace(asked, abort_at=asked.at + _draw_patience(rng, len(asked.prompt), asked.max_tokens))
        if asked.abort_at is None and rng.random() < 0.3
        else asked
        for asked in workload.requests
    )
    last = max(asked.at for asked in requests) + 5
    gone = (Event(rng.randint(1, last), "hang_up") for _ in range(rng.choice((0, 0, 1, 2))))
    return dataclasses.replace(
        workload,
        requests=requests,
        events=tuple(sorted((*workload.events, *gone), key=lambda event: event.at)),
        front_ends=rng.choice((1, 2, 2, 3)),
        waiting=rng.choice((1, 2, 1024, 1024)),
    )


def _draw_workload(seed: int) -> Workload:
    rng = random.Random(f"sidestream workload {seed}")
    storm = rng.random() < 0.4
    requests = _draw_storm(rng) if storm else _draw_visits(rng)
    largest = max(blocks_for(asked) for asked in requests)
    disk_blocks = rng.choice((3, 8, 16, 40)) if rng.random() < 0.6 else 0
    slots = rng.choice((2, 4, 5, 6, 8, 10) if disk_blocks else (0, 2, 4, 6, 10, 16, 24))
    last = max(asked.at for asked in requests) + 10
    workload = Workload(
        seed=seed,
        requests=requests,
        events=_draw_events(rng, [asked.at for asked in requests], disk=disk_blocks > 0),
        faults=_draw_faults(rng, host=slots > 0, disk=disk_blocks > 0),
        blocks=largest + rng.choice((0, 0, 0, 1, 1, 2, 3, 12)),
        slots=slots,
        disk_blocks=disk_blocks,
        max_running=rng.choice((2, 3, 4) if storm else (1, 2, 3)),
        chunk_tokens=rng.choice((4, 8, 8, 16)),
        eos_every=rng.choice((0, 0, 0, 11)),
        asynchronous=rng.random() < 0.9,
        layer_groups=rng.random() < 0.7,
        closes_at=rng.randrange(last) if rng.random() < 0.05 else None,
        flush_s=rng.choice((30.0, 30.0, LOAD_DEADLINE_S, 0.0)),
        captured=rng.random() < 0.25,
        drafts=rng.choice((1, 3, 0, 0, 0, 0)),
        hidden=rng.random() < 0.5,
    )
    if rng.random() < 0.3:
        changed = (*requests, *_draw_change(rng, requests))
        return dataclasses.replace(
            workload, requests=changed, slots=slots and sum(map(blocks_for, changed)), meanwhile=True
        )
    return workload


def _draw_visits(rng: random.Random) -> tuple[Asked, ...]:
    """A few long prompts that are sent again after other requests took their device blocks, so that their KV must come
    from a tier.
    """
    trunk = _draw_tokens(rng, rng.choice((0, 4, 8, 10)))
    prompts = [(*trunk, *_draw_tokens(rng, rng.randint(8, 26)))[:LONGEST_PROMPT] for _ in range(rng.choice((2, 2, 3)))]
    levels = rng.choice(((0,), (0,), (0,), (0, 1)))
    gaps = (0, 0, 1, 1, 2, 9) if rng.random() < 0.3 else (0, 1, 3, 5, 7, 8, 10, 12)
    requests, at = [], 0
    for number in range(rng.randint(4, 6)):
        prompt = prompts[number % len(prompts)] if rng.random() < 0.8 else rng.choice(prompts)
        if rng.random() < 0.3:
            prompt = (*prompt, *_draw_tokens(rng, rng.randint(1, 5)))[:LONGEST_PROMPT]
        asked, gap = _draw_asked(rng, at, prompt, rng.randint(1, 5), levels), rng.choice(gaps)
        if rng.random() < 0.2:  # this request aborts in the middle of a step, and the next request takes its blocks
            gap = rng.randint(1, len(prompt) // 8 + asked.max_tokens)
            asked = dataclasses.replace(asked, abort_at=at + gap)
        requests.append(asked)
        at += gap
    return tuple(requests)


def _draw_change(rng: random.Random, before: Sequence[Asked]) -> tuple[Asked, Asked]:
    """A new request that takes the blocks of all earlier requests. It aborts in the middle of a step, when an earlier
    request is sent again.
    """
    room = max(blocks_for(asked) for asked in before) * BLOCK_TOKENS
    prompt = _draw_tokens(rng, min(room - BLOCK_TOKENS, LONGEST_PROMPT))
    at, stay = max(asked.at for asked in before) + rng.choice((6, 9, 12, 15)), rng.randint(1, 4)
    back = rng.choice(before)
    return Asked(at, prompt, BLOCK_TOKENS, abort_at=at + stay), dataclasses.replace(back, at=at + stay, abort_at=None)


def _draw_storm(rng: random.Random) -> tuple[Asked, ...]:
    """Short prompts with long outputs that arrive almost together. They grow until some are preempted."""
    trunks = [_draw_tokens(rng, rng.randint(2, 8)) for _ in range(rng.choice((1, 2)))]
    levels = rng.choice(((0,), (0,), (0, 1), (0, 1, 2)))
    requests, at = [], 0
    for _ in range(rng.randint(3, 6)):
        trunk = rng.choice(trunks)
        prompt = (
            *trunk[: rng.choice((0, len(trunk), rng.randint(0, len(trunk))))],
            *_draw_tokens(rng, rng.randint(1, 5)),
        )
        requests.append(_draw_asked(rng, at, prompt, rng.randint(5, 10), levels))
        at += rng.choice((0, 0, 0, 1, 1, 2, 6))
    return tuple(requests)


def _draw_asked(rng: random.Random, at: int, prompt: tuple[int, ...], max_tokens: int, levels: Sequence[int]) -> Asked:
    sampling = rng.random() < 0.25
    n = 2 if rng.random() < 0.07 else 1
    priority = rng.choice(levels)
    abort_at = at + _draw_patience(rng, len(prompt), max_tokens) if rng.random() < 0.2 else None
    heat = rng.random()
    penalties = rng.choice(_PENALTIES) if sampling else None
    bias = tuple((token, _TIE) for token in rng.sample(range(1, 9), 3)) if sampling and rng.random() < 0.7 else ()
    harsh = sampling and not bias
    return Asked(
        at=at,
        prompt=prompt,
        max_tokens=max_tokens,
        n=n,
        priority=priority,
        abort_at=abort_at,
        hot=heat < (0.8 if harsh else 0.3 if sampling else 0.1),
        penalties=_HARSH if harsh else penalties,
        bias=bias,
        min_tokens=rng.randint(1, max_tokens) if rng.random() < 0.15 else 0,
        logprobs=rng.choice((0, 2)) if rng.random() < 0.1 else None,
    )


def _draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCAB) for _ in range(count))


def _draw_patience(rng: random.Random, prompt_tokens: int, max_tokens: int) -> int:
    """Number of steps until the client aborts: immediately, during prefill, or near the end."""
    end = prompt_tokens // 8 + max_tokens
    return rng.choice((0, 1, 2, 3, rng.randint(0, end), max(0, end + rng.randint(-2, 3))))


def _draw_events(rng: random.Random, arrivals: Sequence[int], *, disk: bool) -> tuple[Event, ...]:
    kinds: list[EventKind] = []
    if rng.random() < 0.15:
        kinds.append("reset")
    if rng.random() < 0.08:
        kinds.append("weights")
    if disk and rng.random() < 0.25:
        kinds.append(rng.choice(("crash", "crash", "restart")))
    last = max(arrivals) + 10
    events = []
    for kind in kinds:  # just after an arrival, when loads run
        at = rng.choice(arrivals) + rng.randint(0, 3) if rng.random() < 0.6 else rng.randint(3, last)
        events.append(Event(max(1, at), kind))
    return tuple(sorted(events, key=lambda event: event.at))


def _draw_faults(rng: random.Random, *, host: bool, disk: bool) -> tuple[Fault, ...]:
    operations: list[Operation] = []
    if disk:
        operations += rng.choices(("read", "write"), k=rng.choice((0, 1, 1, 2, 3)))
    if host and rng.random() < 0.3:
        operations.append(rng.choice(("store", "load")))
    if rng.random() < 0.05:
        operations.append("forward")
    return tuple(_draw_fault(rng, operation) for operation in operations)


def _draw_fault(rng: random.Random, operation: Operation) -> Fault:
    kind = rng.choice([kind for kind in FAULTS_OF[operation] if kind != "swapped"])  # `_draw_damage` chooses the byte
    seconds = 0.0
    if kind in ("slow", "late"):
        seconds = rng.choice((0.3, 0.9, 1.5, 4.0, 4.0, _ENDLESS)) * LOAD_DEADLINE_S
    if operation == "forward":  # one step fails, mostly a late one, so that loads may be running
        return Fault(operation, kind, rng.randrange(30), 0, seconds)
    every = rng.choice((0, 0, 1, 2, 3))
    if every:  # many operations run one after the other, and must end some time
        seconds = min(seconds, _LONG * LOAD_DEADLINE_S)
    return Fault(operation, kind, rng.choice((0, 0, 0, 1, 2, 4)), every, seconds)
