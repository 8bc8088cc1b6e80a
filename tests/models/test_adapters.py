"""LoRA adapters: rows of one batch give the tokens of models with merged weights, and tiers keep their KV apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_rig import edit_adapter, make_adapter, merge
from batch_rig import one_row

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, ConfigError, ModelError, RequestOutput, SamplingParams
from sidestream.errors import RequestRejected
from sidestream.models import load_model
from sidestream.models.compiled import compile_layers, compiling
from sidestream.models.joined import AdaptedJoin, JoinedPart, add_adapters
from sidestream.ops.adapters import launch_add_adapters
from sidestream_kv.config import OffloadConfig

PROMPT = list(range(5, 45))
MLP = ("q_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("adapted") / "tiny", seed=1)


@pytest.fixture(scope="module")
def adapters(tiny: Path) -> dict[str, Path]:
    return {
        "a": make_adapter(tiny, tiny.parent / "a", 1),
        "b": make_adapter(tiny, tiny.parent / "b", 2, parts=MLP, r=8, use_rslora=True),
    }


@pytest.fixture(scope="module")
def merged(tiny: Path, adapters: dict[str, Path]) -> dict[str, Path]:
    return {"": tiny, **{name: merge(tiny, path, tiny.parent / f"merged {name}") for name, path in adapters.items()}}


def engine(model: Path, **options: Any) -> LLM:
    return LLM(str(model), **{"device": "cpu", "dtype": "float32", "block_tokens": 4, **options})


def answers(llm: LLM, names: list[str], prompt: list[int] = PROMPT) -> list[RequestOutput]:
    params = [SamplingParams(adapter=one, max_tokens=12, temperature=0, ignore_eos=True, logprobs=0) for one in names]
    return llm.generate([prompt] * len(names), params)


def spoken(output: RequestOutput) -> tuple[tuple[int, ...], list[float]]:
    return output.token_ids, [one.logprob for one in output.completions[0].logprobs]


@pytest.fixture(scope="module")
def expected(merged: dict[str, Path]) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    found = {}
    for name, path in merged.items():
        with engine(path) as llm:
            found[name] = spoken(answers(llm, [""])[0])
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"chunk_tokens": 8, "token_budget": 32}, {"kv_memory": 24 * 4 * 768}],
    ids=["whole prompts", "chunks", "preemption"],
)
def test_rows_of_one_batch_give_the_tokens_of_merged_weights(
    options: dict[str, Any], tiny: Path, adapters: dict[str, Path], expected: dict[str, Any]
) -> None:
    with engine(tiny, max_loras=3, **options) as llm:
        for name, path in adapters.items():
            llm.adapters.load(name, str(path))
        names = ["", "a", "b", "a"]
        for _ in range(2):  # the second time, with KV of the first
            found = dict(zip(names, answers(llm, names), strict=True))
            for name, output in found.items():
                tokens, logprobs = spoken(output)
                assert tokens == expected[name][0]
                assert logprobs == pytest.approx(expected[name][1], abs=1e-4)
        preempted = llm.metrics.value("preemptions_total") > 0
        assert preempted == ("kv_memory" in options)
        assert preempted or all(output.cached.total for output in found.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("eager", [True, False])
def test_a_gpu_gives_the_tokens_of_merged_weights(
    eager: bool, tiny: Path, adapters: dict[str, Path], expected: dict[str, Any]
) -> None:
    options = {"device": "cuda", "block_tokens": 16, "kv_memory": "64MiB", "max_running": 4, "chunk_tokens": 64}
    with engine(tiny, max_loras=3, eager=eager, **options) as llm:
        for name, path in adapters.items():
            llm.adapters.load(name, str(path))
        names = ["", "a", "b", "a"]
        for name, output in zip(names, answers(llm, names), strict=True):
            tokens, logprobs = spoken(output)
            assert tokens == expected[name][0]
            assert logprobs == pytest.approx(expected[name][1], abs=2e-3)  # float32 sums in another order


def test_tiers_keep_adapters_apart_and_find_the_same_one_under_another_name(
    tiny: Path, adapters: dict[str, Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    offload = OffloadConfig(host="16MiB", disk=str(tmp_path / "kv"), disk_capacity="64MiB")
    with engine(tiny, lora_modules=(f"a={adapters['a']}",), offload=offload) as llm:
        answers(llm, ["a"])
    with engine(tiny, max_loras=2, offload=offload) as llm:
        llm.adapters.load("other", str(adapters["b"]))
        llm.adapters.load("again", str(adapters["a"]))
        found = dict(zip(("", "other", "again"), answers(llm, ["", "other", "again"]), strict=True))
    assert {name: output.cached.by_tier.get("disk", 0) for name, output in found.items()} == {
        "": 0,
        "other": 0,
        "again": 36,
    }
    assert found["again"].token_ids == expected["a"][0]


def test_an_adapter_that_was_replaced_gives_its_own_tokens(
    tiny: Path, adapters: dict[str, Path], expected: dict[str, Any]
) -> None:
    with engine(tiny, lora_modules=(f"a={adapters['b']}",)) as llm:
        assert answers(llm, ["a"])[0].token_ids == expected["b"][0]
        with pytest.raises(RequestRejected, match="all 1 slots are in use: unload an adapter, or start with more"):
            llm.adapters.load("c", str(adapters["a"]))
        with pytest.raises(RequestRejected, match="an adapter 'a' is loaded: unload it first"):
            llm.adapters.load("a", str(adapters["a"]))
        llm.adapters.unload("a")
        with pytest.raises(RequestRejected, match="no adapter 'a' is loaded"):
            answers(llm, ["a"])
        llm.adapters.load("a", str(adapters["a"]))
        assert answers(llm, ["a"])[0].token_ids == expected["a"][0]


def test_compiled_layers_join_weights_and_adapters(tiny: Path, adapters: dict[str, Path]) -> None:
    model = load_model(str(tiny), dtype="float32", block_tokens=4)
    model.add_adapters(slots=2, rank=8)
    tokens = torch.tensor(PROMPT)

    def logits(name: str) -> torch.Tensor:
        assert model.adapters is not None
        model.adapters.put(2, model.adapters.read(str(adapters[name])))
        model.adapters.choose(torch.full((len(PROMPT),), 2))
        batch = one_row(torch.zeros(model.layout.shape(10)), len(PROMPT))
        return model.forward(tokens, torch.arange(len(PROMPT)), batch, torch.arange(len(PROMPT)))

    expected = {name: logits(name) for name in adapters}
    compile_layers(model, backend="eager")
    with compiling():
        for name in adapters:
            torch.testing.assert_close(logits(name), expected[name], atol=1e-4, rtol=1e-4)
    layer = model.module.model.layers[0]
    query, value, output = (getattr(layer.self_attn, name)._joined[0] for name in ("q_proj", "v_proj", "o_proj"))
    assert isinstance(query, AdaptedJoin) and query is value is not output
    assert layer.mlp.down_proj._joined and isinstance(layer.mlp.down_proj.base, JoinedPart)


@pytest.mark.parametrize(
    ("count", "sizes", "columns", "dtype"),
    [(5, (64, 32, 32), 24, torch.float32), (70, (48, 16), 160, torch.float32), (33, (96,), 16, torch.float16)],
)
def test_the_kernel_adds_the_adapters_of_joined_projections(
    count: int, sizes: tuple[int, ...], columns: int, dtype: torch.dtype
) -> None:
    random, outputs = torch.Generator().manual_seed(0), sum(sizes)
    product = torch.randn(count, outputs + len(sizes) * columns, generator=random).to(dtype)
    mask = (torch.rand(count, columns, generator=random) < 0.3).to(dtype)
    up = torch.randn(outputs, columns, generator=random).to(dtype)
    ends = [*itertools.accumulate(sizes)]
    result = torch.full((count, outputs), torch.nan, dtype=dtype)
    launch_add_adapters(product, mask, up, result, ends)
    expected = add_adapters(product.double(), mask.double(), up.double(), ends)
    torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5 if dtype is torch.float32 else 1e-2)


@pytest.fixture(scope="module")
def roomy(tiny: Path) -> Iterator[LLM]:
    with engine(tiny, max_loras=1, max_lora_rank=4) as llm:
        yield llm


_numbers = itertools.count()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .'lm_head'.*not supported"),
        ({"r": 8}, "the rank of .*_proj is 8, and adapters may have up to 4: raise max_lora_rank"),
        ({"lora_alpha": "16"}, "lora_alpha of .*_proj is '16': give a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha of .*_proj is 1000*: give a finite number"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is .'q_proj'.: give an object of regular expressions"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern is .'.': 1.: give an object of regular expressions"),
        ({"parts": ("embed_tokens",), "r": 4}, "embed_tokens.* cannot have adapters; those that can: down_proj, g"),
    ],
)
def test_an_adapter_that_is_not_supported_is_refused_by_name(
    config: dict[str, Any], message: str, roomy: LLM, tiny: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny, tmp_path / "bad", 1, **config)
    with pytest.raises(RequestRejected, match=message):
        roomy.adapters.load("bad", str(adapter))


def _of_another_model(adapter: Path) -> None:
    edit_adapter(adapter, lambda name, tensor: tensor[:, :-1] if "lora_A" in name else tensor)


def _halved(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _without_rank(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0] if "lora_A" in name else tensor[:, :0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_of_another_model, "it is an adapter of another model"),
        (_halved, "adapter_model.safetensors cannot be read"),
        (lambda adapter: edit_adapter(adapter, lambda name, tensor: tensor * float("nan")), "not finite"),
        (lambda adapter: edit_adapter(adapter, lambda name, tensor: tensor * 3e38), "not finite .* which is 4:"),
        (lambda adapter: edit_adapter(adapter, lambda name, tensor: tensor.char()), "int8 .*: save it in float32"),
        (lambda adapter: edit_adapter(adapter, lambda name, tensor: tensor.sum()), r"has matrices \[\] and \[\]"),
        (lambda adapter: edit_adapter(adapter, _without_rank), r"the model takes \[1, 64\] and \[32, 1\]"),
        (
            lambda adapter: edit_adapter(adapter, lambda name, tensor: None if "lora_B" in name else tensor),
            "only one of the matrices",
        ),
        (lambda adapter: (adapter / "adapter_config.json").unlink(), "has no adapter_config.json or no adapter_model"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("{"), "adapter_config.json"),
    ],
)
def test_a_damaged_adapter_is_refused(damage: Any, message: str, roomy: LLM, tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny, tmp_path / "bad", 1)
    damage(adapter)
    with pytest.raises(RequestRejected, match=message):
        roomy.adapters.load("bad", str(adapter))
    assert not roomy.adapters.names


def test_adapters_that_do_not_fit_the_memory_are_refused_by_the_options(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_loras 100000, max_lora_rank 1000000.* memory of .* does not fit"):
        engine(tiny, max_loras=100_000, max_lora_rank=1_000_000)


def test_an_adapter_at_start_that_cannot_be_loaded_stops_the_start(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter x: the adapter is not loaded: .*none has no adapter_config.json"):
        engine(tiny, lora_modules=(f"x={tmp_path}/none",))


@pytest.mark.parametrize("kind", ["qwen2", "mixtral", "gemma2"])
def test_models_with_biases_experts_and_windows_take_adapters(kind: str, tmp_path: Path) -> None:
    model = tiny_model_dir(kind, tmp_path / kind, seed=1)
    adapter = make_adapter(model, tmp_path / "adapter", 1)
    with engine(model, lora_modules=(f"a={adapter}",)) as llm, engine(merge(model, adapter, tmp_path / "m")) as other:
        assert answers(llm, ["a"])[0].token_ids == answers(other, [""])[0].token_ids
