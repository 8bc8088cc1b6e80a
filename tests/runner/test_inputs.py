"""A plan as tensors: each number where it belongs, whatever the rows were before."""

from __future__ import annotations

import random

import pytest
import torch

from sidestream.kv.layout import KVLayout
from sidestream.runner.inputs import Packer, StepInputs
from sidestream.runner.upload import Uploads
from sidestream.types import BatchPlan, RowPlan

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")


def row(
    number: int,
    start: int,
    stop: int,
    blocks: tuple[int, ...],
    *,
    tokens: tuple[int, ...] | None = None,
    samples: bool = True,
) -> RowPlan:
    return RowPlan(number + 100, number, 0, start, stop, tokens, blocks, samples, 0)


def expected(batch: BatchPlan) -> dict[str, list[int] | list[list[int]]]:
    """Number by number."""
    width = max(len(each.block_ids) for each in batch.rows)
    said: dict[str, list[int]] = {name: [] for name in ("tokens", "from_state", "positions", "slots", "logit_rows")}
    starts = [0]
    for each in batch.rows:
        if each.tokens is None:
            said["from_state"].append(starts[-1])
        for index, position in enumerate(range(each.min_start, each.stop)):
            said["tokens"].append(0 if each.tokens is None else each.tokens[index])
            said["positions"].append(position)
            said["slots"].append(each.block_ids[position // 4] * 4 + position % 4)
        starts.append(starts[-1] + each.stop - each.min_start)
        if each.samples:
            said["logit_rows"].append(starts[-1] - 1)
    tables = [[*each.block_ids, *[0] * (width - len(each.block_ids))] for each in batch.rows]
    return {
        **said,
        "cu_seqlens_q_dev": starts,
        "kv_lens_dev": [each.stop for each in batch.rows],
        "block_tables": tables,
    }


def check(packer: Packer, *rows: RowPlan) -> StepInputs:
    batch = BatchPlan(rows)
    inputs = packer.pack(batch)
    for name, wanted in expected(batch).items():
        tensor: torch.Tensor = getattr(inputs, name)
        assert (tensor.tolist(), tensor.dtype) == (wanted, torch.int64), name
    assert inputs.block_tables.is_contiguous()
    assert inputs.cu_seqlens_q == tuple(inputs.cu_seqlens_q_dev.tolist())
    assert inputs.kv_lens == tuple(inputs.kv_lens_dev.tolist())
    assert inputs.num_decode == len(inputs.state_rows) == sum(each.tokens is None for each in rows)
    assert inputs.state_rows == tuple(each.row for each in rows if each.tokens is None)
    return inputs


@pytest.fixture
def packer() -> Packer:
    return Packer(8, LAYOUT)


def test_rows_that_decode_and_chunks_are_packed_one_after_another(packer: Packer) -> None:
    check(
        packer,
        row(3, 5, 6, (7, 2)),
        row(0, 8, 9, (1, 4, 5)),
        row(5, 2, 7, (9, 8), tokens=(11, 12, 13, 14, 15)),
        row(1, 0, 4, (6,), tokens=(1, 2, 3, 4), samples=False),
    )


def test_nothing_is_left_of_a_rows_former_owner(packer: Packer) -> None:  # H16
    check(packer, row(2, 15, 16, (5, 6, 7, 8)), row(1, 3, 4, (1,)))
    check(packer, row(2, 0, 2, (9,), tokens=(3, 4)), row(1, 11, 12, (1, 2, 3)))  # shorter, and others
    check(
        packer, row(2, 4, 5, (5, 6)), row(1, 11, 12, (1, 4, 3))
    )  # begins as the one before last did; one in the middle is another


def test_table_grows_with_its_row_and_past_what_there_was_room_for(packer: Packer) -> None:
    blocks = tuple(range(1, 300))
    first = check(packer, row(0, 7, 8, blocks[:2]))
    kept = first.block_tables.tolist()
    for count in (2, 3, 63, 64, 65, 200, 299):
        check(packer, row(0, 4 * count - 1, 4 * count, blocks[:count]))
    assert first.block_tables.tolist() == kept  # what was packed stays as it was


def test_any_batch(packer: Packer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        rows = []
        for number in sorted(rng.sample(range(8), rng.randint(1, 8)), key=lambda n: n % 2):
            start = rng.randint(0, 30)
            stop = start + (1 if number % 2 == 0 else rng.randint(1, 9))
            blocks = tuple(rng.sample(range(50), -(-stop // 4)))
            tokens = None if number % 2 == 0 else tuple(rng.randint(1, 99) for _ in range(start, stop))
            rows.append(row(number, start, stop, blocks, tokens=tokens, samples=tokens is None or rng.random() < 0.5))
        check(packer, *rows)


def test_what_was_brought_is_what_was_packed_and_positions_begin_their_memory(
    packer: Packer,
) -> None:  # compiled layers are handed them
    packed = packer.pack(BatchPlan((row(0, 4, 5, (3, 1)), row(1, 1, 4, (2,), tokens=(7, 8, 9)))))
    staging = torch.zeros(1, 1024, dtype=torch.uint8)
    uploads = Uploads(staging=staging, mapped=staging.view(torch.uint8))
    uploads.open(0)
    brought = packed.brought(uploads)
    for name in (
        "tokens",
        "from_state",
        "positions",
        "slots",
        "block_tables",
        "cu_seqlens_q_dev",
        "kv_lens_dev",
        "logit_rows",
    ):
        assert getattr(brought, name).equal(getattr(packed, name)), name
    assert brought.slots.storage_offset() > 0  # all by one kernel
    assert brought.positions.storage_offset() == 0
