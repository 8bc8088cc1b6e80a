"""From a frame and the device state to launches of `kernels`, and what the torch code beside the callers is for
elsewhere. Need triton.

Enqueues on the current stream and reads nothing back, so it may be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sidestream.runner import kernels

if TYPE_CHECKING:
    from sidestream.runner.forward import Computed
    from sidestream.runner.frame import GraphInputs
    from sidestream.runner.hidden_states import PackedRows
    from sidestream.runner.rules import SamplingTensors
    from sidestream.runner.state import DecodeState

# Programs that look through logits at once.
_PROGRAMS = 512
# Of a float32, in every number that a type has.
_SPARE_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


def place(places: Tensor, blocks: Tensor, tables: Tensor) -> None:
    """See `DecodeState.place`."""
    grid: Any = kernels.change_tables[(-(-len(places) // kernels.LANES.value),)]
    grid(places, blocks, tables, len(places), num_warps=4)


def inputs(
    frame: GraphInputs, state: DecodeState, block_tokens: int, drafts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `GraphInputs.inputs`."""
    num_tokens, num_rows, width = len(frame.tokens), len(frame.rows), state.tables.shape[1]
    tokens, positions, slots = (torch.empty_like(frame.tokens) for _ in range(3))
    kv_lens, tables = torch.empty_like(frame.kv_lens), state.tables.new_empty(num_rows, width)
    grid: Any = kernels.inputs[(-(-num_tokens // kernels.LANES.value) + num_rows,)]
    grid(
        frame.tokens, frame.positions, frame.token_rows, frame.kv_lens, frame.rows, state.last, state.lengths, state.tables,
        state.last if drafts is None else drafts, tokens, positions, kv_lens, slots, tables,
        num_tokens, state.padding_slot, width, 0 if drafts is None else drafts.shape[1], block_tokens, DRAFTS=drafts is not None, num_warps=4,
    )  # fmt: skip
    return tokens, positions, kv_lens, slots, tables


def standing(frame: GraphInputs, state: DecodeState) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `GraphInputs.standing`, for all rows of the shape that decode."""
    count, width, hidden_size = frame.shape.decodes, state.tables.shape[1], state.hidden.shape[1]
    tokens, lengths, bounds = (torch.empty_like(frame.rows[:count]) for _ in range(3))
    nobody = torch.empty(count, dtype=torch.bool, device=frame.rows.device)
    tables, hidden = state.tables.new_empty(count, width), state.hidden.new_empty(count, hidden_size)
    grid: Any = kernels.standing[(count,)]
    grid(
        frame.positions, frame.cu_seqlens_q, frame.kv_lens, frame.rows, state.last, state.lengths, state.tables, state.hidden,
        tokens, lengths, bounds, nobody.view(torch.uint8), tables, hidden, state.padding_slot, width, hidden_size, num_warps=4,
    )  # fmt: skip
    return tokens, lengths, bounds, nobody, tables, hidden


def one_token_each(
    tables: Tensor, positions: Tensor, last: Tensor, nobody: Tensor | None, *, block_tokens: int
) -> tuple[Tensor, Tensor]:
    """Slots and KV lengths, both int64 `[n]`: see `Forward.one_token_each`."""
    slots, kv_lens = torch.empty_like(positions), torch.empty_like(positions)
    tables = tables.contiguous()
    grid: Any = kernels.one_token_each[(len(positions),)]
    grid(
        tables, positions, last, slots if nobody is None else nobody.view(torch.uint8), slots, kv_lens, block_tokens, tables.shape[1],
        PADDED=nobody is not None, num_warps=1,
    )  # fmt: skip
    return slots, kv_lens


def draw(
    logits: Tensor, rows: Tensor, output_indices: Tensor, finite: Tensor, rules: SamplingTensors, tokens: Tensor
) -> None:
    """Overwrite `tokens`, int64 `[N]`, the likeliest ones, where rows draw otherwise: see `draw.draw`."""
    (places, width), stride, spare = logits.shape, logits.stride(0), _SPARE_BITS[logits.dtype]
    tiles, turns = -(-width // kernels.TILE.value), -(-(32 - spare) // kernels.BITS.value)
    # As many programs as a GPU runs at once, if there are rows for it; each for so many tiles.
    span = max(-(-tiles * places // _PROGRAMS), -(-tiles // kernels.PARTS.value)) * kernels.TILE.value
    parts = -(-width // span)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=logits.device)

    kept, left = zeros(places, kernels.PARTS.value), zeros(places, kernels.PARTS.value)
    floors = torch.empty(places, dtype=torch.float32, device=logits.device)
    searched = [
        (zeros(2, places, kernels.PARTS.value, kernels.DIGITS.value), zeros(turns, places)) for _ in range(2)
    ]  # top-k, top-p
    asked = (logits, rows, finite.view(torch.uint8), rules.numbers, rules.numbers.view(torch.float64), tokens)
    search: Any = kernels.search[(places, parts)]
    weigh: Any = kernels.weigh[(places, parts)]
    pick: Any = kernels.pick[(places,)]
    for counted, (masses, found) in zip((True, False), searched, strict=True):
        for number in range(turns):
            search(
                *asked,
                kept,
                masses,
                found,
                width,
                stride,
                span,
                places,
                number,
                turns,
                COUNTED=counted,
                SPARE=spare,
                num_warps=8,
            )
        weigh(
            *asked, kept, *searched[0], *searched[1], kept if counted else left, floors, width, stride, span, places, turns,
            FINAL=not counted, SPARE=spare, num_warps=8,
        )  # fmt: skip
    pick(logits, rows, output_indices, *asked[2:], left, floors, width, stride, span, num_warps=8)


def penalise(logits: Tensor, rows: Tensor, state: DecodeState, drafted: Tensor | None) -> Tensor:
    """See `draw.penalise`."""
    count, width = logits.shape
    to = (
        logits
        if logits.dtype == torch.float32 and logits.is_contiguous()
        else torch.empty(count, width, dtype=torch.float32, device=logits.device)
    )
    counts, in_prompt = state.seen_tables()
    grid: Any = kernels.penalise[(count, -(-width // kernels.WIDE.value))]
    grid(
        logits, rows, state.rules.numbers.view(torch.float64), counts, in_prompt.view(torch.uint8), rows if drafted is None else drafted, to,
        width, logits.stride(0), 0 if drafted is None else drafted.shape[1], num_warps=8,
    )  # fmt: skip
    return to


def advance(frame: GraphInputs, computed: Computed, tokens: Tensor, state: DecodeState, *, counted: bool) -> Tensor:
    """Let the rows of a frame go on by `tokens`, int64 `[N]`, drawn at all its places: see `drafts.publish`, for what
    it returns as well.

    counted   as output of rows that are penalised
    """
    counts = torch.empty_like(frame.draws)
    drafts = None if computed.proposed is None else computed.proposed.tokens
    hidden = computed.hidden if state.keeps_history else None
    grid: Any = kernels.advance[(len(frame.draws),)]
    grid(
        frame.draws, frame.firsts, frame.rows, frame.cu_seqlens_q, tokens, computed.positions, tokens if drafts is None else drafts,
        tokens if hidden is None else hidden, state.last, state.lengths, state.history, state.hidden, counts,
        state.rules.numbers.view(torch.float64), state.seen_tables()[0] if counted else counts,
        frame.shape.decodes, 0 if drafts is None else drafts.shape[1], state.history.shape[1], state.hidden.shape[1], state.vocab_size,
        KEEPS=state.keeps_history, HIDDEN=hidden is not None, COUNTED=counted, num_warps=1,
    )  # fmt: skip
    return counts


def before(hidden: Tensor, rows: PackedRows, by_row: Tensor, by_block: Tensor) -> Tensor:
    """See `HiddenStates.before`."""
    to = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    grid: Any = kernels.before[(len(hidden),)]
    grid(
        hidden, rows.bounds, rows.numbers, rows.origins, by_row, by_block, to,
        len(rows.numbers), hidden.stride(0), by_block.stride(0), hidden.shape[1], num_warps=4,
    )  # fmt: skip
    return to


def keep(
    hidden: Tensor,
    rows: PackedRows,
    by_row: Tensor,
    by_block: Tensor,
    *,
    positions: Tensor,
    slots: Tensor,
    block_tokens: int,
) -> None:
    """See `HiddenStates.keep`."""
    grid: Any = kernels.keep[(len(hidden) + len(rows.numbers),)]
    grid(
        hidden, positions, slots, rows.bounds, rows.numbers, by_row, by_block,
        len(hidden), hidden.stride(0), by_block.stride(0), hidden.shape[1], block_tokens, num_warps=4,
    )  # fmt: skip
