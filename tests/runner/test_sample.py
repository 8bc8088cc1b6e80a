"""Effects of each sampling option, and independence of other rows."""

from __future__ import annotations

import math

import pytest
import torch
from sampler_rig import commit, sample
from torch import Tensor

from sidestream.config import SamplingParams
from sidestream.errors import InvariantError
from sidestream.ops.torch_ops import filter_threshold
from sidestream.runner.sampler import SamplerOutput
from sidestream.runner.state import DecodeState
from sidestream.types import RowStart

END = 2


def start(*, seed: int = 0, prompt: tuple[int, ...] = (), outputs: tuple[int, ...] = (), **params: object) -> RowStart:
    spec = SamplingParams(**params).spec(seed=seed, eos_ids=(END,))  # type: ignore[arg-type]
    return RowStart(sampling=spec, prompt=prompt, outputs=outputs)


def draw(logits: Tensor | list[list[float]], *starts: RowStart, output_index: int = 0) -> SamplerOutput:
    logits = torch.as_tensor(logits, dtype=torch.float32).clone()
    state = DecodeState(len(starts), logits.shape[-1])
    for row, each in enumerate(starts):
        state.begin([(row, each)])
    return sample(logits, range(len(starts)), [output_index] * len(starts), state)


def support(logits: list[float], **params: object) -> set[int]:
    """Ids that a thousand seeds draw."""
    starts = [start(seed=seed, **params) for seed in range(1000)]
    return set(draw([logits] * 1000, *starts).tokens.tolist())


def test_temperature_zero_samples_the_likeliest_token():
    assert draw([[0.0, 3.0, 2.0]], start(temperature=0.0)).tokens.tolist() == [1]


def test_top_k_one_is_greedy_for_every_seed():
    assert support([1.0, 5.0, 5.0], top_k=1) == {1}


@pytest.mark.parametrize("vocab_size", [3, 64, 5000])
def test_greedy_samples_the_lowest_of_equally_likely_ids(vocab_size):
    logits = torch.zeros(2, vocab_size)
    logits[:, [1, vocab_size // 2, vocab_size - 1]] = 7.0
    assert draw(logits, *[start(temperature=0.0)] * 2).tokens.tolist() == [1, 1]


def test_logit_bias_changes_the_sampled_token():
    assert draw([[0.0, 3.0, 2.0]], start(temperature=0.0, logit_bias={0: 4.0, 1: -2.0})).tokens.tolist() == [0]


def test_logit_bias_outside_the_vocabulary_changes_no_row():
    logits = [[0.0, 3.0, 2.0]] * 3
    plain = start(temperature=0.0)
    biased = start(temperature=0.0, logit_bias={3: 100.0, 4: 100.0, 1 << 31: 100.0})
    assert draw(logits, plain, biased, plain).tokens.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("logits", "choice"), [([2.0, 3.0, 0.0], 0), ([-2.0, -1.5, -9.0], 0)])
def test_repetition_penalty_lowers_positive_and_negative_logits_of_prompt_tokens(logits, choice):
    assert draw([logits], start(temperature=0.0, prompt=(1,))).tokens.tolist() == [1]
    assert draw([logits], start(temperature=0.0, prompt=(1,), repetition_penalty=2.0)).tokens.tolist() == [choice]


def test_repetition_penalty_is_applied_once_to_a_token_of_prompt_and_output():
    # 4 / 1.5 = 2.67 is above 2.5; applied twice it would be 1.78
    begun = start(temperature=0.0, prompt=(1, 1), outputs=(1, 1), repetition_penalty=1.5)
    assert draw([[2.5, 4.0, 0.0]], begun).tokens.tolist() == [1]


def test_presence_and_frequency_penalties_ignore_the_prompt():
    begun = start(temperature=0.0, prompt=(1, 1, 1), presence_penalty=2.0, frequency_penalty=2.0)
    assert draw([[2.5, 3.0, 0.0]], begun).tokens.tolist() == [1]


def test_presence_penalty_applies_once_and_frequency_penalty_per_occurrence():
    logits = [[0.0, 3.0, 1.5]]
    twice = (1, 1)
    assert draw(logits, start(temperature=0.0, outputs=twice, presence_penalty=1.0)).tokens.tolist() == [1]
    assert draw(logits, start(temperature=0.0, outputs=twice, frequency_penalty=1.0)).tokens.tolist() == [2]


def test_logit_bias_is_applied_before_the_repetition_penalty():
    # (1 + 3) / 2 = 2 is below 2.5; bias after the penalty would make 1 / 2 + 3 = 3.5
    begun = start(temperature=0.0, prompt=(1,), logit_bias={1: 3.0}, repetition_penalty=2.0)
    assert draw([[2.5, 1.0, 0.0]], begun).tokens.tolist() == [0]


def test_stop_tokens_are_banned_before_min_tokens():
    begun = start(temperature=0.0, min_tokens=2, stop_token_ids=(1,))
    logits = [[0.0, 6.0, 5.0]]
    assert [draw(logits, begun, output_index=index).tokens.item() for index in range(3)] == [0, 0, 1]


def test_logit_bias_does_not_lift_the_ban_of_stop_tokens_before_min_tokens():
    assert draw([[0.0, 0.0, 0.0]], start(temperature=0.0, min_tokens=1, logit_bias={END: 100.0})).tokens.tolist() == [0]


def test_top_k_keeps_the_k_likeliest():
    assert support([1.0, 0.0, 0.5, -1.0, 0.9], top_k=3) == {0, 2, 4}


def test_top_k_keeps_all_tokens_as_likely_as_the_last_kept_one():
    assert support([1.0, 0.5, 0.5, 0.5, 0.0], top_k=2) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [5, 6, 1 << 31])
def test_top_k_of_the_whole_vocabulary_or_more_drops_nothing(top_k):
    assert support([0.1, 0.0, 0.1, 0.0, 0.2], top_k=top_k) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    assert support(logits, top_p=0.65) == {1, 2}
    assert support(logits, top_p=0.75) == {1, 2, 3}


@pytest.mark.parametrize("top_p", [1e-9, 5e-324])
def test_a_tiny_top_p_keeps_the_likeliest_token(top_p):
    assert support([0.0, 0.1, 0.05, -3.0], top_p=top_p) == {1}


def test_top_p_is_relative_to_the_tokens_left_by_top_k():
    # of what top_k leaves, the likeliest has 0.4 / 0.7 = 0.57 of the mass
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    assert support(logits, top_p=0.5) == {1, 2}
    assert support(logits, top_k=2, top_p=0.5) == {1}


def test_min_p_is_relative_to_the_likeliest_token():
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    assert support(logits, min_p=0.25) == {1, 2, 3}
    assert support(logits, min_p=1.0) == {1}


@pytest.mark.parametrize("count", [1, 2, 17, 999, 1000, 1001])
def test_filter_threshold_is_the_value_that_a_sort_finds(count):
    generator = torch.Generator().manual_seed(4)
    # far apart, close together (neighbouring floats), equal, zero, one, and smaller than float32's normal range
    spread = torch.rand(400, generator=generator) ** 9
    close = 0.25 + torch.arange(300) * 2.0**-25
    probs = torch.cat([spread, close, close[:150], torch.zeros(100), torch.ones(1), torch.tensor([1e-40] * 49)])[None]
    floor = filter_threshold(probs, torch.ones(1, 1000, dtype=torch.int64), torch.tensor([[count]]))
    want = probs.sort(descending=True).values[0, count - 1] if count <= 1000 else 0.0
    assert floor.item() == want


def test_a_sum_that_equals_the_limit_excludes_the_next_value():
    probs = torch.tensor([[0.25, 0.5, 0.125, 0.125]])
    floors = [
        filter_threshold(probs, (probs * 8).long(), torch.tensor([[limit]])).item()
        for limit in (3.9, 4.0, 4.1, 6.0, 6.1)
    ]
    assert floors == [0.5, 0.5, 0.25, 0.25, 0.125]


def test_temperature_is_applied_before_the_filters():
    assert support([0.0, 1.0, 0.9], min_p=0.5, temperature=0.5) == {1, 2}
    assert support([0.0, 1.0, 0.9], min_p=0.5, temperature=2.0) == {0, 1, 2}


def test_neither_a_tiny_temperature_nor_huge_logits_overflow():
    for temperature in [1e-3, 1e-30, 1e-300]:
        for scale in [1.0, 1e30, 1e36]:
            logits = torch.linspace(-80, 80, 200).roll(37) * scale
            drawn = draw(logits.repeat(50, 1), *(start(seed=seed, temperature=temperature) for seed in range(50)))
            assert drawn.tokens.unique().tolist() == [36] and drawn.finite.all()


def test_a_tiny_repetition_penalty_does_not_overflow():
    drawn = draw([[0.0, 80.0, 0.0]], start(prompt=(0, 1), repetition_penalty=1e-300))
    assert drawn.tokens.tolist() == [1] and drawn.finite.all()


def test_tokens_of_probability_zero_are_never_drawn():
    forbidden = -math.inf
    assert support([forbidden, 0.0, forbidden, forbidden, 0.0, forbidden]) == {1, 4}
    assert support([-500.0, 0.0, -500.0], top_p=0.999, top_k=2) == {1}


@pytest.mark.parametrize("random", [0.0, 1 - 2.0**-53])
def test_random_numbers_at_the_ends_sample_the_first_and_last_kept_token(monkeypatch, random):
    monkeypatch.setattr(
        "sidestream.ops.torch_ops.uniforms",
        lambda seeds, indices: torch.full((len(seeds),), random, dtype=torch.float64),
    )
    torch.manual_seed(3)
    logits = torch.randn(4, 1000)
    logits[:, -100:] = logits[:, :100] = -math.inf
    kept = logits.topk(50).indices
    want = kept.amin(-1) if random == 0.0 else kept.amax(-1)
    assert draw(logits, *[start(top_k=50)] * 4).tokens.tolist() == want.tolist()


HOPELESS = {
    "one NaN": [0.0, math.nan, 1.0, 0.0],
    "all NaN": [math.nan] * 4,
    "nothing left": [-math.inf] * 4,
    "plus infinity": [0.0, math.inf, -math.inf, 0.0],
}


@pytest.mark.parametrize("hopeless", HOPELESS.values(), ids=HOPELESS.keys())
def test_a_row_without_a_finite_maximum_is_flagged_and_changes_no_other_row(hopeless):
    for params in [
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"presence_penalty": 1.0, "logprobs": 2},
    ]:
        good = [0.3, 0.0, 0.1, 0.2]
        rows = [start(seed=seed, **params) for seed in range(3)]
        drawn = draw([good, hopeless, good], *rows)
        assert drawn.finite.tolist() == [True, False, True]
        assert drawn.tokens[1] == 0
        assert drawn.tokens[0] == draw([good], rows[0]).tokens[0]
        assert drawn.tokens[2] == draw([good], rows[2]).tokens[0]


def test_a_row_whose_tokens_are_all_banned_is_flagged_as_not_finite():
    drawn = draw([[1.0, 2.0]], start(temperature=0.0, min_tokens=1, stop_token_ids=(0, 1)))
    assert not drawn.finite.any() and drawn.tokens.tolist() == [0]


def test_sampling_an_empty_batch_returns_no_tokens():
    drawn = sample(torch.empty(0, 8), [], [], DecodeState(2, 8))
    assert drawn.tokens.shape == (0,) and drawn.logprobs is None


def test_logits_of_a_wrong_shape_or_type_are_refused():
    state = DecodeState(2, 8)
    state.begin([(0, start())])
    for wrong in (torch.zeros(1, 7), torch.zeros(2, 8), torch.zeros(1, 8, dtype=torch.float64)):
        with pytest.raises(InvariantError, match="sampling takes float32, bfloat16 or float16"):
            sample(wrong, [0], [0], state)


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    drawn = draw(logits, start(temperature=0.0, logit_bias={0: 50.0}, prompt=(1,), repetition_penalty=3.0, logprobs=2))
    raw = logits.log_softmax(-1)[0]
    assert drawn.logprobs is not None and drawn.tokens.tolist() == [0]
    assert drawn.logprobs.drawn.tolist() == [raw[0]]
    assert drawn.logprobs.top_ids[0, :2].tolist() == [1, 3]
    assert drawn.logprobs.top[0, :2].tolist() == [raw[1], raw[3]]


def test_equally_likely_logprobs_are_listed_lowest_id_first():
    drawn = draw([[0.0, 2.0, 1.0, 2.0, 1.0]], start(temperature=0.0, logprobs=4))
    assert drawn.logprobs is not None
    assert drawn.logprobs.top_ids[0].tolist() == [1, 3, 2, 4, 0]


def test_rows_without_logprobs_get_zeros_and_do_not_change_other_rows():
    torch.manual_seed(0)
    logits = torch.randn(3, 40)
    mixed = draw(logits, start(), start(logprobs=3), start(logprobs=0)).logprobs
    alone = draw(logits[1:2], start(logprobs=3)).logprobs
    assert mixed is not None and alone is not None
    assert mixed.drawn[0] == 0 and mixed.drawn[1] == alone.drawn[0] and mixed.drawn[2] < 0
    assert mixed.top_ids[1].tolist() == alone.top_ids[0].tolist()


def test_no_logprobs_are_computed_unless_a_row_asks_for_them():
    assert draw([[0.0, 1.0]], start()).logprobs is None


KINDS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 5.0, "top_k": 300, "top_p": 0.99, "min_p": 0.001},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"logit_bias": {3: 5.0, 900: -7.0}, "min_tokens": 9},
    {"top_p": 0.5, "logprobs": 5},
]


@pytest.mark.parametrize("vocab_size", [1009, 4096])
def test_a_row_samples_the_same_token_in_any_batch_and_position(vocab_size):
    """Bit-exact, though the vocabulary's size leaves each row at another alignment."""
    generator = torch.Generator().manual_seed(7)
    starts = [start(seed=at, prompt=(1, 2, 3), outputs=(4, 4, 5), **kind) for at, kind in enumerate(KINDS * 2)]
    logits = torch.randn(len(starts), vocab_size, generator=generator) * 2
    for output_index in range(6):
        alone = [
            draw(row[None], each, output_index=output_index).tokens.item()
            for row, each in zip(logits, starts, strict=True)
        ]
        for size in (2, 5, len(starts)):
            order = torch.randperm(len(starts), generator=generator)[:size].tolist()
            together = draw(logits[order], *(starts[at] for at in order), output_index=output_index)
            assert together.tokens.tolist() == [alone[at] for at in order]


def test_the_number_of_threads_does_not_change_sampled_tokens():
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(len(KINDS), 8192, generator=generator) * 2
    starts = [start(seed=at, **kind) for at, kind in enumerate(KINDS)]
    threads = torch.get_num_threads()
    try:
        drawn = []
        for count in (1, 2):
            torch.set_num_threads(count)
            drawn.append(draw(logits, *starts).tokens.tolist())
    finally:
        torch.set_num_threads(threads)
    assert drawn[0] == drawn[1]


def run(state: DecodeState, row: int, begun: RowStart, indices: range) -> list[int]:
    """Draw and commit one row's tokens from logits that depend on the output index only."""
    state.begin([(row, begun)])
    tokens = []
    for index in indices:
        logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(index))
        drawn = sample(logits, [row], [index], state)
        commit(state, [row], drawn.tokens)
        tokens.append(int(drawn.tokens.item()))
    return tokens


@pytest.mark.parametrize(
    "params", [{"seed": 5}, {"seed": 5, "top_p": 0.9, "presence_penalty": 1.0, "repetition_penalty": 1.2}], ids=str
)
def test_a_preempted_request_samples_the_same_tokens_afterwards(params):
    whole = run(DecodeState(4, 500), 1, start(prompt=(7, 8), **params), range(12))
    state = DecodeState(4, 500)
    before = run(state, 1, start(prompt=(7, 8), **params), range(5))
    run(state, 1, start(seed=99, prompt=(9,), frequency_penalty=2.0), range(7))  # someone else had the row meanwhile
    after = run(state, 3, start(prompt=(7, 8), outputs=tuple(before), **params), range(5, 12))
    assert before + after == whole
