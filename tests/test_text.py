"""Text in pieces is the same text: for any tokens, any split, any stop strings."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import GenerationConfig, PreTrainedTokenizerFast

from sidestream.errors import ConfigError, ModelError, RequestRejected
from sidestream.models.catalog import prepared
from sidestream.server.body import Served
from sidestream.server.fields import parse_text
from sidestream.text import StopStrings, sample_text
from sidestream.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
    "{% if shout is defined and shout %}!{% endif %}"
)
TRICKY = [
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 🇳🇴 👍🏽",
    "e\u0301\u0323 Z͑ͫ̓ͪ̂ͫ̽",
    "  spaces   and\n\n\ttabs ",
    "\ufffd real \ufffd\ufffd",
    "مرحبا",
    "a\u200db",
    "\U0010ffff",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Every byte a token, a few merges of whole and of half characters, two special tokens, one added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ġa", "n"), ("ð", "Ł"), ("ðŁ", "ĳ"), ("ł", "å"), ("Ã", "©"), ("å", "ħ")]
    tokens = [*alphabet, *("".join(merge) for merge in merges)]
    backend = Backend(models.BPE({token: index for index, token in enumerate(dict.fromkeys(tokens))}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def sentencepiece_tokens() -> list[str]:
    words = ["a", "n", "▁", "▁▁", "▁a", "▁an", "b", "cd", "▁é", "日", "\ufffd", ".", "n't", "\n"]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]


def llama_style() -> PreTrainedTokenizerFast:
    """Sentencepiece with bytes for unknown characters, the first space taken away."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return sentencepiece(decoder)


def metaspace_style() -> PreTrainedTokenizerFast:
    return sentencepiece(decoders.Metaspace(prepend_scheme="first"))


def gemma_style() -> PreTrainedTokenizerFast:
    """Sentencepiece, byte fallback, spaces kept."""
    return sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def unigram() -> PreTrainedTokenizerFast:
    """A unigram model without bytes: an unknown character has no text."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁a", "the", "a", "n", "b", "é", "日", ".", "▁an"]
    backend = Backend(models.Unigram([(word, -float(len(words) - i)) for i, word in enumerate(words)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def sentencepiece(decoder: Any) -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate(sentencepiece_tokens())}
    backend = Backend(models.BPE(vocab, [("▁", "a"), ("▁a", "n"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def wrapped(backend: PreTrainedTokenizerFast) -> Tokenizer:
    return Tokenizer(backend, eos_ids=[backend.eos_token_id])


STYLES = (byte_level, llama_style, gemma_style, metaspace_style, unigram)
TOKENIZERS = {style.__name__: wrapped(style()) for style in STYLES}
if (directory := prepared("smollm2-135m-instruct")) is not None:
    TOKENIZERS["smollm2"] = Tokenizer.load(str(directory))

every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
any_text = st.lists(st.one_of(st.text(), st.sampled_from(TRICKY))).map("".join)


def any_tokens(name: str) -> st.SearchStrategy[list[int]]:
    """Uniform tokens, and runs of a few, which break more."""
    token = st.integers(0, TOKENIZERS[name].vocab_size - 1)
    runs = st.builds(lambda some, times: some * times, st.lists(token, max_size=3), st.integers(1, 30))
    return st.lists(st.one_of(st.lists(token, max_size=8), runs), max_size=6).map(
        lambda lists: [t for part in lists for t in part]
    )


@every_tokenizer
@given(data=st.data())
def test_pieces_of_any_text_join_to_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    assert_joins(tokenizer, tokenizer.encode(data.draw(any_text)))


@every_tokenizer
@settings(max_examples=300)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_the_whole_even_if_they_are_no_text(name: str, data: st.DataObject) -> None:
    assert_joins(TOKENIZERS[name], data.draw(any_tokens(name)))


def assert_joins(tokenizer: Tokenizer, tokens: list[int]) -> None:
    detokenizer = tokenizer.detokenizer()
    text = ""
    whole = tokenizer.decode(tokens)
    for token in tokens:
        text += detokenizer.push(token)
        assert whole.startswith(text)
    assert text + detokenizer.finish() == whole
    valid = with_valid_bytes(tokenizer, tokens)
    expected = tokenizer._bytes._decode(valid)
    if valid[:1] != [token for token in tokens if token not in tokenizer.special_ids][:1]:
        # The omitted bytes begin the text, so the text behind them keeps its space.
        begin = tokenizer.encode("a", add_special_tokens=False)
        expected = tokenizer._bytes._decode([*begin, *valid]).removeprefix(tokenizer._bytes._decode(begin))
    assert whole.replace("\ufffd", "") == expected.replace("\ufffd", "")


def with_valid_bytes(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """The tokens without byte tokens that are part of no character. For these, the library loses the valid characters
    beside them.
    """
    names = tokenizer.token_strings(tokens)
    kept, run = list[int](), list[int]()
    for token, name in [*zip(tokens, names, strict=True), (-1, "")]:
        if name.startswith("<0x") and tokenizer._bytes[token] != name.encode():
            run.append(token)
        elif token not in tokenizer.special_ids:  # the library joins the bytes before and behind a special token
            data = b"".join(tokenizer._bytes[part] for part in run)
            valid = data.decode("utf-8", "ignore").encode()
            kept += [tokenizer._backend.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in valid]
            run = []
            kept += [token] * (token >= 0)
    return kept


@every_tokenizer
@settings(max_examples=200)
@given(data=st.data())
def test_output_after_a_prompt_equals_the_rest_of_their_joint_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(data.draw(any_text), add_special_tokens=False)
    cut = data.draw(st.integers(0, len(tokens)))
    prompt = tokenizer.decode(tokens[:cut])
    if prompt.endswith("\ufffd"):  # the prompt ends inside a character
        return
    assert prompt + tokenizer.detokenizer(tokens[:cut]).decode(tokens[cut:]) == tokenizer.decode(tokens)


def test_the_space_of_a_continuation_is_kept_and_that_of_an_answer_is_not() -> None:
    for name in ("llama_style", "metaspace_style", "unigram"):
        tokenizer = TOKENIZERS[name]
        prompt, output = tokenizer.encode("an"), tokenizer.encode("a a")[-1:] * 2
        assert tokenizer.detokenizer(prompt).decode(output) == " a a"
        assert tokenizer.detokenizer().decode(output) == "a a"
        assert tokenizer.detokenizer([*tokenizer.eos_ids]).decode(output) == "a a"  # special tokens are no text


@every_tokenizer
def test_an_echoed_prompt_and_its_continuation_are_the_text_of_both(name: str) -> None:
    """A prompt that was sent as text is echoed as it was sent: some tokenizers add or drop spaces at its start."""
    tokenizer = TOKENIZERS[name]
    output = tokenizer.encode("a a", add_special_tokens=False)[-1:] * 2
    for text, as_ids in itertools.product(("an", "an a", " an", "an ", "<s>an"), (False, True)):
        prompt = tokenizer.encode(text)
        body = json.dumps({"model": "m", "prompt": prompt if as_ids else text, "echo": True}).encode()
        call = parse_text(body, tokenizer=tokenizer, served=Served("m", max_choices=1, max_model_len=64))
        assert call.continues and call.prompts == (tuple(prompt),)
        answer = call.echo[0] + tokenizer.detokenizer(call.prompts[0]).decode(output)
        both, decoded = tokenizer.decode([*prompt, *output]), tokenizer.decode(prompt)
        assert answer == (both if as_ids else text + both.removeprefix(decoded))


@pytest.mark.parametrize("name", ["llama_style", "gemma_style"])
def test_byte_tokens_give_a_character_at_its_last_byte(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    detokenizer = tokenizer.detokenizer()
    tokens = [tokenizer._backend.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "x\té👍".encode()]
    assert [detokenizer.push(token) for token in tokens] == ["x", "\t", "", "é", "", "", "", "👍"]
    assert detokenizer.push(tokens[2]) + detokenizer.push(tokens[0]) == "\ufffdx"


def test_a_decoder_whose_text_depends_on_later_tokens_is_refused() -> None:
    letters = [chr(code) for code in range(33, 127)]
    vocab = {name: index for index, name in enumerate([*letters, *(f"{letter}</w>" for letter in letters)])}
    words = Backend(models.BPE(vocab, [], end_of_word_suffix="</w>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder()
    backend = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="!")
    with pytest.raises(ModelError, match="depends on the tokens behind them"):
        wrapped(backend)


@every_tokenizer
def test_a_character_is_returned_whole_as_soon_as_it_is_complete(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in tokenizer.encode("a 👍日é b", add_special_tokens=False)]
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1].endswith("b")


def test_an_incomplete_character_at_the_end_is_one_replacement_character() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push(token) for token in tokenizer.encode("x😀")[:-1]) == "x"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


naive_alphabet = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@settings(max_examples=500)
@given(pieces=st.lists(naive_alphabet, max_size=8), stops=stop_lists, include=st.booleans())
def test_stop_strings_agree_with_a_naive_search_for_any_split(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    search = StopStrings(stops, include=include)
    shown = ""
    for piece in pieces:
        shown_now, stopped = search.push(piece)
        shown += shown_now
        assert stopped == (search.matched is not None)
    shown += search.flush()
    expected, matched = naive("".join(pieces), stops, include)
    assert (shown, search.matched) == (expected, matched)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for stop in range(1, len(text) + 1):
        found = [s for s in stops if text[:stop].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: stop if include else stop - len(longest)], longest
    return text, None


@given(pieces=st.lists(naive_alphabet, max_size=8), stops=stop_lists)
def test_only_text_that_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    search = StopStrings(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown_now, stopped = search.push(piece)
        shown += shown_now
        if stopped:
            return
        starts = [length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])]
        assert len(text) - len(shown) == max(starts, default=0)


def test_no_text_is_returned_after_a_stop_string() -> None:
    search = StopStrings(["END"])
    assert search.push("all of this END and none of this") == ("all of this ", True)
    assert search.push("nor this") == ("", True)
    assert search.flush() == ""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    backend = byte_level()
    backend.chat_template = TEMPLATE
    backend.save_pretrained(tmp_path)
    return tmp_path


def test_load_takes_the_end_of_sequence_from_the_generation_config_and_the_tokenizer(model_dir: Path) -> None:
    end = Tokenizer.load(str(model_dir)).eos_ids
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(model_dir)
    assert Tokenizer.load(str(model_dir)).eos_ids == (7, 9, *end)


def test_load_does_not_warn_of_sampling_options_beside_the_end_of_sequence(
    model_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would say that they "may be ignored"; the engine honours them."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    (model_dir / "generation_config.json").write_text(
        '{"eos_token_id": 7, "temperature": 0.6, "top_k": 23}', encoding="utf-8"
    )
    assert 7 in Tokenizer.load(str(model_dir)).eos_ids
    assert caplog.records == []


def test_load_takes_the_end_of_sequence_from_the_config_as_a_last_resort(model_dir: Path) -> None:
    (model_dir / "config.json").write_text('{"model_type": "llama", "eos_token_id": 5}')
    assert 5 in Tokenizer.load(str(model_dir)).eos_ids


@pytest.mark.parametrize("content", [None, "{}", '{"broken'])
def test_a_directory_without_a_usable_tokenizer_is_a_model_error(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"no usable tokenizer in .*tokenizer\.json beside its config\.json"):
        Tokenizer.load(str(tmp_path))


def test_encode_and_decode_are_inverse_and_special_tokens_are_no_text(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(str(model_dir))
    for text in TRICKY:
        ids = tokenizer.encode(text)
        assert all(type(token) is int for token in ids)
        assert tokenizer.decode([*ids, *tokenizer.eos_ids]) == text
    assert tokenizer.special_ids == set(tokenizer.encode("<s></s>"))
    assert tokenizer.vocab_size == 1 + max(tokenizer.encode("<s></s><think>"))


def test_a_lone_surrogate_is_refused(model_dir: Path) -> None:
    with pytest.raises(RequestRejected, match=r"character 2 is the lone surrogate U\+D83D"):
        Tokenizer.load(str(model_dir)).encode("ab\ud83d")


def ask(content: Any = "hi", role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def test_chat_formats_messages_with_the_template(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(str(model_dir))
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    for content in ("hi", parts):
        assert tokenizer.chat(ask(content)) == tokenizer.encode("<s>user: hi</s><s>assistant: ")
    assert tokenizer.chat(ask(), add_generation_prompt=False) == tokenizer.encode("<s>user: hi</s>")
    assert tokenizer.chat(ask(role="assistant"), continue_final_message=True) == tokenizer.encode("<s>assistant: hi")
    assert tokenizer.chat(ask(), shout=True) == tokenizer.encode("<s>user: hi</s><s>assistant: !")


def test_a_template_may_be_replaced(model_dir: Path, tmp_path: Path) -> None:
    tokenizer, path = Tokenizer.load(str(model_dir)), tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    tokenizer.use_chat_template(path)
    assert tokenizer.chat(ask()) == tokenizer.encode("hi!")
    path.write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match=r"chat.jinja, which is no chat template: .*endfor"):
        tokenizer.use_chat_template(path)
    assert tokenizer.chat(ask()) == tokenizer.encode("hi!")


TOOL_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}{% if m.name %}({{ m.name }}){% endif %}: {{ m.content }}"
    "{% if m.role == 'tool' %} for {{ m.tool_call_id }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}</s>{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
)
CALLING = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}]


def test_a_template_gets_the_tools_and_options_that_it_knows(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(str(model_dir))
    tokenizer._backend.chat_template = TOOL_TEMPLATE
    result = {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"}
    assert tokenizer.template_knows("reasoning_effort") and not tokenizer.template_knows("enable_thinking")
    laid_out = tokenizer.chat([*CALLING, result], reasoning_effort="low")
    assert laid_out == tokenizer.encode('<s>assistant: f{"x": 1}</s><s>tool(f): 42 for 1</s>low')


# Reads the reasoning as `thinking`, and the first call of a message only, as gpt-oss's template does.
THINKING_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}<{{ message.content }}>{% elif message.tool_calls %}"
    "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "[{{ message.thinking or message.content }}]{{ message.tool_calls[0].function.name }}"
    "{% else %}({{ message.role }}: {{ message.content }}){% endif %}{% endfor %}{{ reasoning_effort }}"
)


def calls(*names: str, **fields: Any) -> dict[str, Any]:
    made = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "tool_calls": made, **fields}


@pytest.mark.parametrize(
    ("messages", "laid_out"),
    [
        ([calls("f", reasoning_content="hm")], "[hm]f"),
        ([calls("f", content="I look.")], "[I look.]f"),
        ([calls("f", content="I look.", reasoning_content="hm")], "[hm\nI look.]f"),
        (
            [calls("f", "g", "h", reasoning_content="hm"), ("g", "2"), ("f", "1"), ("h", "3"), *ask()],
            "[]g<2>[hm]f<1>[]h<3>(user: hi)",
        ),
        ([calls("f", "g", content="a"), *ask()], "[a]f[]g(user: hi)"),
        ([calls("f", "g", content="a"), ("other", "1")], "[a]f<1>[]g"),
    ],
)
def test_reasoning_and_all_calls_reach_a_template_that_reads_one_of_each(
    model_dir: Path, messages: list[Any], laid_out: str
) -> None:
    tokenizer = Tokenizer.load(str(model_dir))
    tokenizer._backend.chat_template = THINKING_TEMPLATE
    given = [
        {"role": "tool", "tool_call_id": one[0], "content": one[1]} if isinstance(one, tuple) else one
        for one in messages
    ]
    assert tokenizer.chat(given, reasoning_effort="high") == tokenizer.encode(f"{laid_out}high")


def test_a_template_that_prints_any_role_does_not_count_as_supporting_tools(model_dir: Path) -> None:
    """It would write the role's name and leave the calls out."""
    tokenizer = Tokenizer.load(str(model_dir))
    tokenizer._backend.chat_template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    with pytest.raises(
        RequestRejected, match=r"messages\[1\]\.role is tool, which this model's chat template does not know"
    ) as refused:
        tokenizer.chat([*ask(), *ask(role="tool")])
    assert refused.value.param == "messages[1].role"
    with pytest.raises(RequestRejected, match=r"knows no messages\[0\]\.tool_calls") as refused:
        tokenizer.chat(CALLING)
    assert refused.value.param == "messages[0].tool_calls"


TEXT_OF_PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",
        "{{ m['content'] + '' }}",
        TEXT_OF_PARTS,
        "{{ m.content[0].text }}",
        "{% if m.content is string %}{{ m.content }}{% else %}" + TEXT_OF_PARTS + "{% endif %}",
        # a form for each role
        "{% if m.role == 'user' %}" + TEXT_OF_PARTS + "{% else %}{{ m.content + '' }}{% endif %}",
        "{% if m.role != 'user' %}" + TEXT_OF_PARTS + "{% else %}{{ m.content + '' }}{% endif %}",
    ],
)
def test_each_template_gets_content_in_the_form_that_it_reads(model_dir: Path, content: str) -> None:
    tokenizer = Tokenizer.load(str(model_dir))
    tokenizer._backend.chat_template = "{% for m in messages %}<s>{{ m.role }}: " + content + "</s>{% endfor %}"
    for given_content in ("hi", PARTS):
        messages = [*ask("no", "system"), *ask(given_content), *ask(given_content, "assistant"), *ask("yes")]
        text = "<s>system: no</s><s>user: hi</s><s>assistant: hi</s><s>user: yes</s>"
        assert tokenizer.chat(messages) == tokenizer.encode(text)
        continued = tokenizer.chat(messages[:3], continue_final_message=True)
        assert continued == tokenizer.encode("<s>system: no</s><s>user: hi</s><s>assistant: hi")


def test_content_that_the_template_omits_is_refused(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(str(model_dir))
    only_user = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer._backend.chat_template = only_user
    assert tokenizer.chat(ask()) == tokenizer.encode("hi")
    with pytest.raises(RequestRejected, match="whose content this model's chat template leaves out") as refused:
        tokenizer.chat([*ask("no", "system"), *ask()])
    assert refused.value.param == "messages[0].role"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "documents", "return_tensors"])
def test_an_option_cannot_replace_arguments_of_the_template(model_dir: Path, name: str) -> None:
    tokenizer = Tokenizer.load(str(model_dir))
    tokenizer._backend.chat_template = "{{ " + name + " }}"  # even where the template has a variable of that name
    with pytest.raises(RequestRejected, match=f"{name} is no option of a chat template") as refused:
        tokenizer.chat(ask(), **{name: "x"})
    assert refused.value.param == name


def test_chat_without_a_template_is_refused() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestRejected, match="no chat template: ask for a plain completion"):
        tokenizer.chat(ask())


@pytest.mark.parametrize(
    ("messages", "options", "reason", "param"),
    [
        ([], {}, "messages is empty", "messages"),
        (["hi"], {}, r"messages\[0\] is 'hi': give an object", "messages[0]"),
        (ask(role="usr"), {}, r"messages\[0\]: no role usr; did you mean user\?", "messages[0].role"),
        ([{"content": "hi"}], {}, "no role None", "messages[0].role"),
        ([*ask(), {"role": "user"}], {}, r"messages\[1\].content is None", "messages[1].content"),
        (ask([{"type": "image_url"}]), {}, "part of type image_url: only text", "messages[0].content"),
        (ask(["hi"]), {}, "part of type str: only text", "messages[0].content"),
        (ask(role="tool"), {}, "chat template refuses these messages: no tools here", "messages"),
        (ask("\ud800"), {}, "not valid Unicode", None),
        (ask(), {"tools": [{"type": "function"}]}, "knows no tools", "tools"),
        (ask(), {"enable_thinking": True}, "has no option enable_thinking", "enable_thinking"),
    ],
)
def test_bad_messages_are_refused(model_dir: Path, messages: Any, options: Any, reason: str, param: str | None) -> None:
    with pytest.raises(RequestRejected, match=reason) as refused:
        Tokenizer.load(str(model_dir)).chat(messages, **options)
    assert refused.value.param == param


def test_the_sample_text_is_the_whole_chapter() -> None:
    text = sample_text()
    assert "Call me Ishmael." in text
    assert text.endswith("like a snow hill in the air.\n")
    assert len(text.split("\n\n")) == 17
    assert 12_000 < len(text) < 13_000


@pytest.mark.demo_model
def test_the_sample_text_is_a_long_prompt_for_the_demo_model() -> None:
    if "smollm2" not in TOKENIZERS:
        pytest.skip("the demo model is not in the cache: `sidestream models` prepares it")
    tokenizer = TOKENIZERS["smollm2"]
    assert tokenizer.eos_ids == (2,)
    assert len(tokenizer.encode(sample_text())) == 2879


@pytest.mark.parametrize("make", [byte_level, llama_style])
def test_a_shown_special_token_has_its_name_as_text(make: Any) -> None:
    tokenizer = Tokenizer(make(), eos_ids=[])
    special = tokenizer.special_id("<s>")
    assert special is not None
    ids = [special, *tokenizer.encode("an", add_special_tokens=False), special]
    assert tokenizer.detokenizer(shown=["<s>", "no token"]).decode(ids).replace(" ", "") == "<s>an<s>"
    assert tokenizer.detokenizer(shown=None).decode(ids).replace(" ", "") == "<s>an<s>"
    assert tokenizer.detokenizer().decode(ids) == "an"
