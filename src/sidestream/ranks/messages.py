"""The messages between rank 0 and the other ranks, in the frames of `sidestream.processes.frames`. Values only.

A decode step of 32 requests takes about a kilobyte: of block tables, only the blocks added since the slot's last step
are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sidestream.errors import InvariantError
from sidestream.ranks.fences import FenceName, names_of
from sidestream.types import BatchPlan, RowColumns, RowStart, StateIds
from sidestream_kv.types import Fence, LayerGates


class Begin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message to a rank's process. `directory`: where the ranks' group meets. `log_json`: log in JSON."""

    version: str
    model: str
    config: dict[str, Any]
    rank: int
    size: int
    directory: str
    log_level: int
    log_json: bool


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step to launch. The columns have the meaning of `RowPlan`'s fields.

    number      number of the step, from 1
    tokens      of the rows behind the decode rows
    tables      `(row, kept, added)`: the row's block table is the first `kept` blocks of its slot's last one, and
                `added`. A row that is not listed has its slot's last table
    window_tables  the same of `RowPlan.window_table`
    begins      `(row, start)` of the rows whose slots begin
    states      of each row, if the model keeps recurrent states
    after       fences that the step waits for
    gates       fences that each layer waits for; empty: none
    self_check  run the forward pass twice, and compare both runs
    """

    number: int
    speculates: bool
    slots: tuple[int, ...]
    min_starts: tuple[int, ...]
    stops: tuple[int, ...]
    samples: tuple[bool, ...]
    min_output_indices: tuple[int, ...]
    drafts: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    tables: tuple[tuple[int, int, tuple[int, ...]], ...]
    window_tables: tuple[tuple[int, int, tuple[int, ...]], ...]
    begins: tuple[tuple[int, RowStart], ...]
    states: tuple[StateIds | None, ...]
    after: tuple[FenceName, ...]
    gates: tuple[tuple[FenceName, ...], ...]
    self_check: bool = False


class Copy(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A copy between the blocks of the device and the slots of host memory.

    sources, targets   int64 byte offsets, little-endian
    size               bytes of each segment
    after              fences that the copy waits for on the device
    """

    stream: str
    number: int
    label: str
    to_host: bool
    sources: bytes
    targets: bytes
    size: int
    after: tuple[FenceName, ...]


class TierWrite(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The write of a host slot to a persistent tier, as the entry `key` and `serial`. `victim` is deleted before."""

    stream: str
    number: int
    tier: str
    slot: int
    key: bytes
    serial: int
    victim: tuple[bytes, int] | None


class TierRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The read of an entry of a persistent tier into a host slot. `after`: fences of the slot's earlier uses."""

    stream: str
    number: int
    tier: str
    slot: int
    key: bytes
    serial: int
    after: tuple[FenceName, ...]


class AdapterRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read the LoRA adapter in a directory, and keep it for `AdapterPut`. `digest`: of rank 0's adapter."""

    number: int
    path: str
    digest: str


class AdapterPut(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Put the adapter that was read last into a slot, between the steps sent before and those sent after it."""

    number: int
    slot: int


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The last message: finish the submitted work, and end."""


class Arrived(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank's process runs, and joins the group next."""


class Serving(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank has loaded its share, and follows from now on."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank cannot start. `kind`: the error's class in `sidestream.errors`."""

    kind: str
    text: str


class Passed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The work of each of these streams up to its number is done, and so is all work that it waited for."""

    names: tuple[FenceName, ...]


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This work failed. `kind`: the error's class in `sidestream.errors`."""

    stream: str
    number: int
    kind: str
    text: str


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """So many bytes of the rank's host memory can be copied now. `final`: no more will come."""

    num_bytes: int
    final: bool


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank is alive, and has nothing else to report."""


ToRank = Begin | Step | Copy | TierWrite | TierRead | AdapterRead | AdapterPut | End
ToLeader = Arrived | Serving | Refused | Passed | Failed | Ready | Beat


class StepEncoder:
    """Makes the messages of steps. Remembers each slot's block table, as the ranks do. Engine thread only."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[int, ...]] = {}
        self._window_tables: dict[int, tuple[int, ...]] = {}
        self._number = 0

    def encode(self, batch: BatchPlan, after: Sequence[Fence], gates: LayerGates) -> Step:
        """The message of the next step."""
        self._number += 1
        columns = batch.columns
        return Step(
            number=self._number,
            speculates=batch.speculates,
            slots=columns.slot,
            min_starts=columns.min_start,
            stops=columns.stop,
            samples=columns.samples,
            min_output_indices=columns.min_output_index,
            drafts=columns.drafts,
            tokens=columns.tokens[batch.num_decodes :],  # type: ignore[arg-type]  # only decode rows have None
            tables=_changed(self._tables, columns.slot, columns.block_table),
            window_tables=_changed(self._window_tables, columns.slot, columns.window_table),
            begins=_begins_of(columns) if any(columns.begin) else (),
            states=columns.states if columns.states and columns.states[0] is not None else (),
            after=names_of(after) if after else (),
            gates=tuple(map(names_of, gates.by_layer)) if gates.by_layer else (),
            self_check=batch.self_check,
        )


def _changed(
    held_tables: dict[int, tuple[int, ...]], slots: Sequence[int], tables: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """The rows' tables that differ from those in `held_tables`, by slot, which it updates."""
    changed = []
    for index, (slot, table) in enumerate(zip(slots, tables, strict=True)):
        held = held_tables.get(slot, ())
        if table is not held:
            # rule: block-table-of-every-rank-belongs-to-the-slots-owner
            kept = len(held) if table[: len(held)] == held else 0
            changed.append((index, kept, table[kept:]))
            held_tables[slot] = table
    return tuple(changed)


def _begins_of(columns: RowColumns) -> tuple[tuple[int, RowStart], ...]:
    return tuple((index, begin) for index, begin in enumerate(columns.begin) if begin)


class StepDecoder:
    """Makes plans of the messages of steps, in their order."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[int, ...]] = {}
        self._window_tables: dict[int, tuple[int, ...]] = {}
        self._number = 0

    def decode(self, step: Step) -> BatchPlan:
        """The plan of the next step. Raises InvariantError if a step is missing, or came twice, or if its parts do not
        fit each other.
        """
        if step.number != self._number + 1:  # rule: step-is-the-next-one
            raise InvariantError(f"step {step.number} came after step {self._number}: each step comes once, in order")
        self._number = step.number
        slots, tables = step.slots, self._tables
        count = len(slots)
        _take_changes(step, step.tables, tables)
        _take_changes(step, step.window_tables, self._window_tables)
        try:
            block_tables = tuple([tables[slot] for slot in slots])
        except KeyError as error:
            raise InvariantError(f"step {step.number} has no block table for slot {error}") from None
        nones: tuple[None, ...] = (None,) * count
        begin: tuple[RowStart | None, ...] = nones
        if step.begins:
            begins = dict(step.begins)  # rule: slot-begins-on-every-rank
            begin = tuple([begins.pop(index, None) for index in range(count)])
            if begins:
                raise InvariantError(f"step {step.number} begins rows {sorted(begins)} of {count}")
        columns = RowColumns(
            request_id=slots,  # only rank 0 knows requests
            slot=slots,
            epoch=(0,) * count,
            min_start=step.min_starts,
            stop=step.stops,
            tokens=nones[len(step.tokens) :] + step.tokens,
            block_table=block_tables,
            samples=step.samples,
            min_output_index=step.min_output_indices,
            begin=begin,
            drafts=step.drafts,
            states=step.states or nones,
            window_table=tuple([self._window_tables.get(slot, ()) for slot in slots]),
        )
        if set(map(len, columns)) != {count}:
            raise InvariantError(f"step {step.number} of {count} rows has columns of lengths {[*map(len, columns)]}")
        # rule: second-run-is-on-every-rank
        return BatchPlan.of_columns(columns, step.speculates, self_check=step.self_check)


def _take_changes(
    step: Step, changes: Sequence[tuple[int, int, tuple[int, ...]]], tables: dict[int, tuple[int, ...]]
) -> None:
    """Apply the changes of tables that came with the step."""
    for index, kept, added in changes:
        if not 0 <= index < len(step.slots):
            raise InvariantError(f"step {step.number} has a block table for row {index} of {len(step.slots)}")
        slot = step.slots[index]
        held = tables.get(slot, ())
        if not 0 <= kept <= len(held):
            raise InvariantError(f"step {step.number} keeps {kept} of {len(held)} blocks of slot {slot}")
        tables[slot] = (*held[:kept], *added)
