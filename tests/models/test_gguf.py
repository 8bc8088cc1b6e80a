"""GGUF files: weights stay packed, the values are those of their format, and what cannot be served is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_rig import edit_json, refusal, refused
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from typer.testing import CliRunner

from proof.gguf_models import random_blocks, write_gguf
from proof.tiny_models import tiny_model_dir
from sidestream import LLM, OffloadConfig, SamplingParams, SpeculativeConfig
from sidestream.cli.app import app
from sidestream.llm import RequestOutput
from sidestream.models import ggml, load_model
from sidestream.models.catalog import resolve
from sidestream.models.gguf_file import QUANTISED, Kind, gguf_in, read_gguf
from sidestream.models.packed import GgmlEmbedding, GgmlLinear, copies_of
from sidestream_kv.kv.pool import Lease

needs_ggml = pytest.mark.skipif(ggml.library() is None, reason="needs the extra gguf")

# The shapes of the parts of a Q4_K_M: most matrices in Q4_K, some in Q6_K.
KINDS = {"": "Q4_K", "ffn_down": "Q6_K", "output": "Q6_K", "token_embd": "Q6_K"}
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
OPTIONS = {"device": "cpu", "max_running": 3, "compute_threads": 1, "chunk_tokens": 32}


def gguf_dir(family: str, directory: Path, **changes: int) -> Path:
    """A tiny model in a directory: its configs and tokenizer, and its weights in a GGUF file."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_model_dir(family, directory, 0, **sizes, head_dim=64, **changes)
    (directory / "model.safetensors").unlink()
    write_gguf(AutoConfig.from_pretrained(directory), directory / "tiny.gguf", KINDS, 1)
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_dir("llama", tmp_path_factory.mktemp("made") / "llama")


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
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_packed_model_is_transformers_own_with_rounded_inputs_of_products(family: str, tmp_path: Path) -> None:
    directory = gguf_dir(family, tmp_path / family, num_hidden_layers=1)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32).eval()
    found = load_gguf_checkpoint(str(directory / "tiny.gguf"), return_tensors=True, model_to_load=plain)
    plain.load_state_dict(found["tensors"], strict=False)  # a tied matrix has no values of its own
    for part in plain.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_pre_hook(lambda _, given: (rounded(given[0], 256),))
    with LLM(directory, kv_memory="16MiB", dtype="float32", **OPTIONS) as llm:
        answers = llm.generate(prompts(), PARAMS)
    for prompt, answer in zip(prompts(), answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.inference_mode():
            logits = plain(tokens).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        drawn = torch.tensor([drawn.logprob for drawn in answer.completions[0].logprobs])
        # A value on the border between two steps may be rounded to the other one: so more layers would differ by more.
        torch.testing.assert_close(drawn, expected, atol=0.1, rtol=0)


@needs_ggml
@pytest.mark.slow  # two engines
def test_a_packed_model_answers_alike_from_every_tier_and_with_drafts(made: Path, tmp_path: Path) -> None:
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
def test_packed_weights_are_pages_of_the_file_and_kv_is_not_that_of_plain_ones(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, again = (load_model(str(llama), block_tokens=4, dtype="float32") for _ in range(2))
    assert first.fingerprint == again.fingerprint
    layers = [part for part in first.module.modules() if isinstance(part, GgmlLinear | GgmlEmbedding)]
    assert len(layers) == 2 + 7 * first.config.num_hidden_layers  # with the tied output matrix
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith("/llama/tiny.gguf")]
    mapped = [range(int(begin, 16), int(end, 16)) for begin, end in spans]
    assert all(any(part.packed.data_ptr() in span for span in mapped) for part in layers)
    monkeypatch.setattr("sidestream.models.packed.library", lambda: None)
    caplog.clear()
    assert load_model(str(llama), block_tokens=4, dtype="float32").fingerprint != first.fingerprint
    assert "pip install 'sidestream[gguf]' keeps them packed" in caplog.text


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
            lambda path: _patch(path / "tiny.gguf", lambda data: data.index(b"llama"), b"gemma"),
            "architecture gemma: of GGUF files, those of llama, qwen2, qwen3 are served",
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
