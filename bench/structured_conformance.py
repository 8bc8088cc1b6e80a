"""Whether answers under a JSON schema are valid under it, with the package `jsonschema` as the judge. The schemas are
those of the official JSON Schema Test Suite; those of `structured_schemas.json`, in the style of real requests; and
large ones. Answers are drawn at random from the token masks, so the model does not matter.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal, getcontext
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from proof.report import Figure, at_least, at_most
from sidestream.config import StructuredOutputs
from sidestream.errors import ConfigError, RequestRejected
from sidestream.grammar import GrammarCompiler, TokenGrammar

_DRAFTS = {"draft7": "http://json-schema.org/draft-07/schema#", "draft2020-12": None}
_WALK_TOKENS = 60
"""Tokens after which an answer closes what is open."""
_MOST_TOKENS = 600
_LARGE: dict[str, Any] = {
    "depth_60": json.loads('{"additionalProperties": ' * 60 + "{}" + "}" * 60),
    "depth_400": json.loads('{"additionalProperties": ' * 400 + "{}" + "}" * 400),
    "enum_20000": {"enum": [f"value {number} of many" for number in range(20_000)]},
    "properties_1000": {"properties": {f"name_{number}": {"type": "integer"} for number in range(1000)}},
    "max_items_1e9": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
    "max_length_1e6": {"type": "string", "pattern": "^[a-z ]+$", "maxLength": 10**6},
    "multiple_of_9999991": {"multipleOf": 9_999_991},
    "pattern_repetition": {"type": "string", "pattern": "^((a|b|c){1,100}x?){1,100}$"},
    "pattern_ambiguous": {"type": "string", "pattern": "^(a+)+b.{200}c$"},
    "pattern_states": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"},
}


def measure(model: str, *, suite: Path, walks: int, seed: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Compile every schema, draw `walks` answers of each and judge them, and try the instances of the suite."""
    from sidestream.models.catalog import resolve
    from sidestream.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve(model))
    compiler = GrammarCompiler(tokenizer.to_json(), vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)
    judged = Conformance(compiler, seed)
    schemas = list(_schemas(suite))
    for number, (draft, schema, instances) in enumerate(schemas, 1):
        on_progress(f"schema {number} of {len(schemas)}")
        judged.judge(draft, schema, instances, walks)
    small_s, num_refused, large = max(judged.compile_s), judged.refused.total(), list[Figure]()
    for name, schema in _LARGE.items():
        judged.judge("draft2020-12", schema, [], 3)
        large.append(Figure(f"compile_ms_{name}", 1e3 * judged.compile_s[-1], "ms", at_most(200)))
    counts = judged.counts
    return [
        Figure("grammar_invalid", counts["invalid"], "outputs", at_most(0)),
        Figure("outputs", counts["outputs"], "outputs", at_least(2000)),
        Figure("invalid_instances_accepted", counts["accepted"], "instances", at_most(0)),
        Figure("outputs_invalid_with_formats", counts["invalid_format"], "outputs"),
        Figure("outputs_unfinished", counts["unfinished"], "outputs"),
        *(
            Figure(name, counts[name], "instances")
            for name in ("invalid_instances", "valid_instances", "valid_refused")
        ),
        Figure("schemas", len(schemas), "schemas"),
        Figure("schemas_refused", num_refused, "schemas"),
        Figure("compile_ms_suite", 1e3 * small_s, "ms", at_most(200)),
        *large,
        Figure("mask_ms_max", 1e3 * judged.mask_s, "ms"),
        *(Figure(f"wrong_{name}", count, "outputs") for name, count in sorted(judged.wrong.items())),
        *(Figure(f"refused_{name}", count, "schemas") for name, count in judged.refused.most_common()),
    ]


class Conformance:
    """Judges schemas, and counts.

    wrong      invalid answers, by the keyword that they violate
    refused    refused schemas, by the start of the reason
    compile_s  CPU seconds of each compilation; mask_s: the most CPU seconds of a mask
    """

    def __init__(self, compiler: GrammarCompiler, seed: int) -> None:
        try:
            self._judges = importlib.import_module("jsonschema")
        except ImportError as fault:
            raise ConfigError("the package jsonschema is the judge: pip install 'jsonschema[format-nongpl]'") from fault
        getcontext().prec = 4000  # numbers are judged as they are written
        self.counts, self.wrong, self.refused = Counter[str](), Counter[str](), Counter[str]()
        self.compile_s, self.mask_s = list[float](), 0.0
        self._compiler, self._guide, self._random = compiler, compiler.prepare(), random.Random(seed)
        self._eos_id = self._guide.eos_token
        texts = [self._guide.decode_bytes([at]) for at in range(self._guide.vocab_size)]
        self._single = np.array([len(text) == 1 for text in texts])
        self._closing = [self._eos_id, *(texts.index(text) for text in (b'"', b"}", b"]"))]
        self._masks = np.zeros((1, -(-len(texts) // 32)), np.int32)

    def judge(self, draft: str, schema: Any, instances: list[Any], walks: int) -> None:
        """Draw and judge `walks` answers, and try instances of the suite."""
        begin = time.thread_time()
        try:
            grammar = self._compiler.compile(StructuredOutputs(json=json.dumps(schema)))
        except RequestRejected as fault:
            reason = str(fault).split("enforced: ")[-1].removeprefix("Unimplemented keys: ")
            self.refused["_".join(re.findall(r"\w+", reason)[: 1 if reason[0] == "[" else 3])] += 1
            return
        finally:
            self.compile_s.append(time.thread_time() - begin)
        kind = self._judges.Draft7Validator if draft == "draft7" else self._judges.Draft202012Validator
        exact = _exact(json.dumps(schema))
        judge, strict = kind(exact), kind(exact, format_checker=kind.FORMAT_CHECKER)
        for _ in range(walks):
            text = self._walk(grammar.copy())
            self.counts["unfinished" if text is None else "outputs"] += 1
            if text is not None and not self._is_invalid(judge, text, "invalid"):
                self._is_invalid(strict, text, "invalid_format")
        for instance in instances:
            kind = "valid_instances" if instance["valid"] else "invalid_instances"
            accepted = [text for text in _spelled(instance["data"]) if self._accepts(grammar.copy(), text)]
            self.counts[kind] += 1
            self.counts["valid_refused"] += instance["valid"] and not accepted
            if not instance["valid"]:
                any(self._is_invalid(judge, text, "accepted") for text in accepted)

    def _is_invalid(self, judge: Any, text: str, count: str) -> bool:
        error = next(judge.iter_errors(_exact(text)), None)
        if error is not None:
            keyword = f"format_{error.validator_value}" if error.validator == "format" else error.validator or "false"
            self.counts[count] += 1
            self.wrong[keyword.replace("-", "_")] += 1
        return error is not None

    def _allowed(self, grammar: TokenGrammar) -> npt.NDArray[np.bool_]:
        begin = time.thread_time()
        grammar.fill(self._masks, ())
        self.mask_s = max(self.mask_s, time.thread_time() - begin)
        return np.unpackbits(self._masks.view(np.uint8), bitorder="little")[: self._single.size].astype(bool)

    def _walk(self, grammar: TokenGrammar) -> str | None:
        """A random answer; None: it did not end. Most of its tokens are single bytes, so that strings and names are
        often short.
        """
        ids: list[int] = []
        while len(ids) < _MOST_TOKENS and grammar.failure is None:
            allowed = self._allowed(grammar)
            if (single := allowed & self._single).any() and self._random.random() < 0.7:
                allowed = single
            closes = self._random.random() < len(ids) / _WALK_TOKENS
            closing = [at for at in self._closing if allowed[at]] if closes else []
            ids.append(closing[0] if closing else int(self._random.choice(np.flatnonzero(allowed))))
            if grammar.advance(ids[-1:]):
                return self._guide.decode_bytes([at for at in ids if at != self._eos_id]).decode("utf-8")
        return None

    def _accepts(self, grammar: TokenGrammar, text: str) -> bool:
        complete = grammar.advance(self._guide.tokenize_str(text))
        return grammar.failure is None and (complete or bool(self._allowed(grammar)[self._eos_id]))


def _schemas(suite: Path) -> Iterator[tuple[str, Any, list[Any]]]:
    """Draft, schema and instances. Raises ConfigError if `suite` is another folder."""
    for draft, uri in _DRAFTS.items():
        if not (paths := sorted((suite / draft).glob("*.json"))):
            raise ConfigError(f"{suite} has no {draft}: give the folder `json/tests` of jsonschema's source archive")
        for group in (group for path in paths for group in json.loads(path.read_text(encoding="utf-8"))):
            schema = group["schema"]
            yield draft, {"$schema": uri, **schema} if uri and isinstance(schema, dict) else schema, group["tests"]
    own = json.loads(Path(__file__).with_name("structured_schemas.json").read_text(encoding="utf-8"))
    yield from (("draft7" if "$schema" in schema else "draft2020-12", schema, []) for schema in own.values())


def _spelled(instance: Any) -> Iterator[str]:
    """The instance as JSON in several ways: orders of its keys, because a grammar allows one; pairs twice; escapes."""
    orders = [json.dumps(instance, ensure_ascii=False), json.dumps(instance)]
    if isinstance(instance, dict) and instance:
        orders += [json.dumps(dict(order)) for order in islice(permutations(instance.items()), 24)]
        orders += [f"{text[:-1]}, {text[1:]}" for text in orders[-1:]]
    for text in orders:
        yield text
        yield re.sub(r'(?<=")[^"\\]+(?=")', lambda found: "".join(f"\\u{ord(one):04x}" for one in found[0]), text)


def _exact(text: str) -> Any:
    """The JSON value, without rounding of its numbers; exponents beyond 1,000 are cut."""

    def number(digits: str) -> int | Decimal:
        exact = Decimal(re.sub(r"[eE]([+-]?)0*[1-9]\d{3,}$", r"e\g<1>1000", digits))
        return int(exact) if exact == exact.to_integral_value() else exact

    return json.loads(text, parse_float=number, parse_int=number)
