"""Converts the GGUF file of a small Llama with a byte-level tokenizer into a directory that transformers loads.

Knows nothing about catalogues, caches or downloads. `models.catalog` calls it on the caller's thread. It needs the
package `gguf` (the extra `demo`), so it is imported only for a conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from sidestream.errors import ModelError
from sidestream.models.gguf_file import GgufFile, read_gguf

_SPECIAL = 3  # GGUF's token type "control"


Reached = Callable[[int, int], None]
"""Receives the progress of a long task: bytes that are done, and all bytes."""


def convert_gguf(source: Path, into: Path, reached: Reached) -> None:
    """Write config, weights (bfloat16 safetensors) and tokenizer of the GGUF file `source` into the directory `into`.

    Weights are dequantised, then rounded to bfloat16. Raises ModelError if the file does not contain a Llama with the
    tokenizer of SmolLM.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields.get("general.architecture"), fields.get("tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        raise ModelError(
            f"{source.name} holds architecture {kind[0]} with tokenizer {kind[1]}: only llama with smollm is converted"
        )
    file = read_gguf(source)
    _write_config(fields, into, tied="lm_head.weight" not in file.tensors)
    _write_tokenizer(fields, into)
    _write_weights(file, into, reached)


def _write_config(fields: dict[str, Any], into: Path, *, tied: bool) -> None:
    ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        # GGUF stores the value in 32 bits, so 1e-05 is read as 9.999999747378752e-06.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **ids,
    )
    config.save_pretrained(into)
    GenerationConfig(**ids).save_pretrained(into)


def _write_tokenizer(fields: dict[str, Any], into: Path) -> None:
    # The tokenizer is built here, because transformers' own GGUF reader loses the split of numbers into digits and uses
    # <|im_start|> as the end of sequence.
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.save_pretrained(into)


def _write_weights(file: GgufFile, into: Path, reached: Reached) -> None:
    total = sum(tensor.stored.num_bytes for tensor in file.tensors.values())
    weights: dict[str, torch.Tensor] = {}
    done = 0
    for name, tensor in file.tensors.items():
        weights[name] = tensor[...].to(torch.bfloat16).contiguous()
        done += tensor.stored.num_bytes
        reached(done, total)
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
