"""Pages: the blocks of layers with a sliding window. A request keeps, stores and loads only those in its window."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_rig import Rig, prompts, serving

from proof.tiny_models import WINDOW, tiny_model_dir
from proof.toy import ToyModel
from sidestream import LLM, OffloadConfig, SamplingParams, SpeculativeConfig

PROMPT = prompts(21, 1, longest=1)[0] + list(range(1, 30))
"""30 tokens: 7 blocks of 4 tokens that a cache may supply. With a window of 6 tokens, a request that continues at token
28 reads the pages of blocks 5 and 6."""
PAGE = 2
"""Blocks of a page: each holds one of the toy's 3 layers, of which 2 have a window."""


def windowed(**options: Any) -> Any:
    return serving(model=ToyModel(window=6), **{"slots": 64, **options})


def moved(rig: Rig, direction: str) -> int:
    """Blocks that were stored or loaded so far."""
    rig.settle()
    return rig.counted("transfer_bytes_total", direction) // rig.engine.parts.layout.block_bytes


def page_parts(rig: Rig, index: int) -> list[bytes]:
    scheduler = rig.engine.parts.scheduler
    return scheduler.part_keys(scheduler.keys_of(PROMPT)[index : index + 1])


def test_a_request_is_longer_than_a_pool_that_holds_all_its_layers() -> None:
    """160 tokens take 40 blocks and 80 blocks of pages: the pool has 72."""
    with windowed(blocks=24, slots=0) as rig:
        assert rig.engine.parts.blocks.size == 72
        rig.ask(prompts(3, 1, longest=1)[0] * 120, 40)


def test_tiers_get_the_pages_of_the_windows_before_which_prompts_continue() -> None:
    with windowed() as rig:
        rig.ask(PROMPT)  # computes 37 tokens: 9 blocks
        assert moved(rig, "store") == 9 + PAGE * 2 + PAGE * 2  # before tokens 28 and 36
        tiers = rig.engine.parts.tiers
        assert tiers is not None
        held = [index for index in range(7) if tiers.host.pool.get(page_parts(rig, index)[0]) is not None]
        assert held == [5, 6]


def test_a_load_brings_the_pages_in_the_window_alone() -> None:
    with windowed() as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        assert rig.ask(PROMPT).cached.host == 28
        assert moved(rig, "load") == 7 + PAGE * 2


def test_a_prompt_without_the_pages_of_its_window_is_computed_and_found_from_then_on() -> None:
    with windowed() as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        assert rig.ask([*PROMPT[:16], 5, 6]).cached.total == 0  # tiers hold its 4 blocks, and no page before token 16
        rig.settle()
        rig.forget_device()
        assert rig.ask([*PROMPT[:16], 7]).cached.host == 16  # prompts were seen to branch there


def test_pages_that_a_prompt_finds_on_the_device_are_stored() -> None:
    with windowed() as rig:
        rig.ask(PROMPT)
        assert rig.ask([*PROMPT[:16], 5, 6]).cached.device == 16
        rig.settle()
        rig.forget_device()
        assert rig.ask([*PROMPT[:16], 7]).cached.host == 16


def test_a_page_of_which_a_part_is_gone_is_no_hit() -> None:
    with windowed() as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        tiers = rig.engine.parts.tiers
        assert tiers is not None
        gone = tiers.host.pool.get(page_parts(rig, 6)[1])
        assert gone is not None
        rig.engine.call(lambda: tiers.host.pool.forget([gone]))
        assert rig.ask(PROMPT).cached.total == 0


def test_pages_of_an_answer_are_stored_when_its_request_ends() -> None:
    with windowed() as rig:
        answer = rig.ask(PROMPT, 20).token_ids()
        rig.settle()
        rig.forget_device()
        assert rig.ask([*PROMPT, *answer, 3]).cached.host == 48


def test_non_finite_logits_drop_the_pages_of_their_request() -> None:
    with windowed() as rig:
        rig.ask(PROMPT)
        parts = rig.engine.parts
        keys, cache = parts.scheduler.keys_of(PROMPT), parts.scheduler._prefix_cache
        held: Any = SimpleNamespace(ids=parts.blocks.match(keys))
        broken: Any = SimpleNamespace(own_blocks=0, found_blocks=0, published_blocks=7, keys=keys, blocks=held)
        assert parts.blocks.get(page_parts(rig, 6)[0]) is not None
        gone: list[bytes] = []
        rig.engine.call(lambda: gone.extend(cache.invalidate(broken)))
        assert page_parts(rig, 6)[0] in gone  # tiers forget it, too
        assert parts.blocks.get(page_parts(rig, 6)[0]) is None


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "granite_swa", "gpt_oss"])
def test_real_models_never_read_a_page_that_is_behind_the_window(family: str, tmp_path: Path) -> None:
    """Chunks, drafts, preemption and loads. What is not loaded is NaN here, so an answer that depends on it would be an
    error.
    """
    directory = tiny_model_dir(family, tmp_path, 0)
    prompt, greedy = [*range(3, 33)] * 2, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    small = {"kv_memory": "80KiB", "block_tokens": 4, "max_model_len": 128, "chunk_tokens": 8}
    lookup = SpeculativeConfig(proposer="ngram", max_drafts=3)
    with LLM(directory, offload=OffloadConfig(host="16MiB"), speculative=lookup, **small) as llm:
        parts = llm.engine.parts
        windows = parts.scheduler._windows
        assert windows is not None and windows._layers.window == WINDOW
        assert parts.costs is not None
        parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # loading always counts as faster
        asked = [prompt[:stop] for stop in (33, 30, 25)]
        expected = [expected_of(directory, one) for one in asked]
        for _ in range(2):
            assert [list(output.token_ids) for output in llm.generate(asked, greedy)] == expected
            assert parts.transfers is not None and parts.transfers.flush(timeout_s=10)
            parts.blocks.forget_all()
            parts.executor._kv.fill_(torch.nan)
        assert list(llm.generate(asked[:1], greedy)[0].token_ids) == expected[0]
        assert parts.metrics.value("transfer_bytes_total", "load") > 0
        # Gemma 3's pages have five blocks: the pool is too small for two of the requests at once.
        assert parts.scheduler.num_preemptions or windows._layers.parts == 5


def expected_of(directory: Path, prompt: list[int]) -> list[int]:
    """What transformers generates."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)
    return tokens[0, len(prompt) :].tolist()
