"""Rows of device state: their contents, and that a new owner finds none of the old owner's."""

from __future__ import annotations

import pytest
import torch
from sampler_rig import commit as advance
from sampler_rig import sample

from sidestream.config import SamplingParams
from sidestream.errors import InvariantError
from sidestream.runner.state import DecodeState
from sidestream.types import Forced, RowStart

VOCAB = 16


def start(*, prompt: tuple[int, ...] = (), outputs: tuple[int, ...] = (), **params: object) -> RowStart:
    return RowStart(SamplingParams(**params).spec(seed=1, eos_ids=(0,)), prompt, outputs)  # type: ignore[arg-type]


PENALISED = {"temperature": 0.0, "repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}


def commit(state: DecodeState, rows: list[int], tokens: list[int]) -> None:
    advance(state, rows, torch.tensor(tokens, dtype=torch.int64))


def seen(state: DecodeState, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the tables of penalties."""
    counts, in_prompt = state.seen_tables()
    return counts[slots], in_prompt[slots]


def test_committed_tokens_are_the_next_inputs_of_their_rows_in_any_order():
    state = DecodeState(4, VOCAB)
    for row in range(4):
        state.begin([(row, start())])
    commit(state, [2, 0, 3], [7, 8, 9])
    assert state.last_tokens[[0, 3, 2]].tolist() == [8, 9, 7]


def test_a_row_begins_with_its_last_known_token():
    state = DecodeState(3, VOCAB)
    state.begin([(0, start(prompt=(3, 4)))])
    state.begin([(1, start(prompt=(3, 4), outputs=(5, 6)))])
    state.begin([(2, start())])
    assert state.last_tokens[[0, 1, 2]].tolist() == [4, 6, 0]


def test_a_reused_row_has_no_token_of_its_old_owner_h16():
    state = DecodeState(2, VOCAB)
    state.begin([(0, start(prompt=(3,)))])
    commit(state, [0], [9])
    state.begin([(0, start(prompt=(4,)))])
    assert state.last_tokens[[0]].tolist() == [4]


def test_a_reused_row_has_no_counts_or_prompt_of_its_old_owner_h18():
    state = DecodeState(2, VOCAB)
    state.begin([(0, start(prompt=(1, 2, 3), outputs=(4,), **PENALISED))])
    commit(state, [0], [5])
    state.begin([(0, start(prompt=(8,), **PENALISED))])
    counts, in_prompt = seen(state, [0])
    assert counts.sum() == 0
    assert in_prompt[0].nonzero().flatten().tolist() == [8]


def test_a_reused_row_has_no_counts_after_an_owner_without_penalties_h18():
    state = DecodeState(1, VOCAB)
    state.begin([(0, start(prompt=(1,), outputs=(4,), **PENALISED))])
    state.begin([(0, start(prompt=(2,)))])
    commit(state, [0], [5])
    state.begin([(0, start(prompt=(3,), **PENALISED))])
    counts, in_prompt = seen(state, [0])
    assert counts.sum() == 0
    assert in_prompt[0].nonzero().flatten().tolist() == [3]


def test_a_reused_row_samples_without_options_of_its_old_owner_h18():
    state = DecodeState(1, VOCAB)
    state.begin(
        [(0, start(prompt=(1,), outputs=(2,), logit_bias={3: 9.0}, min_tokens=5, stop_token_ids=(4,), **PENALISED))]
    )
    state.begin([(0, start(temperature=0.0))])
    for wanted in (1, 2, 4):
        logits = torch.zeros(1, VOCAB)
        logits[0, wanted] = 0.1
        assert sample(logits, [0], [0], state).tokens.tolist() == [wanted]


def test_a_late_commit_of_the_old_owner_does_not_change_a_reused_row_h16():
    """The overrun step of a finished request commits first, as both run in order on the compute stream."""
    state = DecodeState(1, VOCAB)
    state.begin([(0, start(prompt=(1,), **PENALISED))])
    commit(state, [0], [6])
    commit(state, [0], [6])
    state.begin([(0, start(prompt=(2,), **PENALISED))])
    commit(state, [0], [7])
    counts, _ = seen(state, [0])
    assert counts[0].nonzero().flatten().tolist() == [7] and state.last_tokens[[0]].tolist() == [7]


def test_beginning_a_row_does_not_change_other_rows():
    state = DecodeState(3, VOCAB)
    for row in range(3):
        state.begin([(row, start(prompt=(row,), outputs=(row + 5,), **PENALISED))])
    state.begin([(1, start(prompt=(9,), **PENALISED))])
    counts, in_prompt = seen(state, [0, 2])
    assert counts.nonzero().tolist() == [[0, 5], [1, 7]]
    assert in_prompt.nonzero().tolist() == [[0, 0], [1, 2]]
    assert state.last_tokens[[0, 2]].tolist() == [5, 7]


def test_commits_count_each_output_of_penalised_rows():
    state = DecodeState(3, VOCAB)
    state.begin([(0, start(outputs=(4, 4), **PENALISED))])
    state.begin([(1, start())])
    state.begin([(2, start(**PENALISED))])
    commit(state, [2, 1, 0], [5, 6, 4])
    commit(state, [0, 2], [7, 5])
    counts, _ = seen(state, [0, 2])
    assert counts[0, [4, 7]].tolist() == [3, 1] and counts[1, 5] == 2
    assert counts.sum() == 6


def test_a_preempted_requests_outputs_are_counted_again_in_its_new_row():
    state = DecodeState(2, VOCAB)
    state.begin([(0, start(prompt=(1,), **PENALISED))])
    commit(state, [0], [5])
    commit(state, [0], [5])
    state.begin([(1, start(prompt=(1,), outputs=(5, 5), **PENALISED))])
    counts, in_prompt = seen(state, [0, 1])
    assert counts[0].equal(counts[1]) and in_prompt[0].equal(in_prompt[1])


def test_penalty_tables_use_no_memory_until_a_row_needs_them():
    huge = DecodeState(1 << 20, 1 << 20)  # 5 TiB of tables
    huge.begin([(0, start(temperature=0.7, top_p=0.9, logit_bias={3: 1.0}, min_tokens=3))])
    commit(huge, [0], [5])
    assert huge.last_tokens[[0]].tolist() == [5]


@pytest.mark.parametrize("stray", [-1, VOCAB, 1 << 31])
def test_ids_outside_the_vocabulary_are_ignored(stray):
    state = DecodeState(2, VOCAB)
    state.begin([(1, start(prompt=(stray, 3), outputs=(stray, 4), **PENALISED))])
    counts, in_prompt = seen(state, [0, 1])
    assert counts.nonzero().tolist() == [[1, 4]] and in_prompt.nonzero().tolist() == [[1, 3]]


def test_sampling_a_row_that_never_began_raises():
    with pytest.raises(InvariantError, match="slot 1 draws, but it never began"):
        DecodeState(2, VOCAB).sampling_of(1)


def test_an_empty_batch_changes_no_state():
    state = DecodeState(1, VOCAB)
    state.begin([(0, start(prompt=(3,)))])
    commit(state, [], [])
    assert state.last_tokens[[]].shape == (0,) and state.last_tokens[[0]].tolist() == [3]


def test_rows_that_begin_together_get_their_own_tokens():
    state = DecodeState(5, VOCAB, max_len=20)
    state.begin([(4, start(prompt=(9,) * 20))])
    starts = {
        3: start(prompt=(1, 2, 3), outputs=(4,)),
        0: start(prompt=()),
        4: start(prompt=(5,)),
        1: start(prompt=(6, 7), outputs=(8, 9, 1)),
    }
    before = state.history.clone()
    state.begin([*starts.items()])
    assert state.last_tokens[[3, 0, 4, 1]].tolist() == [4, 0, 5, 1]
    for row in range(6):
        known = [*starts[row].prompt, *starts[row].outputs] if row in starts else []
        assert state.history[row, : len(known)].tolist() == known
        assert torch.equal(state.history[row, len(known) :], before[row, len(known) :])


def test_a_slot_begins_without_the_forced_tokens_of_its_last_owner() -> None:
    state = DecodeState(3, VOCAB, max_len=20, max_drafts=1)
    state.begin([(0, start()), (1, start())])
    state.force({0: Forced(2, (4, 5)), 1: Forced(3, (6, 7, 8))})
    assert state.forced[:2].tolist() == [[2, 2, 4, 5, 0], [3, 3, 6, 7, 8]]
    state.force({0: Forced(4, (9,))})
    state.begin([(1, start())])
    assert state.forced.tolist() == [[4, 1, 9, 0, 0], [0] * 5, [0] * 5, [0] * 5]
