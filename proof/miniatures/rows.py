"""Bugs with races between a step and the next step: rows of a batch, their device state and their inputs. Each function
runs one bug on a simulated device, with or without its protection (fix).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from proof.miniatures.stage import Blocks, Miniature, Outcome, copy, finish
from proof.toy import ToyDraftHead, ToyModel
from sidestream_order.sim import SimDevice, SimFence

_PROMPT = (3, 1, 4, 1)
_ROUNDS = 6


def token_read_when_the_step_was_counted(device: SimDevice, protected: bool) -> Outcome:
    """An asynchronous scheduler counts a step as computed when it is launched, and reads the mailbox too early."""
    mailbox, compute = Blocks(device, "mailbox", 1), device.stream("compute")
    entry = mailbox.pool.take(1)
    launched = mailbox.write(compute, entry.ids, 42, "step")
    computed_steps = 1
    if protected:
        finish(device, launched)
    found = mailbox.seen(entry.ids) if computed_steps == 1 else ()
    entry.release(after=(launched,))
    return Outcome(found, (42, 42))


def row_reused_under_its_last_step(device: SimDevice, protected: bool) -> Outcome:
    """A request has ended, but a step that was launched earlier still writes its row, and overwrites the new owner's
    first token.
    """
    rows = Blocks(device, "rows", 1)
    compute, inputs, found = device.stream("compute"), device.stream("inputs"), list[int]()
    row = rows.pool.take(1)
    overrun = rows.write(compute, row.ids, 5, "step too many")
    row.release(after=(overrun,))
    fresh = rows.pool.take(1)
    for fence in fresh.after if protected else ():
        inputs.wait(fence)
    begun = rows.write(inputs, fresh.ids, 9, "first token of the new owner")
    compute.wait(begun)
    launched = rows.read(compute, fresh.ids, found, "first step of the new owner")
    finish(device, launched)
    fresh.release(after=(begun, launched))
    return Outcome(tuple(found), (9, 9))


def released_before_the_second_run(device: SimDevice, protected: bool) -> Outcome:
    """A step runs twice, to compare both runs, and its block is released after the first run. The second run overwrites
    what a load has brought for the new owner.
    """
    kv, compute, loads, found = Blocks(device, "kv", 1), device.stream("compute"), device.stream("load"), list[int]()
    block = kv.pool.take(1)
    first = kv.write(compute, block.ids, 5, "step")
    second = kv.write(compute, block.ids, 5, "second run")
    block.release(after=(second if protected else first,))
    fresh = kv.pool.take(1)
    for fence in fresh.after:
        assert isinstance(fence, SimFence)
        loads.wait(fence)
    loaded = kv.write(loads, fresh.ids, 9, "load")
    compute.wait(loaded)
    launched = kv.read(compute, fresh.ids, found, "step of the new owner")
    finish(device, launched)
    fresh.release(after=(second, loaded, launched))
    return Outcome(tuple(found), (9, 9))


def staging_refilled_under_a_copy(device: SimDevice, protected: bool) -> Outcome:
    """The host refills the only staging buffer for the next step while the copy for this step still reads it."""
    staging, on_device = Blocks(device, "staging", 2), Blocks(device, "inputs", 1)
    inputs, compute, found = device.stream("inputs"), device.stream("compute"), list[int]()
    target, the_buffer = on_device.pool.take(1), staging.pool.take(1)
    for step in range(4):
        buffer = staging.pool.take(1) if protected else the_buffer
        finish(device, *(fence for fence in buffer.after if isinstance(fence, SimFence)))
        staging.put(buffer.ids, step)
        copied = copy(inputs, staging, buffer.ids, on_device, target.ids, "inputs")
        compute.wait(copied)
        launched = on_device.read(compute, target.ids, found, "step")
        inputs.wait(launched)
        if protected:
            buffer.release(after=(copied,))
    finish(device, launched)
    the_buffer.release()
    target.release()
    return Outcome(tuple(found), (0, 0, 1, 1, 2, 2, 3, 3))


def padded_row_of_a_graph(device: SimDevice, protected: bool) -> Outcome:
    """A graph for two rows runs a batch of one row. The padding row still refers to a block of an earlier batch, and
    this block has a new owner.
    """
    kv, table = Blocks(device, "kv", 3), Blocks(device, "table", 1)
    compute, found = device.stream("compute"), list[int]()
    nowhere, entries, kept, left = kv.pool.take(1), table.pool.take(1), kv.pool.take(1), kv.pool.take(1)

    def decode() -> None:
        for block in table.numbers[0].tolist():
            compute.touch(kv.writes([block]))
            kv.numbers[block] = 7

    def fill(block_ids: list[int]) -> None:
        table.numbers[0, : len(block_ids)] = block_ids
        if protected:
            table.numbers[0, len(block_ids) :] = nowhere.ids

    def build() -> None:
        compute.submit(decode, table.reads(entries.ids), label="decode")

    graph = compute.capture(build)
    compute.submit(partial(fill, [*kept.ids, *left.ids]), table.writes(entries.ids), label="fill two rows")
    launched = compute.replay(graph)
    left.release(after=(launched,))
    fresh = kv.pool.take(1)
    kv.write(compute, fresh.ids, 9, "prefill of the new owner")
    compute.submit(partial(fill, [*kept.ids]), table.writes(entries.ids), label="fill one row")
    compute.replay(graph)
    launched = kv.read(compute, fresh.ids, found, "step of the new owner")
    finish(device, launched)
    for lease in (nowhere, entries, kept, fresh):
        lease.release()
    return Outcome(tuple(found), (9, 9))


class _Speculation:
    """A row with a hidden value on the device. Every step drafts with this value, verifies, and computes the next
    value.
    """

    def __init__(self, device: SimDevice) -> None:
        self.head = ToyDraftHead(ToyModel())
        self.context = list(_PROMPT)
        self.accept_lengths: list[int] = []
        self.state = Blocks(device, "row state", 1)
        self.row = self.state.pool.take(1)
        self.state.put(self.row.ids, self.head.hidden(_PROMPT))

    @property
    def on_device(self) -> int:
        """The hidden value in the row's state."""
        return int(self.state.numbers[0, 0])

    def round(self, hidden: int) -> int:
        """Draft and verify; returns the next hidden value. Called inside work of the compute stream."""
        drafts = self.head.drafts(self.context, hidden)
        self.accept_lengths.append(self.head.accept_length(self.context, drafts))
        self.context += self.head.verify(self.context, drafts)
        return self.head.hidden(self.context)

    def outcome(self) -> Outcome:
        """The tokens (as many as every run yields), and all accept lengths."""
        reference = self.head.expected(_PROMPT, _ROUNDS)
        text = tuple(self.context[len(_PROMPT) :])
        return Outcome(text[:_ROUNDS], reference.tokens[:_ROUNDS], tuple(self.accept_lengths), reference.accept_lengths)


def state_published_by_a_late_worker(device: SimDevice, protected: bool) -> Outcome:
    """A bookkeeping worker publishes the state that the next step drafts from. The next step does not wait, and drafts
    from older values.

    The text stays right, because drafts are verified. In a public engine, the accept length fell from 4.20 to 2.42.
    """
    loop, compute, worker = _Speculation(device), device.stream("compute"), device.stream("worker")
    state, row, results = loop.state, loop.row, list[int]()

    def publish(hidden: int) -> None:
        state.numbers[0] = hidden

    def launch(step: int) -> tuple[SimFence, ...]:
        if protected:
            return (compute.submit(lambda: publish(loop.round(loop.on_device)), state.writes(row.ids), label="step"),)
        launched = compute.submit(
            lambda: results.append(loop.round(loop.on_device)), state.reads(row.ids), label="step"
        )
        worker.wait(launched)
        return launched, worker.submit(lambda: publish(results[step]), state.writes(row.ids), label="bookkeeping")

    for step in range(_ROUNDS):
        last = launch(step)
    finish(device, *last)
    row.release(after=last)
    return loop.outcome()


def flag_read_twice(device: SimDevice, protected: bool) -> Outcome:
    """A flag says that the row's state is defined. Between the check of the flag and the use of the state, a worker
    clears the state.

    If there is no state on the device, the worker's copy on the host is used, which is written before the state is
    cleared.
    """
    loop, compute, worker = _Speculation(device), device.stream("compute"), device.stream("worker")
    defined, copies = {"row": 0}, dict[int, int]()

    def source(step: int) -> Callable[[], int]:
        epoch = defined.get("row")
        device.sleep(1e-5)  # the rest of the batch takes time
        if epoch is not None and not protected and "row" not in defined:
            return lambda: 0  # stands for an undefined tensor
        return (lambda: loop.on_device) if epoch is not None else (lambda: copies[step])

    def fly(step: int, hidden: Callable[[], int]) -> None:
        copies[step + 1] = loop.round(hidden())
        loop.state.numbers[0] = copies[step + 1]

    def clear(epoch: int) -> None:
        if defined.get("row") == epoch:
            del defined["row"]

    for step in range(_ROUNDS):
        hidden = source(step)
        launched = compute.submit(partial(fly, step, hidden), loop.state.writes(loop.row.ids), label="step")
        defined["row"] = step
        worker.wait(launched)
        worker.submit(partial(clear, step), label="bookkeeping")
    finish(device, launched)
    loop.row.release(after=(launched,))
    return loop.outcome()


def state_kept_as_a_view(device: SimDevice, protected: bool) -> Outcome:
    """A captured step writes its result to a fixed buffer of the graph. A row's state is a view of that buffer, and the
    next step, for another row, overwrites it.
    """
    loop, compute = _Speculation(device), device.stream("compute")
    left = Blocks(device, "what a graph leaves", 1)
    place = left.pool.take(1)
    state, row = loop.state, loop.row

    def fly(first: bool) -> None:
        hidden = loop.on_device if protected or first else int(left.numbers[0, 0])
        left.numbers[0] = loop.round(hidden)
        if protected:
            state.numbers[0] = left.numbers[0]

    for step in range(_ROUNDS):
        compute.submit(
            partial(fly, not step), lambda: [*left.writes(place.ids)(), *state.writes(row.ids)()], label="step"
        )
        launched = left.write(compute, place.ids, 17, "step of another row")
    finish(device, launched)
    row.release(after=(launched,))
    place.release(after=(launched,))
    return loop.outcome()


ROWS = (
    Miniature(
        "token read when the step was counted",
        "H12",
        "Only a fence proves that a step was computed.",
        token_read_when_the_step_was_counted,
    ),
    Miniature(
        "row reused under its last step",
        "H16",
        "A row is released after its last step.",
        row_reused_under_its_last_step,
    ),
    Miniature(
        "released before the second run",
        "H3",
        "Both runs of a step are one work with one fence.",
        released_before_the_second_run,
    ),
    Miniature(
        "staging refilled under a copy",
        "H17",
        "Staging is leased, and released after its copy.",
        staging_refilled_under_a_copy,
    ),
    Miniature(
        "padded row of a graph",
        "H18",
        "Each step points padding rows at a block without an owner.",
        padded_row_of_a_graph,
    ),
    Miniature(
        "state published by a late worker",
        "H19",
        "The step itself writes the state that the next one reads.",
        state_published_by_a_late_worker,
    ),
    Miniature("flag read twice", "H20", "The flag is read once.", flag_read_twice),
    Miniature(
        "state kept as a view",
        "H19",
        "The step copies its result into the row's own state.",
        state_kept_as_a_view,
    ),
)
