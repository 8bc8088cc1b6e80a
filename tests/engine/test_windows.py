"""Layers with a sliding window, in blocks that hold all layers: a load omits KV before the window, and no request
attends to missing KV.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import Rig, prompts, serving

from proof.tiny_models import WINDOW, tiny_model_dir
from proof.toy import StatefulToyModel, ToyModel
from sidestream import LLM, OffloadConfig, SamplingParams
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.kv.state_layout import blocks_per_state

WINDOW_OF_TOY = 6
"""With blocks of 4 tokens, a request that continues at token 28 attends to tokens from 23 on in layer 1. In a page,
this layer would leave too much unused, so it has no blocks of its own.
"""
PROMPT = prompts(21, 1, longest=1)[0] + list(range(1, 30))  # 30 tokens: 7 blocks that a cache may supply
LAYER_BYTES = 4 * 2 * 2 * 4
BLOCK_BYTES = 3 * LAYER_BYTES


def windowed(**options: Any) -> Any:
    return serving(model=ToyModel(window=WINDOW_OF_TOY, windowed=(1,)), slots=24, **options)


def loaded_bytes(rig: Rig) -> int:
    return rig.counted("transfer_bytes_total", "load")


def forget_device(rig: Rig) -> None:
    rig.settle()
    rig.forget_device()


def bring_back(rig: Rig) -> None:
    """PROMPT's blocks are on the device again, those before its window without layer 1."""
    rig.ask(PROMPT)
    forget_device(rig)
    rig.ask(PROMPT)
    rig.settle()


@pytest.mark.parametrize("one_layer_a_group", [True, False])
def test_a_load_omits_layers_of_blocks_before_their_window(
    one_layer_a_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if one_layer_a_group:
        monkeypatch.setattr(CpuDevice, "segment_bytes", 1)
    with windowed() as rig:
        rig.ask(PROMPT)
        forget_device(rig)
        assert rig.ask(PROMPT).cached.host == 28
        rig.settle()
        # Blocks 0 to 4 end before token 23: only layers 0 and 2 of them are loaded.
        assert loaded_bytes(rig) == 5 * 2 * LAYER_BYTES + 2 * BLOCK_BYTES


def test_a_longer_prompt_reuses_blocks_loaded_without_all_layers() -> None:
    with windowed() as rig:
        bring_back(rig)
        before = loaded_bytes(rig)
        assert rig.ask([*PROMPT[:28], 5, 6, 7]).cached.device == 28
        assert loaded_bytes(rig) == before


def test_a_shorter_prompt_loads_the_blocks_in_its_window_again() -> None:
    with windowed() as rig:
        bring_back(rig)
        before = loaded_bytes(rig)
        # It continues at token 16 and attends to tokens from 11 on: blocks 2 and 3 lack layers, 0 and 1 may.
        cached = rig.ask([*PROMPT[:16], 5, 6]).cached
        rig.settle()
        assert (cached.device, cached.host) == (8, 8)
        assert loaded_bytes(rig) - before == 2 * BLOCK_BYTES
        # Now they are whole on the device, and serve the next one.
        assert rig.ask([*PROMPT[:16], 9]).cached.device == 16
        # It attends to tokens from 7 on: block 1 still lacks layers. It is loaded, and what comes after it, too.
        cached = rig.ask([*PROMPT[:12], 9]).cached
        assert (cached.device, cached.host) == (4, 8)


def test_a_shorter_prompt_is_computed_if_no_tier_has_the_blocks_of_its_window() -> None:
    with windowed() as rig:
        bring_back(rig)
        rig.forget_host()
        assert rig.ask([*PROMPT[:16], 5, 6]).cached.total == 0
        rig.settle()
        rig.forget_device()
        assert rig.ask([*PROMPT[:16], 7]).cached.host == 16  # what was computed is whole, and was stored


def test_a_block_loaded_without_all_layers_is_never_stored() -> None:
    with windowed() as rig:
        bring_back(rig)
        keys = rig.engine.parts.scheduler._prefix_cache.keys_of(PROMPT)
        assert rig.engine.parts.scheduler.store_again(keys[:5]) is None
        stored = rig.engine.parts.scheduler.store_again(keys)
        assert stored is not None
        plan, lease = stored
        assert plan.keys == tuple(keys[5:7])
        lease.release()


def test_checkpoints_of_states_work_with_windows() -> None:
    model = StatefulToyModel(window=WINDOW_OF_TOY)
    assert model.state_layout is not None
    with serving(model=model, blocks=96, slots=96) as rig:
        states = rig.engine.parts.states
        assert states is not None
        for _ in range(2):
            rig.ask(PROMPT)
            forget_device(rig)
            rig.engine.call(states.forget_all)
        parts = rig.counted("transfer_bytes_total", "load") - 5 * LAYER_BYTES - 2 * BLOCK_BYTES
        assert rig.ask(PROMPT).cached.host == 28
        assert parts == blocks_per_state(model.state_layout, BLOCK_BYTES) * BLOCK_BYTES  # always whole
        rig.settle()
        for stop in (16, 20, 24):
            rig.ask([*PROMPT[:stop], 5, 6])


def test_real_models_never_read_layers_that_a_load_omitted(tmp_path: Path) -> None:
    """What is not loaded is NaN here, so an answer that depends on it would be an error."""
    directory = tiny_model_dir("mistral", tmp_path, 0)
    offload = OffloadConfig(host="16MiB")
    prompt, greedy = list(range(3, 63)), SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(directory, kv_memory="1MiB", block_tokens=4, max_model_len=128, offload=offload) as llm:
        parts = llm.engine.parts
        assert max(parts.layout.windows) == WINDOW
        assert parts.costs is not None
        parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # loading always counts as faster
        expected = {stop: llm.generate([prompt[:stop]], greedy)[0].token_ids for stop in (60, 43, 25)}
        for stop, cut in ((60, 0), (43, 0), (25, 0), (60, 1), (25, 1)):
            if not cut:
                assert parts.transfers is not None and parts.transfers.flush(timeout_s=10)
                parts.blocks.forget_all()
                parts.executor._kv.fill_(torch.nan)
            output = llm.generate([prompt[:stop]], greedy)[0]
            assert output.token_ids == expected[stop]
            assert cut or output.cached.host == (stop - 1) // 4 * 4
        whole = (59 + 42 + 24) // 4 * parts.layout.block_bytes
        assert 0 < parts.metrics.value("transfer_bytes_total", "load") < whole
