"""A mailbox entry holds the tokens of its own step, whatever padding is sampled after it."""

from __future__ import annotations

import pytest
import torch

from proof.faults import Hold
from sidestream.errors import InvariantError
from sidestream.runner.executor import LaunchedStep
from sidestream.runner.mailbox import Mailbox, MailboxEntry
from sidestream.runner.prompt_logprobs import PromptPart, prompt_logprobs
from sidestream.runner.sampler import SamplerOutput
from sidestream.types import BatchPlan, RowPlan
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.types import Fence

ROWS, DRAFTS, PADDED = 3, 2, 40


def row(number: int, drafts: int) -> RowPlan:
    return RowPlan(number, number, 0, 5, 6 + drafts, None, (1,), True, 1)._replace(drafts=drafts)


@pytest.mark.parametrize("by_device", [False, True])
def test_tokens_of_padded_rows_change_no_mailbox_entry(by_device: bool) -> None:
    device = CpuDevice()
    try:
        box, stream = Mailbox(2, ROWS, 50, device, max_drafts=DRAFTS), device.stream("compute")
        places = ROWS * (1 + DRAFTS)

        def write(entry: MailboxEntry, first: int) -> Fence:
            tokens = torch.full((PADDED,), 999)
            tokens[:places] = torch.arange(first, first + places)
            counts = torch.full((PADDED,), 99)
            counts[:ROWS] = torch.tensor([1, 2, 3])
            finite = torch.zeros(PADDED, dtype=torch.bool)
            finite[:places] = True
            start = torch.tensor([entry.start]) if by_device else entry.start
            times = torch.tensor([1, 2, 4])
            return stream.submit(
                lambda: box.write(start, SamplerOutput(tokens, finite, None), stream, counts=counts, times=times)
            )

        entries = [box.take_entry(), box.take_entry()]
        fences = [write(entries[1], 100), write(entries[0], 0)]
        for fence in fences:
            device.wait_host(fence, reason="test")
        for entry, first in zip(entries, (0, 100), strict=True):
            delivered = box.read(entry, (DRAFTS,) * ROWS, (), fences[1])
            assert [result.token_ids for result in delivered.rows] == [
                (first,),
                (first + 3, first + 4),
                (first + 6, first + 7, first + 8),
            ]
            assert all(result.finite for result in delivered.rows)
            assert delivered.verify_s == pytest.approx(2e-9)
    finally:
        device.close()


def test_the_mailbox_entry_of_a_dropped_step_is_reused_after_its_fence() -> None:
    device = CpuDevice()
    try:
        box, compute = Mailbox(1, ROWS, 50, device), device.stream("compute")
        with Hold(compute):
            fence = compute.submit(lambda: None)
            LaunchedStep(BatchPlan(()), fence, box.take_entry(), False, (), 0.0, box).drop()
            assert box.take_entry().lease.after == (fence,)
    finally:
        device.close()


def test_reading_results_before_their_step_is_done_raises() -> None:
    device = CpuDevice()
    try:
        box, compute = Mailbox(1, ROWS, 50, device), device.stream("compute")
        with Hold(compute):
            fence = compute.submit(lambda: None)
            with pytest.raises(InvariantError, match="the mailbox was read before"):
                box.read(box.take_entry(), [0], (), fence)
    finally:
        device.close()


def test_log_probabilities_of_prompts_are_read_after_the_fence() -> None:
    device = CpuDevice()
    try:
        box, stream = Mailbox(1, ROWS, 50, device, prompt_logits=4), device.stream("compute")
        entry, parts = box.take_entry(), [PromptPart(7, 0, (3, 5), 1), PromptPart(8, 2, (9,), 2)]
        logits = torch.zeros(3, 50)
        logits[0, 3], logits[1, 6], logits[1, 5], logits[2, 9], logits[2, 0] = 9, 8, 7, 6, 5
        hold = Hold(stream)
        values = prompt_logprobs(logits, torch.tensor([3, 5, 9]))
        fence = stream.submit(lambda: box.write_prompt(entry.start, values, stream))
        with pytest.raises(InvariantError, match="log-probabilities of a prompt were read before"):
            list(box.read_prompt(entry, parts, fence))
        hold.release()
        device.wait_host(fence, reason="test")
        (first, ours), (second, theirs) = box.read_prompt(entry, parts, fence)
        assert (first, second) == (parts[0], parts[1])
        assert [(one.token_id, one.rank, [token for token, _ in one.top]) for one in (*ours, *theirs)] == [
            (3, 1, [3]),
            (5, 2, [6]),
            (9, 1, [9, 0]),
        ]
        assert ours[0].logprob == ours[0].top[0][1] == pytest.approx(float(logits[0].log_softmax(-1)[3]))
    finally:
        device.close()
