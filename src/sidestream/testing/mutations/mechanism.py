"""Taking one rule out of the real code, and putting it back: no hook in the code that is tested.

A mutation names a function and a snippet of its source. While it is applied, the function runs code compiled from the
changed source, with the file name and the line numbers of the original; the function object stays the same, so every
importer, bound method and decorator around it sees the change, and sees it undone. Knows nothing of what the rules are
for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal

from sidestream.errors import InvariantError

# Their source in the file is not what they run, so a second mutation of one would lose the first.
_changed_now: set[FunctionType] = set()

Feature = Literal[
    "abort",
    "bad_logits",
    "border",
    "captured",
    "close",
    "corrupt_tier",
    "disk",
    "failing_copy",
    "failing_step",
    "failing_load",
    "failing_tier",
    "full_queue",
    "growing_tier",
    "hang_up",
    "hidden_states",
    "logprobs",
    "meanwhile",
    "offload",
    "preempt",
    "priority",
    "reset",
    "restart",
    "sampling",
    "slow_tier",
    "speculative",
    "weights",
]
"""What a workload may contain.

abort           requests that their clients end, at any point
bad_logits      a step with logits that are not finite, over KV that is wrong
border          front ends between clients and engine
captured        forward passes that are captured and replayed
close           the engine ends in good order, with requests or transfers on their way
corrupt_tier    files of the disk tier that are cut short or have a bit flipped
disk            a disk tier
failing_copy    stores and loads that raise, loads possibly after a part was copied
failing_load    loads among them
failing_step  forward passes that raise
failing_tier    disk reads and writes that raise
full_queue      requests that are refused because too many wait
growing_tier    host memory that is pinned while the engine serves
hang_up         front ends that go while others take their place
hidden_states   drafts that are made of hidden states
logprobs        requests that ask for log-probabilities, beside others that do not
meanwhile       requests that come, and clients that leave, while a step is awaited
offload         a host tier
preempt         a device pool too small for the requests that run
priority        requests of several priorities
reset           the cache is forgotten while transfers are on their way
restart         the engine ends and another one opens the same disk
sampling        penalties, biases and `min_tokens` such that the draws depend on them
slow_tier       disk operations that take longer than the deadline
speculative     tokens that are drafted and verified
weights         new weights, so that what was computed before is wrong
"""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of one function.

    target   the function's import path: `sidestream.kv.pool:Lease.release`
    old      a piece of its source, without the indentation of its `def`; occurs there exactly once
    new      what stands in its place
    """

    target: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One wait, lease, check or publish-order rule, and the change that takes it out.

    name     of the rule that is gone while the mutation is applied
    hazard   one of `HAZARDS`: what the rule makes impossible
    removes  what may happen without it, in one sentence
    needs    what a workload must contain for that to happen; empty: requests that share and reuse blocks are enough
    also     further edits, where two places protect from the same thing and only both together are missed
    """

    name: str
    hazard: str
    target: str
    old: str
    new: str
    removes: str
    needs: frozenset[Feature] = frozenset()
    also: tuple[Edit, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All its changes."""
        return (Edit(self.target, self.old, self.new), *self.also)


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A rule that no schedule misses, because another one protects from the same thing, or because it saves time only.

    noticed_by   a test of the room that does miss it: file below `tests/`, two colons, function; empty: nothing that
                 can be observed changes
    """

    mutation: Mutation
    reason: str
    noticed_by: str = ""


@dataclass(frozen=True, slots=True)
class Exempt:
    """A line that looks like such a rule and is none, or is no rule of its own."""

    target: str
    snippet: str
    reason: str


@dataclass(frozen=True, slots=True)
class Source:
    """A function as it is written.

    text         from its first decorator to its end, without common indentation
    first_line   line of its file where `text` begins
    indent       columns that were taken off each line
    """

    function: FunctionType
    path: str
    first_line: int
    indent: int
    text: str

    def find(self, snippet: str) -> int:
        """Where in `text` the snippet begins. Raises InvariantError unless it occurs exactly once."""
        count = self.text.count(snippet)
        if count != 1:
            name = f"{self.function.__module__}:{self.function.__qualname__}"
            raise InvariantError(
                f"{snippet!r} occurs {count} times in {name}: it must once; the code has changed, change the table too"
            )
        return self.text.index(snippet)

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column, in characters from 0, that an offset into `text` has in the file."""
        before = self.text[:offset]
        return self.first_line + before.count("\n"), self.indent + offset - before.rfind("\n") - 1


def source_of(target: str) -> Source:
    """The function that an import path names: of a module or a class; a static, class or context manager's, too, or a
    property's getter.

    Imports the module. Raises InvariantError when there is no such function.
    """
    module_name, _, qualname = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in qualname.split("."):
        try:
            found = vars(found)[name]
        except KeyError:
            raise InvariantError(f"no {name} in {target}: the code has changed, change the table too") from None
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    function = inspect.unwrap(found)
    if not isinstance(function, FunctionType):
        raise InvariantError(f"{target} is no function: name the method that is to be changed")
    lines, first_line = inspect.getsourcelines(function)
    indent = len(lines[0]) - len(lines[0].lstrip())
    return Source(function, function.__code__.co_filename, first_line, indent, textwrap.dedent("".join(lines)))


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Run the body without the rule that the mutation names; the original code is back at the end, however the body
    ends.

    Changes functions for the whole process: no other thread may be inside one of them at the start or the end. Raises
    InvariantError, with nothing changed, when the mutation does not fit the code or one of its functions is changed
    already.
    """
    changes = [(function, function.__code__, code) for function, code in changed_functions(mutation)]
    with ExitStack() as undo:
        for function, original, code in changes:
            undo.callback(_changed_now.discard, function)
            undo.callback(setattr, function, "__code__", original)
            _changed_now.add(function)
            function.__code__ = code
        yield


def changed_functions(mutation: Mutation) -> list[tuple[FunctionType, CodeType]]:
    """The functions that a mutation changes, each with its code while the mutation is applied. Changes nothing."""
    by_target: dict[str, list[Edit]] = {}
    for edit in mutation.edits:
        by_target.setdefault(edit.target, []).append(edit)
    return [_changed(source_of(target), edits) for target, edits in by_target.items()]


def _changed(source: Source, edits: Sequence[Edit]) -> tuple[FunctionType, CodeType]:
    function = source.function
    if function in _changed_now:
        raise InvariantError(
            f"{function.__module__}:{function.__qualname__} is changed already: end the other mutation first"
        )
    text = source.text
    numbers = [source.first_line + index for index in range(text.count("\n") + 1)]  # of the file, for each line of text
    for edit in edits:
        source.find(edit.old)
        if (count := text.count(edit.old)) != 1:
            raise InvariantError(
                f"{edit.old!r} occurs {count} times in {edit.target} after the edits before: the edits overlap"
            )
        first, last = text[: text.index(edit.old)].count("\n"), edit.old.count("\n")
        numbers[first : first + last + 1] = [
            numbers[first + min(index, last)] for index in range(edit.new.count("\n") + 1)
        ]
        text = text.replace(edit.old, edit.new)
    return function, _compiled(source, text, numbers)


def _compiled(source: Source, text: str, numbers: Sequence[int]) -> CodeType:
    """Code of the function in `text`, inside classes of the same names, so that `super` and private names mean what
    they meant.
    """
    tree = ast.parse(text)
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []  # they are around the function already
    for node in ast.walk(definition):
        if isinstance(node, ast.expr | ast.stmt | ast.ExceptHandler | ast.arg | ast.keyword | ast.alias):
            node.lineno = numbers[node.lineno - 1]
            node.end_lineno = max(node.lineno, numbers[(node.end_lineno or node.lineno) - 1])
            node.col_offset += source.indent
            node.end_col_offset = (node.end_col_offset or 0) + source.indent
            if node.end_lineno == node.lineno:
                node.end_col_offset = max(node.col_offset, node.end_col_offset)
    *classes, _ = source.function.__qualname__.split(".")
    for name in reversed(classes):
        (around,) = ast.parse(f"class {name}: pass").body
        assert isinstance(around, ast.ClassDef)
        around.body = list(tree.body)
        tree.body = [around]
    original = source.function.__code__
    flags = original.co_flags & annotations.compiler_flag
    code: CodeType = compile(tree, original.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in (*classes, original.co_name):
        code = next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)
    return code
