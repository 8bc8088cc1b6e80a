"""The bound of a text's tokens by its length holds for every text, and is not given where it would not hold."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sidestream.errors import ContextTooLong
from sidestream.tokenizer import TextBound, check_length, text_bound

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def _byte_level(*more: str) -> Tokenizer:
    merges, vocab = [], {letter: index for index, letter in enumerate(LETTERS)}
    for word in more:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                merges.append((word[: end - 1], word[end - 1]))
                vocab[word[:end]] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _byte_fallback(*, bytes_known: int = 256) -> Tokenizer:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(bytes_known)}}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def _bound(made: Tokenizer) -> TextBound | None:
    return text_bound(PreTrainedTokenizerFast(tokenizer_object=made))


TEXTS = ("hello " * 300, "\u1112\u1161\u11ab" * 100, "é漢😀" * 100, "\ufb03𝐀" * 100, " \n\t" * 200, "x" * 500)


@pytest.mark.parametrize("form", [None, "NFC", "NFKC"])
@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_no_text_has_fewer_tokens_than_the_bound_of_its_length(kind: str, form: str | None) -> None:
    made = _byte_level("hello", "ÃĤÃĤ", "ĠĠĠĠ") if kind == "byte-level" else _byte_fallback()
    if form is not None:
        made.normalizer = getattr(normalizers, form)()
    bound = _bound(made)
    assert bound is not None
    for text in TEXTS:
        check_length(text, len(made.encode(text).ids), bound)  # a text that fits is never refused


def test_a_text_that_is_too_long_is_refused_with_its_size_and_the_bound() -> None:
    bound = _bound(_byte_level("hello"))
    assert bound == TextBound(5, strips_spaces=False)
    check_length("é" * 250, 100, bound)
    with pytest.raises(
        ContextTooLong, match=r"502 bytes, so at least 101 tokens .* at most 5 bytes\), the model takes 100"
    ):
        check_length("é" * 251, 100, bound)


def test_white_space_stripped_by_a_special_token_does_not_count() -> None:
    made = _byte_level()
    made.add_special_tokens([AddedToken("<|user|>", rstrip=True)])
    bound, text = _bound(made), "<|user|>" + " " * 1000
    assert bound == TextBound(8, strips_spaces=True)
    assert len(made.encode(text).ids) == 1
    check_length(text, 1, bound)


def test_there_is_no_bound_if_the_tokenizer_may_drop_text() -> None:
    whitespace, lower, removed, words = _byte_level(), _byte_level(), _byte_level(), _byte_fallback(bytes_known=255)
    whitespace.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), whitespace.pre_tokenizer])
    lower.normalizer = normalizers.Strip()
    removed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for made in (whitespace, lower, removed, words, Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))):
        assert _bound(made) is None
