"""Decode state on the device, by request slot: the last token, the blocks, the sampling options and the token counts of
penalties. With drafts, also all tokens of the slot and their number, because the host learns these only one step later.
And the uploads that bring a step's integers to the device.

Knows slots and tokens, never requests or logits. Only work on the compute stream uses the state, so a slot's reset, its
sampling and its next reset are ordered without a lock. The host never reads it.

Uploads do not use the copy engine, where even a small copy waits while loads keep it busy: the 2 KB of a step took 40
ms during a load of 2 GiB. So on a GPU, the host writes the integers to mapped pinned memory, and a kernel copies them
to device memory. Each step has its own region of the mapped memory until its results have been read (hazard H17 in
docs/glossary.md). On a CPU there is nothing to copy. On the simulated device, a step reads its inputs from its region,
as on a GPU, so that tests notice a region that is overwritten too early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.errors import InvariantError
from sidestream.ops.interface import SlotTensors
from sidestream.ops.rules import COLUMNS, SamplingTensors, sampling_row
from sidestream.types import Forced, RowStart, SamplingSpec
from sidestream_kv.device.base import Device
from sidestream_kv.device.kinds import CPU, SIM, on_host
from sidestream_kv.types import Access

MEMORY = "uploads"
_REGION_BYTES = 1 << 20
_SIM_REGION_BYTES = 1 << 12
_ALIGNMENT = 16
_NUMBER_BYTES = 8
# The first bytes of a region hold the inputs of a captured step.
_INPUT_BYTES = 1 << 19


class Uploads:
    """The uploads of the step that is being enqueued. Single writer: the thread that enqueues the step.

    staging       uint8 `[regions, bytes]` on the host
    mapped        the same memory under its address on the device. On a CPU, `staging` and `mapped` are None
    input_bytes   number of bytes at the start of each region that `write` uses
    """

    def __init__(
        self,
        device: torch.device | str = CPU,
        *,
        staging: Tensor | None = None,
        mapped: Tensor | None = None,
        input_bytes: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._on_host = on_host(self._device)
        self._staging = staging
        self._mapped = mapped
        # For each region, its int64 view at the host address, for `write`, and at the device address, for `fetches`.
        self._numbers: list[tuple[npt.NDArray[np.int64], Tensor]] = []
        if staging is not None and mapped is not None:
            pairs = zip(staging, mapped, strict=True)
            self._numbers = [(ours.numpy().view(np.int64), theirs.view(torch.int64)) for ours, theirs in pairs]
        self._input_bytes = input_bytes
        self._region, self._used = 0, input_bytes
        self._empty: dict[torch.dtype, Tensor] = {}

    @classmethod
    def of(cls, device: Device, *, num_regions: int) -> Uploads:
        """Make the uploads of a device. `num_regions`: largest number of launched steps whose results are unread."""
        if device.kind == SIM:
            return SimUploads(device, num_regions)
        if on_host(device.torch_device):
            return cls()
        memory = device.allocate_host(MEMORY, num_regions * _REGION_BYTES)
        return cls(
            device.torch_device,
            staging=memory.data.view(num_regions, _REGION_BYTES),
            mapped=device.mapped(memory).view(num_regions, _REGION_BYTES),
            input_bytes=_INPUT_BYTES,
        )

    def open(self, region: int) -> None:
        """Use this region for the next step. The results of the region's last step must have been read."""
        self._region, self._used = region, self._input_bytes

    def hold(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[Access]]:
        """Put the inputs of the next step where the step will read them, and return them with the accesses of these
        reads. On real devices, the step's work is enqueued at once and copies them itself: this changes nothing.
        """
        return numbers, []

    def numbers(self, values: Sequence[float] | npt.NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        """A list of numbers as a tensor `[len(values)]` on the device; it may outlive the step. All empty lists share
        one tensor, because they are frequent.
        """
        if not len(values):
            if dtype not in self._empty:
                self._empty[dtype] = torch.empty(0, dtype=dtype, device=self._device)
            return self._empty[dtype]
        return self._fetch(torch.tensor(values, dtype=dtype))

    def together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of one dtype on the host, as tensors on the device. One kernel copies all of them, so they share
        memory there.
        """
        if self._on_host and self._staging is None:
            return [*tensors]
        parts = torch.split(
            self._fetch(torch.cat([tensor.reshape(-1) for tensor in tensors])), [tensor.numel() for tensor in tensors]
        )
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def fetches(self, target: Tensor) -> list[Callable[[], None]]:
        """For each region, a function to capture in a graph: it overwrites `target`, int64 on the device, with the
        numbers that `write` put into the region. Empty if `target` is too large for a region, and on a CPU.
        """
        count = len(target)
        if count * _NUMBER_BYTES > self._input_bytes:
            return []
        return [functools.partial(_fetch, read[:count], target) for _, read in self._numbers]

    def write(self, numbers: npt.NDArray[np.int64]) -> int:
        """Write numbers to the step's region, for a captured function of `fetches`. Returns the region's index."""
        self._numbers[self._region][0][: len(numbers)] = numbers
        return self._region

    def into(self, target: Tensor, numbers: npt.NDArray[np.int64]) -> None:
        """Overwrite `target`, int64 on the device. Uses no region, but the copy engine, which may be busy."""
        target.copy_(self._pinned(torch.from_numpy(numbers)), non_blocking=True)

    def _fetch(self, values: Tensor) -> Tensor:
        staged = self._stage(values)
        return self._pinned(values).to(self._device, non_blocking=True) if staged is None else staged + 0

    def _stage(self, values: Tensor) -> Tensor | None:
        """Copy the values to the step's region. Returns None if there is no region, or if they do not fit."""
        if self._staging is None or self._mapped is None:
            return None
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        stop = start + values.numel() * values.element_size()
        if stop > self._staging.shape[1]:
            return None
        self._used = stop
        self._staging[self._region, start:stop].view(values.dtype).copy_(values)
        return self._mapped[self._region, start:stop].view(values.dtype)

    def _pinned(self, values: Tensor) -> Tensor:
        """The values in pinned memory, for an asynchronous copy; torch keeps the memory until the copy has ended."""
        return values if self._on_host else values.pin_memory()


class SimUploads(Uploads):
    """The uploads of a simulated device, whose work runs long after its submission."""

    def __init__(self, device: Device, num_regions: int) -> None:
        super().__init__()
        self._tracer = device.tracer
        self._memory = device.allocate_host(MEMORY, num_regions * _SIM_REGION_BYTES, item_bytes=_SIM_REGION_BYTES)
        self._regions = self._memory.data.numpy().view(np.int64).reshape(num_regions, -1)

    def hold(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[Access]]:
        """Write the inputs to the step's region, if they fit. See `Uploads.hold`."""
        region = self._regions[self._region]
        if len(numbers) > len(region):
            return numbers, []
        start = self._region * _SIM_REGION_BYTES
        where = self._memory.name, start, start + numbers.nbytes
        if self._tracer is not None:
            self._tracer.host_touched(lambda: [Access(*where, write=True)], "write inputs")
        region[: len(numbers)] = numbers
        return region[: len(numbers)], [Access(*where, write=False)]


def _fetch(read: Tensor, target: Tensor) -> None:
    torch.add(read, 0, out=target)  # `copy_` would use the copy engine


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """Those sampling options of a slot that the host applies. `SamplingTensors` holds the other options on the device.

    bias_ids    int64 `[n]`, distinct ids inside the vocabulary; `bias`: float32 `[n]`
    forbidden   int64 `[m]`, ids inside the vocabulary that may not be drawn before `spec.min_tokens` outputs; empty if
                `min_tokens` is 0
    """

    spec: SamplingSpec
    bias_ids: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    forbidden: npt.NDArray[np.int64]


class DecodeState:
    """Owner of the request slots' tensors on the device. Only the compute stream writes them.

    last_tokens    int64 `[num_slots + 1]`: the last token of each slot, drawn or given by `begin`
    block_tables   int32 `[num_slots + 1, table_width]`
    window_tables  int32 `[num_slots + 1, table_width, parts]`: blocks of the pages; `tables` is the memory of both
    rules          the sampling options of each slot
    lengths        int64 `[num_slots + 1]`: number of tokens of each slot that have KV. It is also the position of the
                   slot's last token, which has no KV yet
    adapters       int64 `[num_slots + 1]`: slot of the LoRA adapter of each request slot; 0: none
    history        int32 `[num_slots + 1, max_len + 1]`, all tokens of each slot; empty without `max_len`. The last
                   column takes writes that are not used
    hidden         `[num_slots + 1, hidden_size]`: the model's hidden state at the last position that has KV
    forced         int64 `[num_slots + 1, 2 + most_forced]`: tokens that the slot's grammar leaves no choice about, see
                   `Ops.take_forced`
    padding_slot   number of an additional slot for padding, which no request reads

    `lengths`, `history`, `hidden` and `forced` are used only with drafts. The tables of penalties, `[num_slots + 1,
    vocab_size]` with 5 bytes an entry, are allocated when the first slot needs them; on a GPU, that is the warm-up.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        device: torch.device | str = CPU,
        uploads: Uploads | None = None,
        table_width: int = 0,
        parts: int = 0,
        max_len: int = 0,
        max_drafts: int = 0,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`uploads`: copies numbers from the host to the device; None: the device is a CPU. `max_len`: largest number
        of tokens of a slot; 0: there is no `history`. `max_drafts`: largest number of drafts of a row. `dtype`: dtype
        of hidden states.
        """
        self.num_slots = self.padding_slot = num_slots
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._uploads = uploads or Uploads(device)
        self._sampling: list[SlotSampling | None] = [None] * num_slots
        # Initial values are made on the host and copied with blocking copies: a fill on the device would run on a
        # stream that no fence covers. The zeros come from numpy, because torch would fill with several threads, and so
        # start a second team of OpenMP threads. With more threads than cores, the threads of the forward pass then wake
        # late (a step of SmolLM2-135M took 85 ms instead of 45). Last tokens must be valid ids from the start: on a
        # GPU, a step whose `begin` failed still uses them as indices, and an index outside the vocabulary makes the
        # CUDA context unusable.
        self.last_tokens = self._zeros((num_slots + 1,), np.int64)
        self.tables = self._zeros(((num_slots + 1) * table_width * (1 + parts),), np.int32)
        self.block_tables = self.tables[: (num_slots + 1) * table_width].view(num_slots + 1, table_width)
        self.window_tables = self.tables[(num_slots + 1) * table_width :].view(num_slots + 1, table_width, parts)
        self.rules = SamplingTensors.greedy(num_slots + 1, self._device)
        self.lengths = self._zeros((num_slots + 1,), np.int64)
        self.adapters = self._zeros((num_slots + 1,), np.int64)
        self.history = self._zeros((num_slots + 1, max_len + 1 if max_len else 0), np.int32)
        zeros = self._zeros(((num_slots + 1) * max(1, hidden_size) * dtype.itemsize,), np.uint8)
        self.hidden = zeros.view(dtype).view(num_slots + 1, -1)[:, :hidden_size].contiguous()
        # The tokens of the step that runs when the host looks, and the drafts of the step after it.
        self.most_forced = 1 + 2 * max_drafts if max_drafts else 0
        self.forced = self._zeros((num_slots + 1, 2 + self.most_forced), np.int64)
        self._output_counts: Tensor | None = None
        self._in_prompt: Tensor | None = None

    @property
    def keeps_history(self) -> bool:
        """Whether `history` and `lengths` are used: drafts need them."""
        return self.history.shape[1] > 0

    def begin(self, begins: Sequence[tuple[int, RowStart]]) -> None:
        """Initialise slots for new requests and for preempted requests that resume. Overwrites all earlier content
        (hazards H16, H18).

        Runs before a request's first chunk in a slot, also after a preemption. Handles all slots of a step at once: for
        a hundred requests that arrive together, single calls would need hundreds of kernel launches. Ignores ids
        outside the vocabulary.
        """
        for slot, start in begins:
            spec = start.sampling
            bias = {token: value for token, value in spec.logit_bias.items() if 0 <= token < self.vocab_size}
            banned = [token for token in spec.forbidden_until_min if spec.min_tokens and 0 <= token < self.vocab_size]
            self._sampling[slot] = SlotSampling(
                spec, np.array([*bias], np.int64), np.array([*bias.values()], np.float32), np.array(banned, np.int64)
            )
        counts = [len(start.prompt) + len(start.outputs) for _, start in begins]
        lasts = [(0, *start.prompt[-1:], *start.outputs[-1:])[-1] for _, start in begins]
        # Maps a position among all known tokens to a position in the slot's row of the history.
        shifts = [
            slot * self.history.shape[1] - before
            for (slot, _), before in zip(begins, accumulate(counts, initial=0), strict=False)
        ]
        adapters = [start.sampling.adapter for _, start in begins]
        numbers = torch.tensor([[slot for slot, _ in begins], lasts, shifts, counts, adapters])
        rules = torch.tensor([sampling_row(start.sampling, prompt_len=len(start.prompt)) for _, start in begins]).view(
            -1, len(COLUMNS)
        )
        (slots, last, shift, count, adapter), rules = self._uploads.together([numbers, rules])
        self.last_tokens[slots] = last  # rule: slot-begins-with-its-last-token
        self.adapters[slots] = adapter  # rule: row-computes-with-its-own-adapter
        self.rules.numbers[slots] = rules  # rule: row-samples-with-its-own-options
        if self.most_forced:
            self.forced.index_fill_(0, slots, 0)  # rule: slot-begins-without-forced-tokens
        if self.keeps_history and (total := sum(counts)):
            known = np.fromiter(
                chain.from_iterable(chain(start.prompt, start.outputs) for _, start in begins), np.int32, total
            )
            places = torch.arange(total, device=self._device) + torch.repeat_interleave(shift, count, output_size=total)
            # rule: slot-begins-with-its-own-history
            self.history.view(-1)[places] = self._uploads.together([torch.from_numpy(known)])[0]
        for slot, start in begins:
            if start.sampling.penalised:
                self._fill_tables(slot, start)  # not for other slots: their tables are never read

    def force(self, found: Mapping[int, Forced]) -> None:
        """Record what the grammars of some slots leave no choice about, at most `most_forced` tokens of each. Later
        steps draft them.
        """
        table = np.zeros((len(found), self.forced.shape[1]), np.int64)
        for line, forced in zip(table, found.values(), strict=True):
            line[: 2 + len(forced.tokens)] = forced.start, len(forced.tokens), *forced.tokens
        self.forced[self.index([*found])] = self.index(table.reshape(-1)).view(table.shape)

    def sampling_of(self, slot: int) -> SlotSampling:
        """The sampling options of a slot that the host applies. Raises InvariantError if `begin` was never called for
        it.
        """
        found = self._sampling[slot]
        if found is None:
            raise InvariantError(f"slot {slot} draws, but it never began: its first chunk must carry RowStart")
        return found

    def slot_tensors(self, *, counted: bool) -> SlotTensors:
        """The tensors that sampling updates. `counted`: some row of the step has penalties."""
        counts = self.seen_tables()[0] if counted else None
        return SlotTensors(self.last_tokens, self.lengths, self.history, self.hidden, counts, self.rules.numbers)

    def seen_tables(self) -> tuple[Tensor, Tensor]:
        """How often each token is in the output, int32, and whether it is in the prompt, bool; both `[num_slots + 1,
        vocab_size]`. Undefined for slots without penalties.
        """
        if self._output_counts is None or self._in_prompt is None:
            shape = (self.num_slots + 1, self.vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._output_counts, self._in_prompt

    def index(self, values: Sequence[int] | npt.NDArray[np.int64]) -> Tensor:
        """Host numbers as an int64 tensor on the device of this state."""
        return self.numbers(values)

    def numbers(self, values: Sequence[float] | npt.NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        """Host numbers on the device of this state."""
        return self._uploads.numbers(values, dtype)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return self.index([token for token in tokens if 0 <= token < self.vocab_size])

    def _fill_tables(self, slot: int, start: RowStart) -> None:
        counts, in_prompt = self.seen_tables()
        outputs = self._ids(start.outputs)
        counts[slot].zero_()  # rule: slot-drops-outputs-before
        # rule: slot-keeps-outputs-from-before-a-preemption
        counts[slot].index_add_(0, outputs, torch.ones_like(outputs, dtype=counts.dtype))
        in_prompt[slot].zero_()  # rule: slot-drops-prompt-before
        in_prompt[slot].index_fill_(0, self._ids(start.prompt), True)

    def _zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.zeros(shape, dtype)).to(self._device)
