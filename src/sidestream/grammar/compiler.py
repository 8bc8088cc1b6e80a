"""Compiles StructuredOutputs to grammars over token ids. Any thread may use it; it is never used on the engine thread.

llguidance bounds the work of a grammar by counts, not by time: its nodes when it is compiled (about 20 ms of one core),
and its states in each step.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sidestream.config import STRUCTURED_KINDS, StructuredOutputs
from sidestream.errors import RequestRejected
from sidestream.grammar.json_schema import check_embedded, check_schema, with_options
from sidestream.grammar.token_grammar import GuidedAnswer, TokenGrammar, first_line

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

_KEPT = 256
"""Number of compiled grammars that are kept: agents send the same few again and again."""

_SPACES = r"[ \t\r\n]{1,100}"
"""White space between the parts of JSON, if the request does not say. It has a bound, because small models like to
write it for ever.
"""


class GrammarCompiler:
    """Compiles grammars for one model.

    tokenizer   content of the model's tokenizer.json
    vocab_size  number of token ids that the model has logits for
    eos_ids     token ids that end an answer; a grammar allows them where the answer may end
    """

    def __init__(self, tokenizer: str, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutputs, TokenGrammar] = OrderedDict()

    def compile(self, wanted: StructuredOutputs) -> TokenGrammar:
        """See `Grammars.compile`."""
        with self._lock:
            if (known := self._compiled.get(wanted)) is not None:
                self._compiled.move_to_end(wanted)
                return known.copy()
        try:
            tokenizer = self.prepare()
        except ValueError as fault:
            reason = f"grammars cannot use this model's tokenizer ({first_line(str(fault))}): leave it out"
            raise RequestRejected(f"structured_outputs is set, but {reason}", param="structured_outputs") from fault
        from llguidance import LLMatcher

        matcher = LLMatcher(tokenizer, source_of(wanted), log_level=0, limits=_limits())
        # Some grammars exceed a limit at their first token: they are refused here, not on the engine thread.
        trial = matcher.deep_copy()
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(trial.compute_bitmask(), np.uint8), bitorder="little"))
        trial.try_consume_tokens(allowed[:1].tolist())
        grammar = GuidedAnswer(trial if trial.is_error() else matcher)
        if grammar.failure is not None:
            raise _rejected(wanted, grammar.failure)
        with self._lock:
            self._compiled[wanted] = grammar
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return grammar.copy()

    def prepare(self) -> LLTokenizer:
        """Read the tokenizer, which takes half a second during which no other Python thread runs: so a server does it
        when it starts. Raises ValueError for a tokenizer that llguidance cannot use.
        """
        with self._lock:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                self._tokenizer = LLTokenizer(self._source, n_vocab=self._vocab_size, eos_token=[*self._eos_ids])
                self._source = ""
            return self._tokenizer


def check(wanted: StructuredOutputs, where: str = "") -> None:
    """Raise RequestRejected for a form that no grammar can be made of. Needs no tokenizer. `where`: the field of the
    request; empty: the field of `wanted`.
    """
    from llguidance import LLMatcher

    if error := LLMatcher.validate_grammar(source_of(wanted), limits=_limits()):
        raise _rejected(wanted, first_line(error), where)


def source_of(wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's language. Raises RequestRejected."""
    from llguidance import LLMatcher, grammar_from

    try:
        if wanted.json is not None or wanted.json_object:
            schema = json.loads(wanted.json) if isinstance(wanted.json, str) else {"type": "object"}
            if not isinstance(schema, dict) and schema is not True:
                raise ValueError("a schema is an object, or true")
            check_schema(schema)
            pattern = _SPACES if wanted.whitespace_pattern is None else wanted.whitespace_pattern
            flexible = not wanted.disable_any_whitespace
            spaces = {"whitespace_pattern": pattern} if flexible else {"whitespace_flexible": False}
            return LLMatcher.grammar_from_json_schema(json.dumps(with_options(schema, **spaces)))
        if wanted.regex is not None:
            return LLMatcher.grammar_from_regex(wanted.regex)
        if wanted.grammar is not None:
            check_embedded(wanted.grammar)
            is_ours = wanted.grammar.startswith("%llguidance")
            return LLMatcher.grammar_from_lark(wanted.grammar) if is_ours else grammar_from("grammar", wanted.grammar)
        if wanted.structural_tag is not None:
            return _structural_tag(json.loads(str(wanted.structural_tag)))
        return grammar_from("choice", json.dumps(wanted.choice))
    except (ValueError, ArithmeticError, KeyError, TypeError, RecursionError) as fault:
        raise _rejected(wanted, first_line(str(fault))) from fault


def expression_of(wanted: StructuredOutputs) -> str:
    """The form as an expression in llguidance's dialect of Lark, for a larger grammar. Raises RequestRejected."""
    from llguidance import regex_to_lark

    if wanted.regex is not None:
        return f"/{regex_to_lark(wanted.regex)}/"
    if wanted.choice:
        return "(" + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted.choice) + ")"
    if wanted.json is not None or wanted.json_object:
        (grammar,) = json.loads(source_of(wanted))["grammars"]
        return f"%json {json.dumps(grammar['json_schema'])}"
    return f"%lark {{\n{source_of(wanted)}\n}}"


def _structural_tag(tag: Any) -> str:
    """The grammar of structural tags in vLLM's first form: structures (begin, schema, end), and triggers."""
    from llguidance import StructTag

    if not isinstance(tag, dict) or not isinstance(tag.get("structures"), list) or not tag.get("triggers"):
        raise ValueError("a structural tag is an object with structures (each with begin, schema, end) and triggers")
    tags = []
    for structure in tag["structures"]:
        begin = str(structure["begin"])
        trigger = next((one for one in tag["triggers"] if begin.startswith(one)), None)
        if trigger is None:
            raise ValueError(f"no trigger is the start of {begin!r}")
        check_schema(structure["schema"])
        schema = with_options(structure["schema"])
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=str(structure["end"])))
    return StructTag.to_grammar(tags, assume_special=False)


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=200_000, max_lexer_states=50_000, verbose_errors=False)


def _rejected(wanted: StructuredOutputs, reason: str, where: str = "") -> RequestRejected:
    kind = next(name for name in STRUCTURED_KINDS if getattr(wanted, name))
    where = where or f"structured_outputs.{kind}"
    return RequestRejected(f"{where} cannot be enforced: {reason}; change it", param=where)
