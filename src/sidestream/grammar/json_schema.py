"""Refuses JSON schemas of which llguidance would make a grammar of other answers, or only in seconds; llguidance itself
refuses the keywords that it does not know. Knows schemas as Python values, never tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

OPTIONS = "x-guidance"
"""Key of llguidance's own options in a schema."""

ONE_SPELLING: dict[str, Any] = {"json_allowed_escapes": 'nrbtf"\\'}
"""Options under which each key has one spelling. A key of `properties` that is spelled with `\\u` would be one of the
additional properties, which have another schema.
"""

# Compile times on one slow core: 1,000 properties take 100 ms, 2,000 take 300 ms; 100 patterns 40 ms, 300 take 2 s.
# With one of more than 44 names required, the parser reaches a limit. A multiple of 10,000 takes 1 ms, of 65,536 up to
# 340 ms, and of 9,999,991 all memory.
_MOST = {"properties": 1000, "patternProperties": 60, "anyOf": 1000, "oneOf": 1000, "allOf": 1000}
_MOST_PARTS = 5000
_MOST_VALUES = 30_000
_MOST_OPTIONAL = 40
_MOST_MULTIPLE = 10_000
_LITERALS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum")
_APPLIED = {"anyOf", "oneOf", "$ref"}
_ANNOTATIONS = {"title", "description", "default", "examples", "$defs", "definitions", "$schema", "$id", "$comment"}
_NESTED_CLASS = re.compile(r"\[\^?\]?[^\]]*?(\[|&&|--|~~)")
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_ESCAPES = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[av]|(?:x|u00)(?:0[0-7bef]|1[0-9a-f]|7f)|[xu]\{)", re.IGNORECASE)
_CLASSES = re.compile(r"\[\^(?:\\.|[^\]\\])*\]|\[(?:(?>\\.[0-9a-fA-F]*)|[^\]\\]){2,}\]")
_EMBEDDED = re.compile(r"%json\s*")


def check_schema(schema: Any) -> None:
    """Raise ValueError, naming the keyword, for a schema whose grammar would be wrong or take long to compile."""
    if isinstance(schema, dict) and OPTIONS in schema:
        raise ValueError(f"{OPTIONS} is not taken from a schema: give structured_outputs.whitespace_pattern")
    values = list(_values(schema))
    parts = [value for value in values if isinstance(value, dict | list)]
    if len(parts) > _MOST_PARTS or len(values) > _MOST_VALUES:
        size = f"{len(parts)} objects and arrays, and {len(values)} values"
        raise ValueError(f"it has {size}: at most {_MOST_PARTS} and {_MOST_VALUES} are compiled")
    nodes = [part for part in parts if isinstance(part, dict)]
    for node in nodes:
        _check_sizes(node)
        _check_patterns(node)
        if isinstance(node.get("prefixItems"), list) and "additionalItems" in node:
            raise ValueError("prefixItems is not enforced beside additionalItems, which is named items there")
        if isinstance(draft := node.get("$schema"), str) and draft != schema.get("$schema"):
            raise ValueError(f"$schema of a part, {draft}, is not enforced: give the whole schema this one")
        for value in _values([node.get(name) for name in _LITERALS]):
            if isinstance(value, int) and abs(value) > 2**53 and int(float(value)) != value:
                raise ValueError(f"{value} has more than 53 bits, and would be rounded")
            if isinstance(value, str) and (found := _CONTROLS.search(value)):
                raise ValueError(f"const and enum cannot have the control character {found[0]!r}")
    for group in [nodes] if any(map(_merges, nodes)) else [[node] for node in nodes]:
        _check_multiples(group)
        _check_exclusive(group)


def check_embedded(grammar: str) -> None:
    """Raise ValueError if a schema inside a grammar in llguidance's dialect of Lark takes long to compile or is wrong.
    Such grammars may have options of llguidance.
    """
    for found in _EMBEDDED.finditer(grammar):
        schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        check_schema(
            {key: part for key, part in schema.items() if key != OPTIONS} if isinstance(schema, dict) else schema
        )


def with_options(schema: Any, **options: Any) -> Any:
    """The schema, an object or true, with options of llguidance."""
    return {**({} if schema is True else schema), OPTIONS: {**ONE_SPELLING, **options}}


def _values(value: Any) -> Iterator[Any]:
    """The value, and all inside it. A `$ref` may make a schema of any of them, so none is left out."""
    waiting = [value]
    while waiting:
        yield (part := waiting.pop())
        if isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part


def _check_sizes(node: dict[str, Any]) -> None:
    for name, most in _MOST.items():
        if isinstance(part := node.get(name), dict | list) and len(part) > most:
            raise ValueError(f"{name} has {len(part)} entries: at most {most} are compiled")
    least, required, listed = (node.get(name) for name in ("minProperties", "required", "properties"))
    required = required if isinstance(required, list) else []
    num_listed = len(listed) if isinstance(listed, dict) else 0
    if not _is_number(least) or least <= len(required):
        return
    if least > len({*map(str, required)}) + 1:  # a name that is given twice counts twice
        raise ValueError(f"minProperties {least} is not enforced with {len(required)} required: at most one more")
    if num_listed - len(required) > _MOST_OPTIONAL:
        raise ValueError(f"minProperties is not enforced with more than {_MOST_OPTIONAL} optional properties")


def _check_patterns(node: dict[str, Any]) -> None:
    patterns = node.get("patternProperties")
    for pattern in (node.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        if not isinstance(pattern, str):
            continue
        if found := _NESTED_CLASS.search(re.sub(r"\\.", "", pattern)):
            raise ValueError(f"pattern {pattern[:100]!r} has {found[1]} inside of brackets: escape it")
        outside = _CLASSES.sub("", pattern)
        if found := _CONTROLS.search(outside) or _CONTROL_ESCAPES.search(outside):
            raise ValueError(f"pattern {pattern[:100]!r} cannot have the control character {found[0]!r}")


def _merges(node: dict[str, Any]) -> bool:
    """Whether keywords of several schemas may become one."""
    names = node.keys() - _ANNOTATIONS
    if "allOf" in names or names >= {"properties", "patternProperties"}:
        return True
    return len(names) > 1 and not names.isdisjoint(_APPLIED)


def _check_multiples(nodes: list[dict[str, Any]]) -> None:
    """A grammar of multiples has as many states; schemas that are merged have the least common multiple."""
    multiples = [Decimal(str(node["multipleOf"])) for node in nodes if _is_number(node.get("multipleOf"))]
    places = max((-int(multiple.as_tuple().exponent) for multiple in multiples), default=0)
    if not -20 < places < 20 or math.lcm(*(int(multiple.scaleb(places)) for multiple in multiples)) > _MOST_MULTIPLE:
        raise ValueError(f"multipleOf, or its least common multiple, has more than {_MOST_MULTIPLE} without its point")


def _check_exclusive(nodes: list[dict[str, Any]]) -> None:
    """An exclusive bound that is whole would be allowed, if the other bound is less than one away."""
    bounds = [(node.get(f"m{end}imum"), node.get(f"exclusiveM{end}imum")) for end in ("in", "ax") for node in nodes]
    numbers = [number for bound in bounds for number in bound if _is_number(number)]
    for plain, exclusive in bounds:
        bound = plain if exclusive is True else exclusive
        if _is_number(bound) and bound == int(bound) and any(0 < abs(number - bound) < 1 for number in numbers):
            raise ValueError(f"exclusiveMinimum or exclusiveMaximum {bound} is not enforced with a bound so near")


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
