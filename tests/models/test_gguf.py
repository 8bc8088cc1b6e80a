"""GGUF files: weights stay packed, the values are those of their format, and what cannot be served is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_rig import edit_json, refusal, refused
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Qwen2MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from typer.testing import CliRunner

from proof.gguf_models import random_blocks, write_gguf
from proof.tiny_models import byte_tokenizer, tiny_config
from sidestream import LLM, OffloadConfig, SamplingParams, SpeculativeConfig
from sidestream.cli.app import app
from sidestream.llm import RequestOutput
from sidestream.models import ggml, load_model
from sidestream.models.catalog import resolve
from sidestream.models.gguf_file import QUANTISED, Kind, gguf_in, read_gguf
from sidestream.models.packed import GgmlLinear, copies_of
from sidestream_kv.kv.pool import Lease

needs_ggml = pytest.mark.skipif(ggml.library() is None, reason="needs the extra gguf")

# The shapes of the parts of a Q4_K_M: most matrices in Q4_K, some in Q6_K.
ROUNDED = "rounded"
KINDS = {"": "Q4_K", "ffn_down": "Q6_K", "ffn_down_exps": "Q6_K", "output": "Q6_K", "token_embd": "Q6_K"}
KINDS_OF_GPT_OSS = {"": "Q8_0", "ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4"}
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
OPTIONS = {"device": "cpu", "max_running": 3, "compute_threads": 1, "chunk_tokens": 32}


def gguf_dir(family: str, directory: Path, **changes: int) -> Path:
    """A tiny model in a directory: its configs and tokenizer, and its weights in a GGUF file."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    own: dict[str, Any] = (
        {"moe_intermediate_size": 256, "norm_topk_prob": family == "qwen3_moe"} if "moe" in family else {}
    )
    own |= {"tie_word_embeddings": True, "query_pre_attn_scalar": 64} if "gemma" in family else {}
    own |= {"layer_types": None} if family == "gpt_oss" else {}
    config = tiny_config("qwen3_moe" if family == "qwen2_moe" else family, **sizes, head_dim=64, **own, **changes)
    if family == "qwen2_moe":
        config = Qwen2MoeConfig(**{**config.to_dict(), "model_type": family}, shared_expert_intermediate_size=512)
    config.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    write_gguf(config, directory / "tiny.gguf", KINDS_OF_GPT_OSS if family == "gpt_oss" else KINDS, 1)
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_dir("llama", tmp_path_factory.mktemp("made") / "llama")


@pytest.fixture(scope="module")
def made_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_dir("qwen3_moe", tmp_path_factory.mktemp("made") / "moe")


@pytest.fixture
def experts(made_experts: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made_experts, tmp_path / "moe"))


@pytest.fixture
def llama(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "llama"))


def prompts() -> list[list[int]]:
    """Prompts that share a beginning, and in which n-grams come back."""
    random = np.random.default_rng(4)
    trunk, phrase = (random.integers(0, 250, count).tolist() for count in (40, 6))
    return [[*trunk, *(phrase * 8)[:length]] for length in (5, 30, 44, 17)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def rounded(states: torch.Tensor, size: int) -> torch.Tensor:
    """The states as ggml's products see them: rounded to 127 steps of the largest one of each block of 32 or 256."""
    blocks = states.float().unflatten(-1, (-1, size))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    if size == 32:
        scale = largest.abs() / 127
        return ((blocks / scale).round() * scale.half().float()).flatten(-2)
    inverse = -127 / largest
    return ((blocks * inverse).round().clamp(max=127) / inverse).flatten(-2)


def rounded_experts(experts: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts of transformers, with rounded inputs of products; those of gpt-oss for MXFP4."""

    def product(states: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(experts, name)[chosen].transpose(-1, -2 if experts.is_transposed else -1)
        multiplied = torch.einsum("tki,tkoi->tko", rounded(states, 32 if experts.is_transposed else 256), weight)
        return multiplied + getattr(experts, f"{name}_bias")[chosen] if experts.has_bias else multiplied

    inner = experts._apply_gate(product(states[:, None].expand(-1, chosen.shape[1], -1), "gate_up_proj"))
    return torch.einsum("tkh,tk->th", product(inner, "down_proj"), weights)


ALL_EXPERTS_FUNCTIONS.register(ROUNDED, rounded_experts)


@needs_ggml
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_rows_and_products_of_each_kind_are_those_of_its_values(kind: Kind) -> None:
    library = ggml.library()
    assert library is not None
    packed = random_blocks(kind.name, 96, 512, np.random.default_rng(0), deviation=0.04)
    values = torch.from_numpy(np.asarray(dequantize(packed, GGMLQuantizationType(kind.number))))
    matrix = ggml.Matrix(library, torch.from_numpy(packed), kind.number, (96, 512))
    assert matrix.rows(torch.tensor([7, 0, 95])).equal(values[[7, 0, 95]])
    # These two multiply their smallest value by a sum of inputs in half precision.
    bound = 2e-3 if kind.name.endswith("_1") else 1e-6
    states = torch.randn(20, 512, generator=torch.Generator().manual_seed(0))
    for rows in (1, 20):
        expected = rounded(states[:rows], kind.values) @ values.t()
        assert (matrix.product(states[:rows]) - expected).norm() < bound * expected.norm()
    assert matrix.product(states[:0]).shape == (0, 96)


REPACKABLE = [
    kind for kind in QUANTISED if (library := ggml.library()) is not None and library.repacks(kind.number, (96, 512))
]


@pytest.mark.parametrize("kind", REPACKABLE, ids=lambda kind: kind.name)
def test_a_repacked_copy_computes_products_of_few_rows_in_their_order(kind: Kind) -> None:
    matrix, packed, order = repackable(kind)
    values = torch.from_numpy(np.asarray(dequantize(packed, GGMLQuantizationType(kind.number))))[order]
    states = torch.randn(20, 512, generator=torch.Generator().manual_seed(0))
    mapped = [matrix.product(states[:rows]) for rows in (1, 8, 20)]
    assert matrix.repack()
    for rows, before in zip((1, 8, 20), mapped, strict=True):
        expected = rounded(states[:rows], kind.values) @ values.t()
        for product in (before, matrix.product(states[:rows])):
            assert (product - expected).norm() < 1e-6 * expected.norm()
    assert matrix.tensor(1) == matrix.tensor(8) != matrix.tensor(9)
    assert matrix.rows(torch.tensor([5])).equal(matrix.rows(torch.tensor([5, 6]))[:1])


@needs_ggml
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "F32"])
def test_a_stack_multiplies_each_row_by_the_experts_that_it_chooses(name: str) -> None:
    library, draw = ggml.library(), torch.Generator().manual_seed(0)
    assert library is not None
    if name == "F32":
        values = torch.randn(4, 96, 512, generator=draw) / 25
        stack, size = ggml.Matrix(library, values.view(torch.uint8), 0, (4, 96, 512)), 0
    else:
        kind = next(kind for kind in QUANTISED if kind.name == name)
        packed = random_blocks(name, 4 * 96, 512, np.random.default_rng(0), deviation=0.04)
        values = torch.from_numpy(np.asarray(dequantize(packed, GGMLQuantizationType(kind.number)))).view(4, 96, 512)
        stack, size = ggml.Matrix(library, torch.from_numpy(packed), kind.number, (4, 96, 512)), kind.values
        repacked = stack.repack()
        assert repacked == library.repacks(kind.number, (4, 96, 512))
        assert repacked == (stack.tensor(8) != stack.tensor(9))
    for rows in (1, 3, 20):
        states = torch.randn(rows, 512, generator=draw)
        chosen = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(rows)])
        expected = torch.einsum("th,tkoh->tko", rounded(states, size) if size else states, values[chosen])
        assert (stack.product(states, chosen) - expected).norm() < 1e-6 * expected.norm()
    assert stack.product(states[:0], chosen[:0]).shape == (0, 2, 96)


def repackable(kind: Kind) -> tuple[ggml.Matrix, NDArray[np.uint8], torch.Tensor]:
    """A matrix, its bytes, and its rows in the order of its products."""
    library, order = ggml.library(), torch.arange(96).flip(0)
    assert library is not None
    packed = random_blocks(kind.name, 96, 512, np.random.default_rng(0), deviation=0.04)
    return ggml.Matrix(library, torch.from_numpy(packed), kind.number, (96, 512), order), packed, order


@needs_ggml
@pytest.mark.parametrize("reason", ["processor", "shape"])
def test_a_matrix_without_kernels_for_another_order_is_not_repacked(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, kind = ggml.library(), next(kind for kind in QUANTISED if kind.name == "Q4_K")
    assert library is not None
    rows = 96 if reason == "processor" else 3
    if reason == "processor":
        monkeypatch.setattr(ggml.Ggml, "_repacking", None)
        monkeypatch.delitem(vars(library), "_repacking", raising=False)
    packed = random_blocks(kind.name, rows, 512, np.random.default_rng(0), deviation=0.04)
    matrix = ggml.Matrix(library, torch.from_numpy(packed), kind.number, (rows, 512))
    assert not library.repacks(kind.number, (rows, 512))
    assert not matrix.repack()
    assert matrix.tensor(1) == matrix.tensor(9)


@pytest.mark.parametrize("kind", REPACKABLE[:1], ids=lambda kind: kind.name)
def test_a_repacked_copy_with_another_product_is_not_used(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matrix, _, _ = repackable(kind)
    other = random_blocks(kind.name, 96, 512, np.random.default_rng(1), deviation=0.04)
    set_bytes = matrix.ggml.backend_tensor_set
    monkeypatch.setattr(
        matrix.ggml, "backend_tensor_set", lambda tensor, *_: set_bytes(tensor, other.ctypes.data, 0, other.nbytes)
    )
    assert not matrix.repack()
    assert matrix.tensor(1) == matrix.tensor(9)
    assert "computes a wrong product with repacked weights" in caplog.text


@pytest.mark.skipif(not REPACKABLE, reason="needs the extra gguf, and kernels for repacked weights")
@pytest.mark.parametrize(("asked", "share", "kept"), [(True, 0, 1), (False, 9, 0), (None, 1.6, 1), (None, 1.4, 0)])
def test_copies_are_kept_as_asked_or_if_they_take_two_thirds_of_the_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch, asked: bool | None, share: float, kept: bool
) -> None:
    file, library = read_gguf(llama / "tiny.gguf"), ggml.library()
    assert library is not None
    copies = copies_of(file, library, repack=True)
    stored = sum(tensor.stored.num_bytes for tensor in file.tensors.values())
    monkeypatch.setattr("sidestream.models.packed.memory_bytes", lambda: (None, share * (stored + copies)))
    model = load_model(str(llama), block_tokens=4, dtype="float32", repack=asked)
    linears = [part for part in model.module.modules() if isinstance(part, GgmlLinear)]
    taken = sum(part.packed.nbytes for part in linears if part.matrix.tensor(1) != part.matrix.tensor(9))
    assert copies > 0
    assert taken == copies * kept


@needs_ggml
def test_a_layer_of_a_packed_model_calls_ggml_three_times(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(made), block_tokens=4, dtype="float32")
    layer, library = model.module.model.layers[0], ggml.library()
    compute, calls = library.backend_graph_compute, []
    monkeypatch.setattr(library, "backend_graph_compute", lambda *given: calls.append(given) or compute(*given))
    attention, states = layer.self_attn, torch.randn(1, 2, 256, generator=torch.Generator().manual_seed(0))
    together = [part(states) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    inner = layer.mlp(states)
    attention.o_proj(states)
    assert len(calls) == 3
    for part, product in zip((attention.v_proj, attention.k_proj, attention.q_proj), together[::-1], strict=True):
        assert part(states.clone()).equal(product)  # of other states, so computed again
    attention.q_proj(states[:, :1])
    assert attention.k_proj(states[:, 1:]).equal(attention.k_proj(states[:, 1:].clone()))
    for part in (layer.mlp, attention.o_proj):
        first = part(states[:, :1])
        before = first.clone()
        assert not part(states[:, 1:]).equal(first)
        assert first.equal(before)
    mlp = layer.mlp
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(states)) * mlp.up_proj(states))
    torch.testing.assert_close(inner, expected, atol=1e-4, rtol=1e-4)
    mlp.gate_proj = torch.nn.Sequential(
        mlp.gate_proj, torch.nn.Threshold(torch.inf, 0.0)
    )  # as an adapter takes its place
    assert not mlp(states).any()


@needs_ggml
def test_experts_of_a_layer_are_computed_in_one_call_of_ggml(
    made_experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, library = load_model(str(made_experts), block_tokens=4, dtype="float32", repack=True), ggml.library()
    plain = AutoModelForCausalLM.from_config(model.config).model.layers[0].mlp.experts
    weights = read_gguf(made_experts / "tiny.gguf").state_dict()
    for name in ("gate_up_proj", "down_proj"):
        setattr(plain, name, torch.nn.Parameter(weights[f"model.layers.0.mlp.experts.{name}"][...]))
    compute, calls = library.backend_graph_compute, []
    monkeypatch.setattr(library, "backend_graph_compute", lambda *given: calls.append(given) or compute(*given))
    packed, draw = model.module.model.layers[0].mlp.experts, torch.Generator().manual_seed(0)
    for rows in (1, 9):
        states, shares = torch.randn(rows, 256, generator=draw), torch.rand(rows, 2, generator=draw)
        chosen = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(rows)])
        found, expected = packed(states, chosen, shares), rounded_experts(plain, states, chosen, shares)
        # An input of the second product that is rounded to the next step changes 1e-3 of the result.
        assert (found - expected).norm() < 5e-3 * expected.norm()
    assert len(calls) == 2


@needs_ggml
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3", "gpt_oss"])
def test_a_packed_model_is_transformers_own_with_rounded_inputs_of_products(family: str, tmp_path: Path) -> None:
    directory = gguf_dir(family, tmp_path / family, num_hidden_layers=1)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32).eval()
    read = {name: part[...] for name, part in read_gguf(directory / "tiny.gguf").state_dict().items()}
    if family != "gpt_oss":  # transformers reads none of llama.cpp's files of it
        found = load_gguf_checkpoint(str(directory / "tiny.gguf"), return_tensors=True, model_to_load=plain)["tensors"]
        assert read.keys() == found.keys()
        assert all(read[name].equal(values) for name, values in found.items())
    assert not plain.load_state_dict(read, strict=plain.config.tie_word_embeddings is False).unexpected_keys
    plain.config._experts_implementation, size = ROUNDED, 32 if family == "gpt_oss" else 256
    for name, part in plain.named_modules():
        if isinstance(part, torch.nn.Linear) and not name.endswith("gate"):
            part.register_forward_pre_hook(lambda _, given: (rounded(given[0], size),))
    with LLM(directory, kv_memory="16MiB", dtype="float32", **OPTIONS) as llm:
        answers = llm.generate(prompts(), PARAMS)
    errors, dense = list[float](), not hasattr(plain.model.layers[0].mlp, "experts")
    for prompt, answer in zip(prompts(), answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.inference_mode():
            logits = plain(tokens).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        drawn = torch.tensor([drawn.logprob for drawn in answer.completions[0].logprobs])
        # A value on the border between two steps may be rounded to the other one: so more layers would differ by more.
        # A relative change of 1e-6 of all inputs changes these by up to 0.13; and experts weigh a change once more.
        torch.testing.assert_close(drawn, expected, atol=0.1 if dense else 0.2, rtol=0)
        errors += (drawn - expected).abs().tolist()
    assert np.median(errors) < 1e-4


@needs_ggml
@pytest.mark.slow  # two engines
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_packed_model_answers_alike_from_every_tier_and_with_drafts(family: str, tmp_path: Path) -> None:
    made = gguf_dir(family, tmp_path / family)
    if family == "qwen3_moe":  # not rounded: a step between two values of 8 bits may choose another expert
        write_gguf(AutoConfig.from_pretrained(made), made / "tiny.gguf", {"": "F32"}, 1)
    options = {"kv_memory": "16MiB", "dtype": "float32", **OPTIONS}
    with LLM(made, prefix_cache=False, **options) as llm:
        expected = [tokens_of(llm.generate([prompt], PARAMS))[0] for prompt in prompts()]
        assert tokens_of(llm.generate(prompts(), PARAMS)) == expected
        blocks, held = llm.engine.parts.blocks, list[Lease]()
        llm.engine.call(lambda: held.append(blocks.take(blocks.size - 9)))
        assert tokens_of(llm.generate(prompts(), PARAMS)) == expected
        assert llm.engine.parts.scheduler.num_preemptions > 0
        llm.engine.call(held[0].release)
    offload = OffloadConfig(host="32MiB", disk=tmp_path / "tier", disk_capacity="64MiB")
    drafting = SpeculativeConfig(max_drafts=3, adaptive=False)
    for tier in ("host", "disk"):
        with LLM(made, offload=offload, speculative=drafting, **options) as llm:
            parts = llm.engine.parts
            assert parts.costs is not None
            parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # loading always counts as faster
            if tier == "host":
                assert tokens_of(llm.generate(prompts(), PARAMS)) == expected
                assert llm.metrics.value("accepted_tokens_total", "ngram") > 0
                assert llm.flush()
                llm.engine.call(parts.scheduler.forget_all)
            found = llm.generate(prompts(), PARAMS)
            assert tokens_of(found) == expected
            assert sum(getattr(output.cached, tier) for output in found) > 0


@needs_ggml
@pytest.mark.parametrize("kind", ["made", "made_experts"])
def test_packed_weights_are_pages_of_the_file_and_kv_is_not_that_of_plain_ones(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = request.getfixturevalue(kind)
    first, again = (load_model(str(made), block_tokens=4, dtype="float32") for _ in range(2))
    assert first.fingerprint == again.fingerprint
    packed = [part for part in first.module.buffers() if part.dtype == torch.uint8]
    assert len(packed) == 2 - (kind == "made") + 7 * first.config.num_hidden_layers  # a tied output matrix is no other
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(f"/{made.name}/tiny.gguf")]
    mapped = [range(int(begin, 16), int(end, 16)) for begin, end in spans]
    assert all(any(part.data_ptr() in span for span in mapped) for part in packed)
    monkeypatch.setattr("sidestream.models.packed.library", lambda: None)
    caplog.clear()
    assert load_model(str(made), block_tokens=4, dtype="float32").fingerprint != first.fingerprint
    assert "pip install 'sidestream[gguf]' keeps them packed" in caplog.text


@needs_ggml
def test_experts_of_which_a_stack_is_not_quantised_stay_in_the_file(experts: Path) -> None:
    write_gguf(AutoConfig.from_pretrained(experts), experts / "tiny.gguf", {**KINDS, "ffn_up_exps": "F32"}, 1)
    layer = load_model(str(experts), block_tokens=4, dtype="float32").module.model.layers[0]
    assert {part.dtype for part in layer.mlp.experts.buffers()} == {torch.uint8}
    assert not list(layer.mlp.experts.parameters())


def _patch(file: Path, at: Callable[[bytes], int], new: bytes) -> None:
    data = bytearray(file.read_bytes())
    place = at(bytes(data))
    data[place : place + len(new)] = new
    file.write_bytes(data)


def _kind_of(tensor: str) -> Callable[[bytes], int]:
    """Place of the kind of a matrix in the header: behind its name, the number of its dimensions, and these."""
    return lambda data: data.index(tensor.encode()) + len(tensor) + 4 + 16


def _truncate(directory: Path) -> None:
    file = directory / "tiny.gguf"
    file.write_bytes(file.read_bytes()[:-4096])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda path: _patch(path / "tiny.gguf", _kind_of("blk.0.attn_v.weight"), struct.pack("<I", 19)),
            r"blk.0.attn_v.weight in tiny.gguf is quantised as IQ1_S: supported are F32, .*Q4_K",
        ),
        (
            lambda path: _patch(path / "tiny.gguf", lambda data: data.index(b"llama"), b"gemmi"),
            "architecture gemmi: of GGUF files, those of llama, .*, qwen3moe, .* are served",
        ),
        (
            lambda path: edit_json(path / "config.json", model_type="qwen2"),
            "architecture llama, but its config.json is",
        ),
        (_truncate, "is incomplete at tensor"),
        (lambda path: (path / "tiny.gguf").write_bytes(b"GGUF" + b"\xff" * 64), "is no readable GGUF file"),
        (lambda path: shutil.copy(path / "tiny.gguf", path / "other.gguf"), "holds 2 GGUF files, such as other.gguf"),
    ],
    ids=["kind", "architecture", "config", "truncated", "header", "several"],
)
def test_a_file_that_cannot_be_served_is_refused(llama: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(llama)
    assert re.search(said, refusal(llama))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: _rename(path, "blk.0.ffn_up_exps", "blk.8.ffn_up_exps"), "no pair of gate and up"),
        (
            lambda path: _rename(path, "blk.0.ffn_down_exps", "blk.8.ffn_down_exps"),
            r"lack 1 of the model's tensors, such as model.layers.0.mlp.experts.down_proj",
        ),
        (lambda path: edit_json(path / "config.json", num_hidden_layers=1), "hold .* that a model of .* does not use"),
        (lambda path: edit_json(path / "config.json", mlp_only_layers=[0]), "lack 3 of the model's tensors"),
        (lambda path: edit_json(path / "config.json", num_local_experts=3), "have the wrong shape"),
        (lambda path: edit_json(path / "config.json", num_experts_per_tok=0), "num_experts_per_tok as 0: .* 1 to 4"),
        (lambda path: edit_json(path / "config.json", num_experts_per_tok=5), "num_experts_per_tok as 5: .* 1 to 4"),
        (lambda path: edit_json(path / "config.json", hidden_act="gelu"), "experts compute gelu"),
    ],
    ids=["half a pair", "missing", "surplus", "dense", "number", "none chosen", "all chosen", "activation"],
)
def test_a_file_with_other_experts_than_its_config_is_refused(
    experts: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(experts)
    assert re.search(said, refusal(experts))


def _rename(directory: Path, name: str, new: str) -> None:
    _patch(directory / "tiny.gguf", lambda data: data.index(name.encode()), new.encode())


def test_a_file_of_a_model_that_takes_images_is_its_text_part(tmp_path: Path) -> None:
    directory = gguf_dir("gemma3", tmp_path / "gemma3")
    text = json.loads((directory / "config.json").read_text())
    expected = load_model(str(directory), block_tokens=4, dtype="float32").fingerprint
    (directory / "config.json").unlink()
    Gemma3Config(text_config=text, vision_config={"num_hidden_layers": 1}).save_pretrained(directory)
    assert load_model(str(directory), block_tokens=4, dtype="float32").fingerprint == expected


def test_a_model_in_several_parts_is_read_as_one(llama: Path) -> None:
    config = AutoConfig.from_pretrained(llama)
    whole = read_gguf(write_gguf(config, llama.parent / "whole.gguf", KINDS, 3))
    (llama / "tiny.gguf").unlink()
    write_gguf(config, llama / "tiny.gguf", KINDS, 3, tensors=5)
    first = gguf_in(llama)
    assert first is not None and first.name == "tiny-00001-of-00006.gguf"
    parts = read_gguf(first)
    assert {tensor.stored.path for tensor in parts.tensors.values()} == {*llama.glob("*.gguf")}
    assert [*parts.tensors] == [*whole.tensors]
    assert all(torch.equal(parts.tensors[name][...], whole.tensors[name][...]) for name in whole.tensors)
    (llama / "tiny-00002-of-00006.gguf").rename(llama / "tiny-00009-of-00006.gguf")
    assert "tiny-00002-of-00006.gguf cannot be read" in refusal(llama)
    shutil.copy(first, llama / "tiny-00002-of-00006.gguf")
    assert "keep the names of all parts" in refusal(llama)


@needs_ggml
def test_a_scale_that_is_not_finite_is_refused_with_its_weight(llama: Path) -> None:
    file = llama / "tiny.gguf"
    infinite = struct.pack("<H", 0x7C00)
    _patch(file, lambda data: len(data) - 144 * 512 // 2, infinite * 144)
    assert "NaN or infinity" in refusal(llama)


def test_a_file_without_a_package_that_reads_it_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.models.packed.library", lambda: None)
    monkeypatch.setattr("sidestream.models.gguf_file.importlib.util.find_spec", lambda name: None)
    assert "pip install 'sidestream[gguf]'" in refusal(llama)


@pytest.mark.parametrize("packed", [pytest.param(True, marks=needs_ggml), False], ids=["packed", "plain"])
def test_the_check_tells_the_memory_and_the_products(
    llama: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr("sidestream.models.packed.library", lambda: None)
    arguments = ["models", "check", str(llama / "tiny.gguf"), "--device", "cpu", "--dtype", "bfloat16"]
    facts = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama))
    values = sum(weight.numel() for weight in plain.parameters())
    assert facts["stays_packed"] == packed
    assert facts["quantisation"] == "Q4_K and Q6_K"
    assert math.isclose(facts["packed_bytes"], values * 5.1 / 8, rel_tol=0.1)
    assert facts["weights_bytes"] == (facts["packed_bytes"] if packed else 2 * values)
    assert (facts["copies_bytes"] > 0) == (packed and bool(REPACKABLE))
    said = "by ggml, with the packed weights" if packed else "pip install 'sidestream[gguf]'"
    assert said in CliRunner().invoke(app, arguments).output


def test_a_file_beside_its_config_is_the_model_of_its_directory(llama: Path) -> None:
    assert resolve(str(llama / "tiny.gguf")) == str(llama)
    (llama / "config.json").unlink()
    assert "put config.json, generation_config.json and the tokenizer's files" in refused(
        lambda: resolve(str(llama / "tiny.gguf"))
    )
