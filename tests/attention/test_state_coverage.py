"""How many tokens each state of a step covers."""

from __future__ import annotations

import torch

from sidestream.attention.states import DraftInputs, StatePool
from sidestream_kv.kv.state_layout import StateLayout, StateTensor

LAYOUT = StateLayout((StateTensor(0, "recurrent", 0, (4,), "float32"),), 1, "float32")


def test_a_state_covers_the_accepted_drafts_only_after_the_step_that_replays_them() -> None:
    drafts = DraftInputs(LAYOUT, num_slots=2, max_drafts=3, device=torch.device("cpu"))
    pool = StatePool(torch.zeros(6 * LAYOUT.state_bytes, dtype=torch.uint8), LAYOUT, block_tokens=4, drafts=drafts)
    pool.covered[0] = 9
    drafts.first[0], drafts.count[0] = 9, 3  # of these, two were accepted: the row begins at position 11
    batch = pool.batch(
        *(torch.tensor(ids) for ids in ([0, -1], [1, 2], [3, -1])),
        slots=torch.tensor([0, 1]),
        cu_seqlens_q=torch.tensor([0, 4, 9]),  # a token and three drafts; a prompt of five tokens
        kv_lens=torch.tensor([15, 5]),
        num_decode=1,
        decode_queries=4,
        chunks=[(4, 9)],
    )
    assert (batch.behind.tolist(), batch.wrong.tolist()) == ([2, 0], [False, False])
    assert batch.covers.tolist() == [12, 5]
    assert (batch.checkpoints.tolist(), batch.border.tolist()[0]) == ([3, pool.scratch], 12)
