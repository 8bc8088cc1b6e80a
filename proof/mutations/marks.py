"""Finds the rules in the product's source: trailing comments such as `# rule: step-leaves-its-fence`.

A mark is on any line of the statement that implements the rule. On a compound statement, it is on the header, and means
only the header. If the line is too long, the mark is alone on the line above the statement. One comment may name
several rules: `# rule: load-holds-its-slots, missing-source-fails-the-load`. Only reads the text of modules; does not
import them.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sidestream
import sidestream_kv
from sidestream.errors import InvariantError

Function = ast.FunctionDef | ast.AsyncFunctionDef

_MARK = re.compile(r"#\s*rule:(?P<names>[^#]*)")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

PACKAGES = (Path(sidestream.__file__).parent, Path(sidestream_kv.__file__).parent)
"""The directories of the product's packages: the engine, and the transfer engine."""


def below_package(path: Path) -> Path:
    """A module's path below its package: `kv/pool.py`."""
    return path.relative_to(package_of(path))


def package_of(path: Path) -> Path:
    """The directory of the package that a module belongs to."""
    return next(package for package in PACKAGES if path.is_relative_to(package))


def modules_in(place: str) -> list[Path]:
    """The modules of a room, such as `kv`, or one module, such as `device/base.py`."""
    found = [package / place for package in PACKAGES if (package / place).exists()]
    return [path for at in found for path in ([at] if at.is_file() else sorted(at.rglob("*.py")))]


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A rule's mark in the source.

    function    the outermost function around the mark, which may be in a class
    qualname    the function's qualified name: `Lease.release`
    statement   the marked statement, a node below `function`
    """

    name: str
    path: Path
    line: int
    module: str
    qualname: str
    function: Function
    statement: ast.stmt

    def __str__(self) -> str:
        return f"{self.name} ({self.module}:{self.line})"


def find_marks(root: Path, package: str, *, but: Sequence[str] = ()) -> dict[str, Mark]:
    """The marks of all modules below `root`, the directory of `package`, by name.

    but   names of folders in `root` that are not read

    Raises InvariantError for a mark that is malformed, appears twice, or is on no statement of a function.
    """
    found: dict[str, Mark] = {}
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        if below.parts[0] in but:
            continue
        text = path.read_text(encoding="utf-8")
        if not _MARK.search(text):
            continue
        module = ".".join((package, *below.with_suffix("").parts)).removesuffix(".__init__")
        for mark in marks_in(text, path, module):
            if mark.name in found:
                raise InvariantError(f"the mark {mark} stands twice, first at {found[mark.name]}: rename one")
            found[mark.name] = mark
    return found


@functools.cache
def product_marks() -> Mapping[str, Mark]:
    """The marks of Sidestream without the test kit. Read once per process."""
    return {name: mark for package in PACKAGES for name, mark in find_marks(package, package.name).items()}


def marks_in(text: str, path: Path, module: str) -> list[Mark]:
    """The marks in one module's text, in source order."""
    lines = text.splitlines()
    tree: ast.Module | None = None
    statements: dict[int, ast.stmt] = {}
    around: dict[ast.AST, tuple[str, Function]] = {}
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or not (match := _MARK.search(token.string)):
            continue
        if tree is None:
            tree = ast.parse(text)
            # The innermost comes last. The lines of `else` and `except` belong to no statement.
            statements = {line: statement for statement in _statements(tree) for line in own_lines(statement)}
            around = {
                node: (name, function)
                for name, function in functions_of(tree.body)
                for node in ast.walk(function)
                if node is not function
            }
        line = token.start[0]
        place = f"{module}:{line}"
        alone = not lines[line - 1][: token.start[1]].strip()
        names = [name.strip() for name in match["names"].split(",")]
        for name in names:
            if not _NAME.fullmatch(name):
                raise InvariantError(f"{token.string!r} at {place}: write `# rule: name` or `# rule: name, other-name`")
        statement = _statement_below(tree, line) if alone else statements.get(line)
        if statement is None or statement not in around:
            raise InvariantError(f"{token.string!r} at {place} marks no statement of a function: move it to one")
        qualname, function = around[statement]
        found += [Mark(name, path, line, module, qualname, function, statement) for name in names]
    return found


def own_lines(statement: ast.stmt) -> range:
    """The lines of a statement without those of nested statements."""
    stop = (statement.end_lineno or statement.lineno) + 1
    below = [_first_line(child) for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    return range(statement.lineno, max(min([stop, *below]), statement.lineno + 1))


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _statement_below(tree: ast.Module, line: int) -> ast.stmt | None:
    """The statement that a comment on its own line marks: the enclosing statement if the comment is inside an
    expression, else the next statement.
    """
    for statement in _statements(tree):
        expressions = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
        last = max([child.end_lineno or 0 for child in expressions], default=0)
        if statement.lineno < line <= last and line in own_lines(statement):
            return statement
    return min((s for s in _statements(tree) if s.lineno > line), key=lambda s: s.lineno, default=None)


def functions_of(body: Iterable[ast.stmt], classes: tuple[str, ...] = ()) -> Iterator[tuple[str, Function]]:
    """The outermost functions of a module, by their names below their classes."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node.body, (*classes, node.name))
        elif isinstance(node, Function):
            yield ".".join((*classes, node.name)), node
