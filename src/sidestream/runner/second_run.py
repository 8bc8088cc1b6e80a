"""The self-check of a step: a second run of its forward pass, from the same inputs, compared with the first run on the
device. The host waits for nothing; it reads the result with the step's tokens.

Both runs are submitted as one unit to the compute stream, before the step's tokens are sampled. So the second run finds
the request slots as the first run found them, and the step's fence covers both. The second run's logits are sampled;
its KV has replaced the KV of the first run. Equal inputs, shapes and kernels give equal bits, so a difference means
that one run read other bytes: KV that a load had not brought yet, memory that another owner wrote, or a computing
error. On the compute stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sidestream.errors import InvariantError
from sidestream.runner.forward import ForwardOutput
from sidestream.runner.state import DecodeState
from sidestream.runner.step_inputs import InputSizes, StepInputs
from sidestream.types import BatchPlan
from sidestream_kv.device.base import Stream

Run = Callable[[], tuple[StepInputs, ForwardOutput]]
_BITS = {2: torch.int16, 4: torch.int32}


class Differences(NamedTuple):
    """The results of both runs, compared. For B rows and N rows of logits.

    kv       bool `[B]`: the model's KV of the row's last token differs, in some layer. This KV depends on all KV that
             the row read and on all tokens that it computed, so it stands for the whole row
    logits   bool `[N]`: the logits differ
    times    int64 `[2]`: start and end of the second run, in ns of the device's clock
    """

    kv: Tensor
    logits: Tensor
    times: Tensor


class SecondRun:
    """Runs forward passes twice.

    kv           the block pool, `[blocks, layers, 2, block_tokens, kv_heads, head_dim]`
    num_layers   number of the pool's first layers that hold the model's KV; the proposer's layers come after them
    declare      declares the second run's accesses to memory to the order checker; called between the two runs
    """

    def __init__(
        self,
        kv: Tensor,
        state: DecodeState,
        stream: Stream,
        *,
        num_layers: int,
        declare: Callable[[BatchPlan], None],
    ) -> None:
        self._kv = kv[:, :num_layers]
        self._state = state
        self._stream = stream
        self._declare = declare

    def compare(self, run: Run, batch: BatchPlan) -> tuple[StepInputs, ForwardOutput, Differences]:
        """Run a forward pass twice. Returns inputs and output of the second run, and its differences from the first.
        Called inside work of the compute stream. Raises the error of either run.
        """
        hidden = self._state.hidden
        before = hidden.clone()
        kv, logits = self._digests(batch, *run())
        times = torch.empty(2, dtype=torch.int64, device=kv.device)
        self._stream.stamp(times[:1])
        self._declare(batch)
        hidden.copy_(before)  # rule: second-run-begins-with-the-hidden-states-of-the-first
        inputs, output = run()
        second = self._digests(batch, inputs, output)
        differences = Differences(kv != second[0], logits != second[1], times)
        self._stream.stamp(times[1:])
        return inputs, output, differences

    def _digests(self, batch: BatchPlan, inputs: StepInputs, output: ForwardOutput) -> tuple[Tensor, Tensor]:
        """Digests of the KV of each row's last token, int64 `[B]`, and of each row of logits, int64 `[N]`."""
        if output.slot_mapping is None:
            raise InvariantError("self-check needs at least one row")
        padded_decodes, decodes = inputs.sizes.decodes, batch.num_decodes
        ends = inputs.cu_seqlens_q[1:]
        ends = torch.cat([ends[:decodes], ends[padded_decodes : padded_decodes + batch.num_rows - decodes]])
        blocks, offsets = _block_and_offset(output.slot_mapping[ends - 1].clamp(min=0), self._kv.shape[3])
        return _digest(self._kv[blocks, :, :, offsets]), _digest(output.logits[: InputSizes.of(batch).logits])


def _block_and_offset(slots: Tensor, block_tokens: int) -> tuple[Tensor, Tensor]:
    """Block id, and offset in the block, of each slot of the slot mapping."""
    return slots.div(block_tokens, rounding_mode="floor"), slots % block_tokens


def _digest(values: Tensor) -> Tensor:
    """The sum of the bit patterns of each row, int64 `[rows]`. Reads the values once, and makes no copy of them."""
    return values.flatten(1).view(_BITS[values.element_size()]).sum(-1, dtype=torch.int64)
