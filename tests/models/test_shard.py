"""The ranks of a sharded model compute what one rank computes of the whole model, or the model is refused."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_rig import make_adapter
from torch import nn
from transformers import AutoModelForCausalLM

from proof.thread_group import ThreadGroup, run_ranks
from proof.tiny_models import HYBRIDS, tiny_config, tiny_model_dir
from sidestream.attention.interface import ungated
from sidestream.errors import ModelError, ProcessFailed
from sidestream.models import PagedModel, load_model, self_check, shard_recurrent
from sidestream.models.loader import cache_parts, read_config
from sidestream.models.shard import rank_fingerprint, shard, share_of
from sidestream_kv.device.group import Group, open_group
from sidestream_kv.device.kinds import CPU

BLOCK_TOKENS = 16
TOKENS = torch.randint(250, (25,), generator=torch.Generator().manual_seed(3))
# Float32, where the ranks' sums round differently: at most 1e-5 was measured for these models.
BOUND = 1e-4
# Recurrent layers amplify the rounding of single tokens: at most 5e-4 was measured. A wrong head gives more than 0.1.
RECURRENT_BOUND = 5e-3
FOUR_WAYS = {"num_key_value_heads": 4, "vocab_size": 260}
# Families whose plan divides the attention heads, and families whose ranks gather queries, keys and values.
DIVIDED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma4", "mixtral", "glm4_moe")
GATHERED = ("phi3", "olmo2", "olmoe")


@dataclass(frozen=True)
class Computed:
    """Log-probabilities of all tokens, and the KV that the forward wrote."""

    model: PagedModel
    log_probs: torch.Tensor
    kv: torch.Tensor


def computed(model: PagedModel) -> Computed:
    pool = self_check._pool(model)
    positions = torch.arange(len(TOKENS))
    batch = self_check._batch(self_check._attention(model), pool, 0, len(TOKENS), ungated)
    logits = model.forward(TOKENS, positions, batch, positions)
    return Computed(model, logits.float().log_softmax(-1), pool)


def load(directory: Path, group: Group | None = None, **options: Any) -> PagedModel:
    return load_model(str(directory), block_tokens=BLOCK_TOKENS, group=group, **options)


def on_ranks(directory: Path, size: int, **options: Any) -> list[Computed]:
    return run_ranks(size, lambda group: computed(load(directory, group, **options)))


def assert_same(ranks: list[Computed], whole: Computed) -> None:
    for rank in ranks:
        assert (rank.log_probs - whole.log_probs).abs().max() < BOUND
        assert torch.equal(rank.log_probs, ranks[0].log_probs)


@pytest.mark.parametrize("family", DIVIDED)
def test_ranks_with_divided_heads_compute_the_same(family: str, tmp_path: Path) -> None:
    directory = tiny_model_dir(family, tmp_path / family, 0, **FOUR_WAYS)
    whole = computed(load(directory))

    for size in (2, 4) if family in ("llama", "qwen2") else (2,):
        ranks = on_ranks(directory, size)
        assert_same(ranks, whole)
        assert torch.cat([rank.kv for rank in ranks], dim=4).sub(whole.kv).nan_to_num().abs().max() < BOUND
        assert {(rank.model.num_heads, rank.model.layout.num_kv_heads) for rank in ranks} == {(4 // size, 4 // size)}


@pytest.mark.parametrize("family", GATHERED)
def test_ranks_that_gather_queries_and_keys_hold_all_heads(family: str, tmp_path: Path) -> None:
    directory = tiny_model_dir(family, tmp_path / family, 0, **FOUR_WAYS)
    whole = computed(load(directory))

    ranks = on_ranks(directory, 2)

    assert_same(ranks, whole)
    assert all(rank.kv.sub(whole.kv).nan_to_num().abs().max() < BOUND for rank in ranks)
    assert {(rank.model.num_heads, rank.model.layout.num_kv_heads) for rank in ranks} == {(4, 4)}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash"])
def test_ranks_hold_whole_latents(family: str, tmp_path: Path) -> None:
    """Transformers' plan of deepseek_v3 leaves attention whole. Experts of longcat_flash stay whole, because some of
    them pass their input on.
    """
    directory = tiny_model_dir(family, tmp_path / family, 0, vocab_size=260)
    whole = computed(load(directory))

    ranks = on_ranks(directory, 2)

    assert_same(ranks, whole)
    assert all(rank.kv.sub(whole.kv).nan_to_num().abs().max() < BOUND for rank in ranks)
    assert {(rank.model.num_heads, rank.model.layout.num_kv_heads) for rank in ranks} == {(2, 1)}


def logits(module: Any) -> torch.Tensor:
    """Of transformers' own forward, with its eager attention."""
    with torch.inference_mode():
        return module(input_ids=TOKENS[None], use_cache=False).logits[0].log_softmax(-1)


DIVIDED = [family for family in sorted(HYBRIDS) if family != "minimax"]  # one rank only


@pytest.mark.parametrize("family", [*DIVIDED, "gpt_oss", "nemotron", "granitemoeshared", "phimoe"])
def test_layers_that_transformers_plans_leave_whole_are_divided(family: str, tmp_path: Path) -> None:
    changes = FOUR_WAYS | ({"linear_num_key_heads": 4} if "qwen" in family else {})
    directory = tiny_model_dir(family, tmp_path / family, 0, **changes)
    module = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    whole, size = logits(module), 2 if family in ("nemotron_h", "olmo_hybrid") else 4
    shares = [copy.deepcopy(module) for _ in range(size)]

    def rank(group: ThreadGroup) -> torch.Tensor:
        shard(shares[group.rank], group, device=torch.device(CPU))
        return logits(shares[group.rank])

    assert all((found - whole).abs().max() < RECURRENT_BOUND for found in run_ranks(size, rank))
    parameters = [sum(weight.numel() for weight in each.parameters()) for each in (module, shares[0])]
    assert parameters[1] < (0.8 if size == 2 else 0.6) * parameters[0]


@pytest.mark.parametrize("family", ["falcon_h1", "kimi_linear", "qwen3_5"])
def test_a_rank_keeps_the_states_of_its_heads(family: str, tmp_path: Path) -> None:
    directory = tiny_model_dir(family, tmp_path / family, 0)
    sizes = []
    for model in (load(directory), *run_ranks(2, lambda group: load(directory, group))):
        assert model.state_layout is not None
        assert (
            model.state_layout == cache_parts(str(directory), block_tokens=BLOCK_TOKENS, ranks=2 if sizes else 1).state
        )
        sizes.append(model.state_layout.state_bytes)
    assert sizes[1] == sizes[2] < 0.6 * sizes[0]


def test_each_rank_holds_its_share_of_the_divided_weights(tmp_path: Path) -> None:
    directory = tiny_model_dir("qwen2", tmp_path / "qwen2", 0, **FOUR_WAYS)
    whole = load(directory).module

    modules = [rank.model.module for rank in on_ranks(directory, 2)]

    layer = whole.model.layers[1]
    ours = [module.model.layers[1] for module in modules]
    own = layer.self_attn.k_proj
    assert torch.equal(torch.cat([part.self_attn.k_proj.weight for part in ours]), own.weight)
    assert torch.equal(torch.cat([part.self_attn.k_proj.bias for part in ours]), own.bias)
    assert all(type(part.self_attn.k_proj) is nn.Linear for part in ours)
    assert torch.equal(
        torch.cat([part.mlp.down_proj.linear.weight for part in ours], dim=1), layer.mlp.down_proj.weight
    )
    assert torch.equal(torch.cat([module.lm_head.linear.weight for module in modules]), whole.lm_head.weight)
    # Nothing keeps the whole weight: the share is not a view of it.
    weight = ours[0].mlp.down_proj.linear.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes


def test_a_tied_output_matrix_stays_a_view_of_the_embedding(tmp_path: Path) -> None:
    directory = tiny_model_dir("llama", tmp_path / "llama", 0, **FOUR_WAYS)

    for rank in on_ranks(directory, 2):
        module = rank.model.module
        storages = [
            part.untyped_storage().data_ptr()
            for part in (module.lm_head.linear.weight, module.model.embed_tokens.weight)
        ]
        assert storages[0] == storages[1]
        assert module.model.embed_tokens.weight.shape[0] == 2 * module.lm_head.linear.weight.shape[0]


def test_a_vocabulary_that_cannot_be_divided_leaves_the_output_matrix_whole(tmp_path: Path) -> None:
    directory = tiny_model_dir("qwen3", tmp_path / "qwen3", 0)
    whole = computed(load(directory))

    ranks = on_ranks(directory, 2)

    assert_same(ranks, whole)
    assert all(rank.model.module.lm_head.out_features == 259 for rank in ranks)


def test_fingerprints_differ_by_rank_and_are_equal_for_equal_weights(tmp_path: Path) -> None:
    directory = tiny_model_dir("llama", tmp_path / "llama", 0, **FOUR_WAYS)
    whole = load(directory)

    models = [rank.model for _ in range(2) for rank in on_ranks(directory, 2)]

    assert {model.weights_fingerprint for model in (whole, *models)} == {whole.fingerprint}
    assert len({model.fingerprint for model in (whole, *models)}) == 3
    assert [model.fingerprint for model in models[:2]] == [model.fingerprint for model in models[2:]]
    prints = {rank_fingerprint(whole.fingerprint, rank, size) for rank, size in ((0, 1), (0, 2), (1, 2), (0, 4))}
    assert len(prints) == 4


def test_ranks_with_different_weights_are_refused(tmp_path: Path) -> None:
    directories = [tiny_model_dir("llama", tmp_path / str(seed), seed) for seed in range(2)]

    with pytest.raises(ModelError, match=r"ranks \[1\] of 2 read other weights than rank 0"):
        run_ranks(2, lambda group: load(directories[group.rank], group))


@pytest.mark.parametrize(
    ("family", "changes", "size", "reason"),
    [
        ("llama", {}, 4, "num_key_value_heads is 2, which 4 ranks cannot divide: choose one of 1, 2 ranks"),
        ("llama", {}, 3, "num_attention_heads is 4, which 3 ranks cannot divide: choose one of 1, 2 ranks"),
        ("llama", {"intermediate_size": 97}, 2, "mlp.gate_proj is 97, which 2 ranks cannot divide: choose one of 1 "),
        ("jetmoe", {}, 2, "transformers has no tensor-parallel plan for the layers of jetmoe, and they have other"),
        ("qwen3_5", {}, 4, "num_key_value_heads is 2, which 4 ranks cannot divide: choose one of 1, 2 ranks"),
        (
            "nemotron_h",
            {"mamba_num_heads": 12, "n_groups": 4, "num_attention_heads": 12, "num_key_value_heads": 6},
            6,
            "its NemotronHMamba2Mixer.n_groups is 4, which 6 ranks cannot divide: choose one of 1, 2 ranks",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    family: str, changes: dict[str, Any], size: int, reason: str
) -> None:
    with pytest.raises(ModelError) as caught:
        share_of(tiny_config(family, **changes), size=size)
    assert reason in str(caught.value)


def test_recurrent_layers_of_an_unknown_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_recurrent, "_KINDS", ())
    with pytest.raises(ModelError, match="Qwen3_5GatedDeltaNet keeps recurrent state of a kind that is not divided"):
        share_of(tiny_config("qwen3_5"), size=2)


def test_an_error_names_an_unsupported_tensor_parallel_style() -> None:
    config = tiny_config("llama")
    config.base_model_tp_plan = {**config.base_model_tp_plan, "layers.*.input_layernorm": "sequence_parallel"}

    with pytest.raises(ModelError, match=r"the style sequence_parallel for model.layers.\*.input_layernorm, and only"):
        share_of(config, size=2)


def test_a_tensor_parallel_plan_that_changes_results_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plan would that divides the input of a norm without weights: every shape fits, every value is wrong."""
    directory = tiny_model_dir("qwen3", tmp_path / "qwen3", 0, **FOUR_WAYS)
    monkeypatch.setattr(ThreadGroup, "all_reduce", lambda self, values: values.mul_(self.size))

    with pytest.raises(ModelError, match="gives other logits than one rank"):
        on_ranks(directory, 2)


def test_a_rank_that_ends_during_loading_ends_the_others(tmp_path: Path) -> None:
    directory = tiny_model_dir("llama", tmp_path / "llama", 0)

    def work(group: ThreadGroup) -> object:
        if group.rank == 1:
            group.close()
            return None
        with pytest.raises(ProcessFailed, match=r"ranks \[1\] have left"):
            load(directory, group)
        return None

    run_ranks(2, work)


def test_ranks_over_gloo_compute_the_same(tmp_path: Path) -> None:
    """The real collectives; ranks are threads, because Gloo's groups know nothing of processes."""
    directory = tiny_model_dir("qwen2", tmp_path / "qwen2", 0, num_hidden_layers=1, **FOUR_WAYS)
    whole = computed(load(directory))

    def rank(number: int) -> Computed:
        group = open_group(tmp_path / "group", rank=number, size=2, device=torch.device(CPU), timeout_s=60)
        try:
            return computed(load(directory, group))
        finally:
            group.close()

    with ThreadPoolExecutor(2) as threads:
        assert_same(list(threads.map(rank, range(2))), whole)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_ranks_divide_adapters_as_their_layers(family: str, tmp_path: Path) -> None:
    """phi3's ranks gather queries and keys, and take their columns of a whole input of the last projection."""
    directory = tiny_model_dir(family, tmp_path / family, 0, **FOUR_WAYS)
    parts = ("qkv_proj", "o_proj", "down_proj") if family == "phi3" else ("q_proj", "o_proj", "up_proj", "down_proj")
    adapter = make_adapter(directory, tmp_path / "adapter", 1, parts=parts)

    def adapted(group: Group | None = None) -> tuple[str, dict[str, tuple[int, int]], Computed]:
        model = load(directory, group)
        model.add_adapters(slots=2, rank=4)
        assert model.adapters is not None
        read = model.adapters.read(str(adapter))
        model.adapters.put(2, read)
        model.adapters.choose(torch.full((len(TOKENS),), 2))
        return read.digest, model.adapters.sizes, computed(model)

    digest, sizes, whole = adapted()
    ranks = run_ranks(2, adapted)

    assert_same([result for _, _, result in ranks], whole)
    assert all(found[:2] == (digest, sizes) for found in ranks)
    assert (whole.log_probs - computed(load(directory)).log_probs).abs().max() > 0.1


def test_packed_bfloat16_weights_are_divided(tmp_path: Path) -> None:
    directory = tiny_model_dir("qwen3", tmp_path / "qwen3", 0, **FOUR_WAYS)
    whole = computed(load(directory, dtype="bfloat16"))

    ranks = on_ranks(directory, 2, dtype="bfloat16")

    # Rounding of bfloat16, as in the self-check's replay.
    spread = whole.log_probs.std()
    assert all((rank.log_probs - whole.log_probs).abs().median() < 0.05 * spread for rank in ranks)


def test_kv_bytes_of_a_rank_are_known_without_weights(tmp_path: Path) -> None:
    directory = tiny_model_dir("llama", tmp_path / "llama", 0, **FOUR_WAYS)

    parts = [cache_parts(str(directory), block_tokens=BLOCK_TOKENS, ranks=ranks).kv for ranks in (1, 4)]

    assert [part.num_kv_heads for part in parts] == [4, 1]
    assert share_of(read_config(directory), size=1).num_kv_heads == 4
