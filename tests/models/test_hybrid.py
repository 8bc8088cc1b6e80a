"""Models with recurrent state: what transformers computes comes out, whatever chunks, batches and tiers are between."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.hybrid import logprobs
from proof.tiny_models import HYBRIDS, tiny_config, tiny_model_dir
from sidestream import LLM, OffloadConfig, SamplingParams, SpeculativeConfig
from sidestream.attention.states import DraftInputs, StateBatch, StatePool
from sidestream.errors import ConfigError, ModelError
from sidestream.llm import RequestOutput
from sidestream.models import load_model
from sidestream.models.recurrent import StatefulLayers, state_layout_of, stateful_modules, unbind_time_steps
from sidestream_kv.kv.pool import Lease
from sidestream_kv.kv.state_layout import RESERVED_STATES

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_running": 3, "compute_threads": 1, "chunk_tokens": 32}


# A mixture of experts with a gated delta rule, Mamba 2, both in every layer, convolutions alone, latent attention,
# Mamba 1, no attention at all, and a cache of its own.
KINDS = ("qwen3_next", "nemotron_h", "falcon_h1", "lfm2", "kimi_linear", "jamba", "mamba2", "minimax")


@pytest.fixture(scope="module", params=sorted(HYBRIDS))
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(request.param, tmp_path_factory.mktemp(request.param), 3)


def some_prompts(seed: int, count: int, *, shared: int = 40) -> list[list[int]]:
    """Prompts that share beginnings, cut anywhere."""
    rng = random.Random(seed)
    trunk = [rng.randrange(250) for _ in range(shared)]
    return [
        [*trunk[: rng.randrange(shared + 1)], *(rng.randrange(250) for _ in range(rng.randrange(1, 50)))]
        for _ in range(count)
    ]


def settle(llm: LLM) -> None:
    """Wait until no transfer is in flight."""
    transfers, busy = llm.engine.parts.transfers, [True]
    while transfers is not None and busy[-1]:
        llm.engine.call(lambda: busy.append(transfers.has_work))


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def follow_ups(prompts: list[list[int]], answers: list[RequestOutput]) -> list[list[int]]:
    return [[*prompt, *answer.token_ids, 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("hybrid", KINDS, indirect=True)
def test_hybrid_models_give_transformers_answers(hybrid: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.float32).eval()
    unbind_time_steps(module)
    prompts = some_prompts(1, 4)
    with LLM(hybrid, kv_memory="8MiB", **OPTIONS) as llm:
        answers = llm.generate(prompts, PARAMS)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(answer.token_ids)
        with torch.inference_mode():
            logits = module(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        expected = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
        drawn = torch.tensor([logprob.logprob for logprob in answer.completions[0].logprobs])
        # A token in bulk and the same token alone are computed in different orders.
        torch.testing.assert_close(drawn, expected, atol=2e-3, rtol=0)


def test_logprobs_are_as_exact_as_those_of_transformers(hybrid: Path) -> None:
    drawn, own, exact = (torch.tensor(values, dtype=torch.float64) for values in logprobs(hybrid, some_prompts(1, 12)))
    assert (drawn - exact).square().mean() <= 2 * (own - exact).square().mean()


def test_a_token_changes_the_state_equally_in_prefill_and_decode(tmp_path: Path) -> None:
    """transformers bounds the time steps of Nemotron-H in prompts only."""
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir("nemotron_h", tmp_path, 3), dtype=torch.float32).eval()

    def apart() -> float:
        tokens = torch.tensor([some_prompts(1, 1)[0]])
        with torch.inference_mode():
            whole = module(input_ids=tokens, use_cache=False).logits[0, -1]
            begun = module(input_ids=tokens[:, :-6], use_cache=True)
            for position in range(tokens.shape[1] - 6, tokens.shape[1]):
                begun = module(
                    input_ids=tokens[:, position : position + 1], past_key_values=begun.past_key_values, use_cache=True
                )
        return float((begun.logits[0, -1] - whole).abs().max())

    assert apart() > 1e-4
    assert unbind_time_steps(module)
    assert apart() < 2e-5
    assert not unbind_time_steps(module)


def test_a_model_with_a_time_step_limit_is_refused(tmp_path: Path) -> None:
    directory = tiny_model_dir("granite4", tmp_path, 3, time_step_limit=(0.01, 0.1))
    with pytest.raises(ModelError, match=r"time_step_limit \[0\.01, 0\.1\]\), but transformers does so in prompts"):
        load_model(str(directory), dtype="float32", block_tokens=16)


def test_every_hybrid_family_passes_the_self_check_and_answers(hybrid: Path) -> None:
    with LLM(hybrid, kv_memory="8MiB", **OPTIONS) as llm:
        (first, again) = [llm.generate([list(range(40))], PARAMS)[0] for _ in range(2)]
    assert again.cached.device == 32
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("hybrid", KINDS, indirect=True)
def test_tokens_are_equal_uncached_and_from_device_host_and_disk(hybrid: Path, tmp_path: Path) -> None:
    prompts = some_prompts(2, 4)
    with LLM(hybrid, kv_memory="16MiB", prefix_cache=False, **OPTIONS) as llm:
        cold = llm.generate(prompts, PARAMS)
        turns = follow_ups(prompts, cold)
        cold_turns = llm.generate(turns, PARAMS)
    expected, expected_turns = tokens_of(cold), tokens_of(cold_turns)

    with LLM(hybrid, kv_memory="16MiB", **OPTIONS) as llm:
        assert tokens_of(llm.generate(prompts, PARAMS)) == expected
        found = llm.generate(turns, PARAMS)
        assert tokens_of(found) == expected_turns
        # Each turn continues from the last block that the turn before completed.
        for prompt, turn in zip(prompts, found, strict=True):
            assert turn.cached.device >= (len(prompt) + PARAMS.max_tokens - 1) // 16 * 16 - 16

    offload = OffloadConfig(host="32MiB", disk=tmp_path / "tier", disk_capacity="64MiB")
    with LLM(hybrid, kv_memory="16MiB", offload=offload, **OPTIONS) as llm:
        assert tokens_of(llm.generate(prompts, PARAMS)) == expected
        parts = llm.engine.parts
        settle(llm)
        llm.engine.call(parts.scheduler.forget_all)  # the device forgets, tiers do not
        from_host = llm.generate(turns, PARAMS)
        assert tokens_of(from_host) == expected_turns
        assert sum(turn.cached.host for turn in from_host) > 0
    with LLM(hybrid, kv_memory="16MiB", offload=offload, **OPTIONS) as llm:
        from_disk = llm.generate(turns, PARAMS)
        assert tokens_of(from_disk) == expected_turns
        assert sum(turn.cached.disk for turn in from_disk) > 0


def repeating(seed: int, count: int) -> list[list[int]]:
    """Prompts in which n-grams come back, so that tokens are drafted."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        phrase = [rng.randrange(250) for _ in range(rng.randrange(3, 9))]
        prompts.append((phrase * 12)[: rng.randrange(20, 60)])
    return prompts


def test_a_draft_model_needs_attention_but_its_target_may_have_recurrent_state(tmp_path: Path) -> None:
    target, small = tiny_model_dir("qwen3_5", tmp_path / "target", 3), tiny_model_dir("qwen3", tmp_path / "small", 3)
    prompts = some_prompts(7, 3)
    with LLM(target, kv_memory="8MiB", **OPTIONS) as llm:
        expected = tokens_of(llm.generate(prompts, PARAMS))
    drafting = SpeculativeConfig("draft", 3, model=str(small), adaptive=False)
    with LLM(target, kv_memory="8MiB", speculative=drafting, **OPTIONS) as llm:
        assert tokens_of(llm.generate(prompts, PARAMS)) == expected
        assert llm.metrics.value("draft_tokens_total", "draft") > 0
    with pytest.raises(ModelError, match="keeps recurrent state, which a draft model cannot"):
        LLM(small, kv_memory="8MiB", speculative=SpeculativeConfig("draft", 3, model=str(target)), **OPTIONS)


@pytest.mark.parametrize("hybrid", ["qwen3_next", "lfm2"], indirect=True)
def test_with_drafts_tokens_are_equal_and_a_turn_continues_at_its_last_block(hybrid: Path, tmp_path: Path) -> None:
    long, prompts = replace(PARAMS, max_tokens=40), repeating(6, 5)
    with LLM(hybrid, kv_memory="16MiB", prefix_cache=False, **OPTIONS) as llm:
        cold = llm.generate(prompts, long)
        turns = follow_ups(prompts, cold)
        expected, expected_turns = tokens_of(cold), tokens_of(llm.generate(turns, long))
    offload = OffloadConfig(host="32MiB", disk=tmp_path / "tier", disk_capacity="64MiB")
    drafting = {"speculative": SpeculativeConfig(max_drafts=3, adaptive=False), "offload": offload}
    with LLM(hybrid, kv_memory="16MiB", **drafting, **OPTIONS) as llm:
        found = llm.generate(prompts, long)
        assert tokens_of(found) == expected
        accepted, drafted = (llm.metrics.value(f"{kind}_tokens_total", "ngram") for kind in ("accepted", "draft"))
        assert 0 < accepted < drafted
        again = llm.generate(turns, long)
        assert tokens_of(again) == expected_turns
        for prompt, turn in zip(prompts, again, strict=True):
            assert turn.cached.device >= (len(prompt) + long.max_tokens - 1) // 16 * 16
    with LLM(hybrid, kv_memory="16MiB", **drafting, **OPTIONS) as llm:
        from_disk = llm.generate(turns, long)
        assert tokens_of(from_disk) == expected_turns
        assert sum(turn.cached.disk for turn in from_disk) > 0


@pytest.mark.parametrize("hybrid", KINDS[:1], indirect=True)
@pytest.mark.parametrize("host", [None, "1MiB"])
def test_a_pinned_prefix_keeps_its_state_and_a_dropped_one_loses_it(hybrid: Path, host: str | None) -> None:
    prompt, *others = some_prompts(6, 60, shared=0)
    prompt = (prompt * 3)[:70]
    offload = None if host is None else OffloadConfig(host=host)
    with LLM(hybrid, kv_memory="1MiB", offload=offload, **OPTIONS) as llm:
        (first,) = llm.generate([prompt], PARAMS)
        settle(llm)
        turn = follow_ups([prompt], [first])[0]
        pinned = llm.pin_prefix(turn, ttl_s=60)
        assert pinned.tokens >= 64
        llm.generate(others, PARAMS)  # without the pin, they evict the prefix from both memories
        (again,) = llm.generate([turn], PARAMS)
        assert again.cached.total >= pinned.tokens
        states = llm.engine.parts.states
        assert states is not None
        kept = states.num_keys
        assert sum(llm.drop_prefix(turn).values()) > 0
        assert states.num_keys < kept
        (computed,) = llm.generate([turn], PARAMS)
        assert computed.cached.total == 0 and computed.token_ids == again.token_ids


def test_tokens_are_equal_after_preemption(tmp_path: Path) -> None:
    directory = tiny_model_dir("qwen3_5", tmp_path, 3)
    prompts, long = some_prompts(4, 4, shared=8), replace(PARAMS, max_tokens=40)
    with LLM(directory, kv_memory="16MiB", **OPTIONS) as llm:
        expected = tokens_of(llm.generate(prompts, long))
        blocks = llm.engine.parts.blocks
        llm.engine.reset_prefix_cache()
        held: list[Lease] = []
        llm.engine.call(lambda: held.append(blocks.take(blocks.size - 10)))  # three requests take up to seven each
        assert tokens_of(llm.generate(prompts, long)) == expected
        assert llm.engine.parts.scheduler.num_preemptions > 0
        llm.engine.call(held[0].release)


def test_states_and_blocks_together_use_the_configured_memory(tmp_path: Path) -> None:
    directory = tiny_model_dir("qwen3_next", tmp_path, 3)
    with LLM(directory, kv_memory=4 << 20, **OPTIONS) as llm:
        parts = llm.engine.parts
        region = parts.state_region
        assert region is not None and parts.states is not None
        assert parts.states.size == region.num_states
        allocated = region.stop_byte
        assert allocated <= 4 << 20 < allocated + parts.layout.block_bytes + region.state_bytes
        assert (
            allocated
            == parts.blocks.size * parts.layout.block_bytes + (region.num_states + RESERVED_STATES) * region.state_bytes
        )
    with LLM(directory, kv_memory=4 << 20, state_memory=5 * region.state_bytes, **OPTIONS) as llm:
        assert llm.engine.parts.states is not None
        assert llm.engine.parts.states.size == 5 - RESERVED_STATES
        assert llm.generate([[1, 2, 3]], PARAMS)


@pytest.mark.parametrize("speculative", [None, SpeculativeConfig(proposer="ngram", max_drafts=2)])
def test_metrics_show_the_bytes_of_each_part_of_the_cache(
    tmp_path: Path, speculative: SpeculativeConfig | None
) -> None:
    directory = tiny_model_dir("qwen3_next", tmp_path, 3)
    with LLM(directory, kv_memory=(4 << 20) + 12345, speculative=speculative, **OPTIONS) as llm:
        parts, executor = llm.engine.parts, llm.engine.parts.executor
        shown = {part: llm.metrics.value("kv_memory_bytes", part) for part in ("blocks", "states", "reserved")}
        assert executor._kv.untyped_storage().nbytes() == sum(shown.values())
        assert parts.states is not None and parts.state_region is not None
        assert shown["blocks"] == parts.blocks.size * parts.layout.block_bytes
        assert shown["states"] == parts.states.size * parts.state_region.state_bytes
        assert executor._state_pool is not None
        kept = executor._state_pool.drafts
        assert (kept is not None) == (speculative is not None)
        if kept is not None:
            inputs = sum(
                inputs.numel() * inputs.element_size() for inputs in map(kept.of, parts.state_region.layout.layers)
            )
            assert llm.metrics.value("kv_memory_bytes", "draft_inputs") == inputs


def test_state_shapes_equal_those_of_transformers() -> None:
    config = tiny_config("qwen3_next")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layout = state_layout_of(module, config)
    assert layout is not None
    found = {(tensor.layer, tensor.kind): (tensor.shape, tensor.dtype) for tensor in layout.tensors}
    assert found[0, "conv"] == ((128, 4), "bfloat16")
    assert found[0, "recurrent"] == ((4, 16, 16), "float32")
    assert layout.layers == [0, 1, 2]


def test_a_state_that_covers_other_tokens_gives_nan_logits(tmp_path: Path) -> None:
    model = load_model(str(tiny_model_dir("lfm2", tmp_path, 3)), block_tokens=16)
    assert model.state_layout is not None
    layout, zero, none = model.state_layout, torch.tensor([0]), torch.tensor([-1])
    memory = torch.zeros(4 * layout.state_bytes, dtype=torch.uint8)
    drafts = DraftInputs(layout, 1, 3, torch.device("cpu"))
    pool = StatePool(memory, layout, block_tokens=16, drafts=drafts)
    pool.covered[0] = 5
    one = {
        "slots": zero,
        "num_decode": 0,
        "decode_queries": 1,
        "chunks": [(0, 3)],
        "cu_seqlens_q": torch.tensor([0, 3]),
    }
    write = torch.tensor([1])

    def is_wrong(states: StateBatch) -> bool:
        """The row has NaN for logits."""
        missing = states.finish(torch.zeros(1, 2), torch.tensor([0])).isnan()
        assert missing.all() or not missing.any()
        return bool(missing.all())

    assert not is_wrong(pool.batch(zero, write, none, kv_lens=torch.tensor([8]), **one))
    assert is_wrong(pool.batch(zero, write, none, kv_lens=torch.tensor([9]), **one))
    assert is_wrong(pool.batch(none, write, none, kv_lens=torch.tensor([9]), **one))  # the state of zeros

    # A decode row may begin as far behind its state as inputs of drafts are kept, if they are those behind the state.
    row = {"slots": zero, "num_decode": 1, "decode_queries": 1, "chunks": (), "cu_seqlens_q": torch.tensor([0, 1])}
    for first, length, behind in ((5, 8, 2), (5, 9, None), (6, 8, None)):
        drafts.first[0], drafts.count[0] = first, 2
        states = pool.batch(zero, write, none, kv_lens=torch.tensor([length]), **row)
        assert states.behind.tolist() == [behind or 0]
        assert is_wrong(states) == (behind is None)

    # A chunk leaves none.
    chunk = pool.batch(none, zero, none, kv_lens=torch.tensor([3]), **one)
    chunk.finish(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    assert (int(pool.covered[0]), int(drafts.first[0]), int(drafts.count[0])) == (3, 3, 0)


@pytest.mark.parametrize("drafts", [0, 3])
def test_logits_computed_from_a_wrong_state_are_nan(tmp_path: Path, drafts: int) -> None:
    model = load_model(str(tiny_model_dir("lfm2", tmp_path, 3)), block_tokens=16)
    assert model.state_layout is not None
    kept = DraftInputs(model.state_layout, 2, drafts, torch.device("cpu")) if drafts else None
    memory = torch.zeros(5 * model.state_layout.state_bytes, dtype=torch.uint8)
    pool = StatePool(memory, model.state_layout, block_tokens=16, drafts=kept)
    none, starts = torch.full((2,), -1), torch.tensor([0, 1])

    def step(reads: torch.Tensor, lengths: list[int], logits_indices: list[int]) -> list[bool]:
        """A step of two rows of one token each, which write states 0 and 1; and which of the logits are NaN."""
        states = pool.batch(
            reads,
            starts,
            torch.tensor([2, -1]),
            slots=starts,
            cu_seqlens_q=torch.tensor([0, 1, 2]),
            kv_lens=torch.tensor(lengths),
            num_decode=2,
            decode_queries=1,
            chunks=(),
        )
        logits = states.finish(torch.zeros(len(logits_indices), 2), torch.tensor(logits_indices, dtype=torch.int64))
        return [bool(row.isnan().all()) for row in logits]

    assert step(none, [16, 1], [1]) == [False]  # the first row begins at token 15 with a state of zeros: no logits
    assert step(starts, [17, 2], [0, 1]) == [True, False]
    assert step(torch.tensor([2, 1]), [17, 3], [0, 1]) == [True, False]  # nor does it leave a checkpoint
    if kept is not None:
        kept.count[0] = drafts  # behind the wrong state: with them, no row may begin there either
        for start in range(drafts):
            assert step(starts, [start + 1, 4 + start], [0, 1]) == [True, False]
            kept.count[0] = drafts


def test_the_self_check_refuses_states_that_cover_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = StateBatch.finish

    def miscounted(self: StateBatch, logits: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        logits = finish(self, logits, logits_indices)
        self.pool.covered[self.writes] += 1
        return logits

    monkeypatch.setattr(StateBatch, "finish", miscounted)
    with pytest.raises(ModelError, match="the paged path computes the logits differently"):
        load_model(str(tiny_model_dir("lfm2", tmp_path, 3)), block_tokens=16)


def test_the_self_check_refuses_a_layer_that_ignores_earlier_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_model_dir("lfm2", tmp_path, 3)
    from sidestream.models import recurrent

    packed = recurrent._packed

    def forgetting(
        own: object, argument: str, layer: int, hidden: torch.Tensor, batch: object, *how: object
    ) -> torch.Tensor:
        for tensors in batch.pool.layer(layer).values():  # type: ignore[attr-defined]
            tensors[batch.reads] = 0  # type: ignore[attr-defined]
        return packed(own, argument, layer, hidden, batch, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(recurrent, "_packed", forgetting)
    with pytest.raises(ModelError, match="recurrent layer 0 gives other values in chunks than in one piece"):
        load_model(str(directory), block_tokens=16)


def test_too_small_state_memory_options_are_refused_at_start(tmp_path: Path) -> None:
    directory = tiny_model_dir("qwen3_5", tmp_path, 3)
    for options, reason in (
        (
            {"state_memory": 1000},
            r"state_memory \(1000 bytes\) holds 0 recurrent states of \d+ bytes: give state_memory",
        ),
        ({"kv_memory": 40_000}, r"half of kv_memory \(40000 bytes\) holds"),
        ({"state_interval": 24}, "must be a multiple of block_tokens"),
    ):
        with pytest.raises(ConfigError, match=reason):
            LLM(directory, **{"kv_memory": "8MiB", **OPTIONS, **options})


def test_a_stateful_layer_without_a_batch_computes_as_transformers_does(tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir("granite4", tmp_path, 3)).eval()
    layer = stateful_modules(module)[0]
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = layer(hidden)
        StatefulLayers(module)
        assert layer(hidden).equal(expected)
