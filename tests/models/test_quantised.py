"""Quantised checkpoints: each format is written here, element by element, beside the values that it stands for."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rig import Tensors, edit_json, edit_weights, refusal
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from proof.thread_group import run_ranks
from proof.tiny_models import carry_head, save_head, tiny_model_dir
from sidestream import LLM, SamplingParams
from sidestream.errors import ModelError
from sidestream.models import fp8, load_model
from sidestream.models.compiled import _MergeProducts
from sidestream.models.fp8 import Fp8Linear, _by_rows
from sidestream.models.joined import join_projections
from sidestream.models.mtp import load_head
from sidestream.models.quantised import formats_of

Written = tuple[Tensors, Tensor]
"""The stored tensors of a weight, by the ends of their names, and the values."""
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def _drawn(*shape: int, low: int = 0, high: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.int32)


def _scales(*shape: int) -> Tensor:
    """Powers of two, so that every format keeps them exactly."""
    return torch.exp2(_drawn(*shape, low=-6, high=-3).float())


def _words(integers: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """The last dimension packed into 32-bit words; `places`: the place of each value in its word."""
    per_word = 32 // bits
    rows, columns = integers.shape
    packed = torch.zeros(rows, -(-columns // per_word), dtype=torch.int64)
    for column in range(columns):
        at = column % per_word
        packed[:, column // per_word] |= integers[:, column].long() << bits * (places[at] if places else at)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def _fp8(block: int | None, name: str, scale_shape: Callable[[int, int], tuple[int, ...]]) -> Callable[..., Written]:
    def write(rows: int, columns: int) -> Written:
        values = (_drawn(rows, columns, low=-12, high=13) / 4).to(torch.float8_e4m3fn)
        scale = _scales(*scale_shape(rows, columns))
        if block is None:
            every = scale.reshape(-1, 1).expand(rows, columns) if scale.dim() else scale.expand(rows, columns)
        else:
            every = torch.kron(scale, torch.ones(block, block))[:rows, :columns]
        return {".weight": values, name: scale, ".input_scale": torch.ones(1)}, values.float() * every

    return write


def _gptq(plus: int, *, act_order: bool) -> Callable[..., Written]:
    def write(rows: int, columns: int) -> Written:
        integers, groups = _drawn(rows, columns, high=16), columns // 32
        zeros, scales = _drawn(groups, rows, high=15), _scales(groups, rows).half()
        group = torch.arange(columns) // 32
        if act_order:
            group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(0))]
        values = torch.stack(
            [(integers[:, c] - zeros[g] - plus) * scales[g].float() for c, g in enumerate(group.tolist())], dim=1
        )
        stored = {".qweight": _words(integers, 4).t().contiguous(), ".qzeros": _words(zeros, 4), ".scales": scales}
        return stored | {".g_idx": group.int()}, values

    return write


def _awq(rows: int, columns: int) -> Written:
    integers, groups = _drawn(rows, columns, high=16), columns // 32
    zeros, scales = _drawn(groups, rows, high=16), _scales(groups, rows).half()
    places = (0, 4, 1, 5, 2, 6, 3, 7)  # output 1 lies in the fifth nibble of a word
    values = torch.stack([(integers[:, c] - zeros[c // 32]) * scales[c // 32].float() for c in range(columns)], dim=1)
    stored = {".qweight": _words(integers.t(), 4, places), ".qzeros": _words(zeros, 4, places), ".scales": scales}
    return stored, values


def _packed(bits: int, *, zeros: bool) -> Callable[..., Written]:
    def write(rows: int, columns: int) -> Written:
        integers, groups = _drawn(rows, columns, high=1 << bits), columns // 32
        zero = _drawn(rows, groups, high=1 << bits) if zeros else torch.full((rows, groups), 1 << bits - 1)
        scales = _scales(rows, groups)
        values = torch.stack([(integers[:, c] - zero[:, c // 32]) * scales[:, c // 32] for c in range(columns)], dim=1)
        stored = {
            ".weight_packed": _words(integers, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([rows, columns]),
        }
        return stored | ({".weight_zero_point": _words(zero.t(), bits).t().contiguous()} if zeros else {}), values

    return write


def _nibbles(codes: Tensor, *, high_first: bool = False) -> Tensor:
    first, second = codes[..., 0::2], codes[..., 1::2]
    low, high = (second, first) if high_first else (first, second)
    return (low | high << 4).to(torch.uint8)


def _float4(rows: int, columns: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed values, a scale for each group, and the values."""
    codes, scales = _drawn(rows, columns, high=16), _scales(rows, columns // group)
    signed = torch.tensor([*_E2M1, *(-value for value in _E2M1)])[codes]
    return _nibbles(codes), scales, signed * scales.repeat_interleave(group, dim=1)


def _nvfp4(rows: int, columns: int) -> Written:
    packed, scales, values = _float4(rows, columns, 16)
    stored = {".weight": packed, ".weight_scale": (scales * 16).to(torch.float8_e4m3fn)}
    return stored | {".weight_scale_2": torch.tensor(0.0625)}, values


def _nvfp4_compressed(rows: int, columns: int) -> Written:
    packed, scales, values = _float4(rows, columns, 16)
    stored = {".weight_packed": packed, ".weight_scale": (scales * 16).to(torch.float8_e4m3fn)}
    return stored | {".weight_global_scale": torch.tensor([16.0])}, values


def _mxfp4_compressed(rows: int, columns: int) -> Written:
    packed, scales, values = _float4(rows, columns, 32)
    return {".weight_packed": packed, ".weight_scale": (scales.log2() + 127).to(torch.uint8)}, values


def _nf4(nested: bool) -> Callable[..., Written]:
    def write(rows: int, columns: int) -> Written:
        count = rows * columns
        codes, table = _drawn(1, count, high=16), torch.linspace(-1, 1, 16)
        state = {"shape": [rows, columns], "dtype": "bfloat16", "blocksize": 64, "quant_type": "nf4"}
        stored, scales = {".weight": _nibbles(codes, high_first=True).view(-1, 1)}, _scales(count // 64)
        if nested:
            state |= {"nested_blocksize": 32, "nested_offset": 0.25, "nested_dtype": "float32"}
            eight, each = _drawn(count // 64, high=256), _scales(-(-count // 64 // 32))
            eight_table = torch.linspace(-1, 1, 256)
            scales = torch.stack([eight_table[eight[at]] * each[at // 32] + 0.25 for at in range(len(eight))])
            stored[".weight.nested_absmax"], stored[".weight.nested_quant_map"] = each, eight_table
        stored[".weight.absmax"] = eight.to(torch.uint8) if nested else scales
        stored[".weight.quant_map"] = table
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        stored[".weight.quant_state.bitsandbytes__nf4"] = text
        return stored, (table[codes[0]] * scales.repeat_interleave(64)).view(rows, columns)

    return write


def _int8(rows: int, columns: int) -> Written:
    integers, scale = _drawn(rows, columns, low=-127, high=128).to(torch.int8), 127 * _scales(rows)
    return {".weight": integers, ".SCB": scale}, integers.float() * (scale / 127)[:, None]


def _compressed(form: str, bits: int, kind: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind}}},
    }


_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 48], "activation_scheme": "dynamic"}
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Written]]] = {
    "fp8 in blocks, the last of them smaller": (
        _BLOCKS,
        _fp8(48, ".weight_scale_inv", lambda rows, columns: (-(-rows // 48), -(-columns // 48))),
    ),
    "fp8 with one scale": ({"quant_method": "fp8"}, _fp8(None, ".weight_scale_inv", lambda *_: ())),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8(None, ".weight_scale", lambda *_: ())),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, _fp8(None, ".weight_scale", lambda rows, _: (rows, 1))),
    "compressed fp8": (
        _compressed("float-quantized", 8, "float"),
        _fp8(None, ".weight_scale", lambda rows, _: (rows, 1)),
    ),
    "compressed int4": (_compressed("pack-quantized", 4, "int"), _packed(4, zeros=False)),
    "compressed int4 with zero points": (_compressed("pack-quantized", 4, "int"), _packed(4, zeros=True)),
    "compressed int8": (_compressed("pack-quantized", 8, "int"), _packed(8, zeros=False)),
    "compressed nvfp4": (_compressed("nvfp4-pack-quantized", 4, "float"), _nvfp4_compressed),
    "compressed mxfp4": (_compressed("mxfp4-pack-quantized", 4, "float"), _mxfp4_compressed),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4),
    "gptq": ({"quant_method": "gptq", "bits": 4}, _gptq(1, act_order=False)),
    "gptq v2 with groups in any order": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        _gptq(0, act_order=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, _awq),
    "nf4": (_NF4, _nf4(nested=False)),
    "nf4, its scales in eight bits": (_NF4, _nf4(nested=True)),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8),
}


def _quantise(directory: Path, config: dict[str, Any], write: Callable[..., Written]) -> Tensors:
    """Replace the weights of all projections. Returns the weights that they stand for."""
    meant: Tensors = {}

    def change(weights: Tensors) -> None:
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            base = name.removesuffix(".weight")
            stored, meant[name] = write(*weights.pop(name).shape)
            weights |= {base + end: tensor.contiguous() for end, tensor in stored.items()}

    edit_weights(directory, change)
    edit_json(directory / "config.json", quantization_config=config)
    return meant


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantised_weight_has_exactly_the_values_that_its_format_means(llama: Path, form: str) -> None:
    meant = _quantise(llama, *FORMATS[form])
    module = load_model(str(llama), block_tokens=4, dtype="float32").module
    found = {name: module.get_parameter(name) for name in meant}
    for name, expected in meant.items():
        assert torch.equal(found[name], expected), name


def test_a_quantised_model_answers_and_has_the_kv_of_its_plain_twin(llama: Path, tmp_path: Path) -> None:
    meant = _quantise(llama, *FORMATS["gptq"])
    twin = tiny_model_dir("llama", tmp_path / "twin", 0)
    edit_weights(twin, lambda weights: weights.update(meant))
    answers = []
    for directory in (llama, twin):
        with LLM(directory, dtype="float32", kv_memory="4MiB") as llm:
            answers.append(
                llm.generate(["quantised or not"], SamplingParams(max_tokens=12, temperature=0))[0].token_ids
            )
    assert answers[0] == answers[1]
    of_both = [load_model(str(directory), block_tokens=4).fingerprint for directory in (llama, twin)]
    assert of_both[0] == of_both[1]


def test_experts_of_gpt_oss_are_those_of_transformers() -> None:
    blocks, scales = _drawn(3, 64, 2, 16, high=256).to(torch.uint8), _drawn(3, 64, 2, low=120, high=132)
    (form,) = formats_of({"quant_method": "mxfp4"})
    found = form.values({"_blocks": blocks, "_scales": scales.to(torch.uint8)})
    expected = convert_moe_packed_tensors(blocks, scales.to(torch.uint8), dtype=torch.float32)
    assert torch.equal(found, expected)
    assert form.shape({"_blocks": tuple(blocks.shape)}) == tuple(expected.shape)


def test_eight_bit_floats_are_kept_where_the_device_multiplies_them(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, which has the product, too; it is only not faster there."""
    config = copy.deepcopy(FORMATS["compressed fp8"][0])
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    meant = _quantise(llama, config, FORMATS["compressed fp8"][1])
    plain = load_model(str(llama), block_tokens=4, dtype="bfloat16")
    monkeypatch.setattr(fp8, "is_faster", lambda *_: True)
    model = load_model(str(llama), block_tokens=4, dtype="bfloat16")  # the self-check runs on the product
    assert model.fingerprint != plain.fingerprint
    for name, values in meant.items():
        kept = model.module.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(kept.values(), values)
        of_plain = plain.module.get_submodule(name.removesuffix(".weight"))
        states = torch.randn(5, kept.in_features, dtype=torch.bfloat16)
        assert (kept(states) - of_plain(states)).norm() < 0.05 * of_plain(states).norm()  # inputs have 4 bits
        assert torch.equal(kept(states)[2:3], kept(states[2:3]))
    attention, states = model.module.base_model.layers[0].self_attn, torch.randn(3, 64, dtype=torch.bfloat16)
    names = ("q_proj", "k_proj", "v_proj")
    apart = [getattr(attention, name)(states) for name in names]
    join_projections(attention, names)
    for name, expected in zip(names, apart, strict=True):
        assert torch.equal(getattr(attention, name)(states), expected)


IN_BLOCKS = (
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    _fp8(128, ".weight_scale_inv", lambda rows, columns: (rows // 128, columns // 128)),
)


def in_blocks(directory: Path, *, size: int = 2) -> Path:
    """A model with `size` blocks in each dimension of a weight."""
    width = 128 * size
    sizes = {"hidden_size": width, "intermediate_size": width, "head_dim": width // 4, "num_hidden_layers": 1}
    tiny_model_dir("qwen3", directory, 0, num_key_value_heads=4, **sizes)
    _quantise(directory, *IN_BLOCKS)
    return directory


@pytest.mark.parametrize(("form", "size"), [("rows", 2), ("blocks", 2), ("blocks", 4)])
def test_ranks_divide_eight_bit_weights_with_their_scales(
    form: str, size: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "is_faster", lambda *_: True)
    if form == "rows":
        _quantise(llama, *FORMATS["fbgemm"])
    directory = llama if form == "rows" else in_blocks(tmp_path / "blocks", size=size)
    whole = load_model(str(directory), block_tokens=4, dtype="bfloat16")

    # The check at load compares the logits of both.
    ranks = run_ranks(size, lambda group: load_model(str(directory), block_tokens=4, dtype="bfloat16", group=group))

    layer, own = (module.base_model.layers[0] for module in (whole.module, ranks[0].module))
    for name, dim in (("self_attn.q_proj", 0), ("mlp.up_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        place = f"{name}.linear" if dim else name
        parts = [model.module.base_model.layers[0].get_submodule(place) for model in ranks]
        assert torch.equal(torch.cat([part.values() for part in parts], dim), layer.get_submodule(name).values())
    assert own.mlp.up_proj.weight.dtype == torch.float8_e4m3fn


def test_eight_bit_blocks_that_ranks_would_tear_apart_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "is_faster", lambda *_: True)
    directory = in_blocks(tmp_path / "blocks")
    reason = (
        r"q_proj is stored in 8-bit floats, whose rows belong together by 128, but of its 256 rows, each of 4 ranks"
    )
    with pytest.raises(ModelError, match=rf"{reason} would get 64: choose one of 1, 2 ranks"):
        run_ranks(4, lambda group: load_model(str(directory), block_tokens=4, dtype="bfloat16", group=group))


def test_products_of_joined_eight_bit_projections_are_merged() -> None:
    whole = Fp8Linear.of(torch.nn.Linear(32, 48, bias=False))

    def work(states: Tensor, weight: Tensor, scale: Tensor, one: Tensor) -> tuple[Tensor, ...]:
        return _by_rows(states, weight, scale, one)[:, :16], _by_rows(states, weight, scale, one)[:, 16:]

    given = (torch.randn(3, 32).bfloat16(), whole.weight, whole.scale, whole.one)
    module = make_fx(work)(*given)
    _MergeProducts()(module.graph)
    module.recompile()
    assert sum(node.target is torch.ops.aten._scaled_mm.default for node in module.graph.nodes) == 1
    for got, wanted in zip(module(*given), work(*given), strict=True):
        assert got.equal(wanted)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "hqq"}, "quantised by hqq: supported are awq, bitsandbytes, compressed-tensors, fbgemm_fp8"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits (gptq): supported are 2 and 4 and 8"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ's layout gemv: only gemm"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "modelopt's W4A8: supported are FP8, NVFP4"),
        (_compressed("marlin-24", 4, "int"), "compressed-tensors' format marlin-24 (4 bits, int): supported are"),
        ({"quant_method": "gptq", "bits": 4}, "declares weights quantised by gptq, but its files hold none"),
    ],
)
def test_a_quantisation_that_is_not_supported_is_refused_by_name(
    llama: Path, config: dict[str, Any], reason: str
) -> None:
    edit_json(llama / "config.json", quantization_config=config)
    assert reason in refusal(llama)


def test_a_quantised_weight_without_its_scales_is_refused(llama: Path) -> None:
    _quantise(llama, *FORMATS["gptq"])
    edit_weights(llama, lambda weights: weights.pop("model.layers.1.mlp.up_proj.scales"))
    assert re.search(r"up_proj\.qweight is quantised \(gptq\), but its files lack .*up_proj\.scales", refusal(llama))


def test_a_tensor_of_a_quantised_file_that_no_format_explains_is_refused(llama: Path) -> None:
    _quantise(llama, *FORMATS["awq"])
    edit_weights(llama, lambda weights: weights.update({"model.layers.0.mlp.up_proj.rotation": torch.ones(4)}))
    assert "up_proj.rotation" in refusal(llama)


@pytest.mark.parametrize("form", ["fp8 in blocks, the last of them smaller", "fp8 with one scale"])
def test_latent_attention_reads_a_weight_that_is_never_kept_in_eight_bits(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention itself multiplies by parts of this weight."""
    sizes = {"q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 16}
    directory = tiny_model_dir("deepseek_v3", tmp_path, 0, **sizes)
    meant = _quantise(directory, *FORMATS[form])
    monkeypatch.setattr(fp8, "is_faster", lambda *_: True)
    module = load_model(str(directory), block_tokens=4, dtype="bfloat16").module
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert torch.equal(module.get_parameter(name), meant[name].bfloat16())
    assert any(isinstance(part, Fp8Linear) for part in module.modules()) == ("blocks" not in form)


def test_a_head_in_eight_bit_blocks_is_read_with_the_values_that_are_meant(tmp_path: Path) -> None:
    """As DeepSeek-V3's checkpoint has its head: one more layer, quantised like the others."""
    directory = tiny_model_dir("deepseek_v3", tmp_path / "model", 0)
    carry_head(directory, save_head(directory, tmp_path / "head.safetensors", seed=1), names="deepseek")
    weights = directory / "model.safetensors"
    head = directory / "model-mtp.safetensors"
    kept = {name: tensor for name, tensor in load_file(head).items() if "embed_tokens" not in name}
    save_file({**load_file(weights), **kept}, weights, metadata={"format": "pt"})
    head.unlink()
    meant = _quantise(directory, *FORMATS["fp8 in blocks, the last of them smaller"])

    model = load_model(str(directory), block_tokens=4, dtype="float32")
    found = load_head(model.module, directory).state_dict()

    name = "self_attn.q_b_proj.weight"
    assert torch.equal(found[f"layer.{name}"], meant[f"model.layers.3.{name}"])
    expert = [meant[f"model.layers.3.mlp.experts.5.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(found["layer.mlp.experts.gate_up_proj"][5], torch.cat(expert))
