"""Shows that modules which moved between two commits are equal except for imports: `python -m bench.moved OLD NEW`.

Compares syntax trees, and ignores lines, import statements, and names of moved packages in docstrings and strings.
Prints each moved module that differs, and ends with status 1 if there is one. Git finds the renames.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys

_PACKAGE = re.compile(r"\b(sidestream(_kv|_order)?\.(testing\.|device\.|cli\.bench\.)?|proof\.|bench\.)")


class _Plain(ast.NodeTransformer):
    """Leaves imports out, and the package in names that strings spell."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            node.value = " ".join(_PACKAGE.sub("", node.value).split())
        return node


def plain(text: str) -> str:
    """The dump of a module's tree without imports."""
    return ast.dump(_Plain().visit(ast.parse(text)))


def git(*arguments: str) -> str:
    """The output of a git command."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def main(old: str, new: str) -> int:
    """Compare all modules that git calls renamed."""
    found = [line.split("\t") for line in git("diff", "-M", "--name-status", old, new).splitlines()]
    moved = [(before, after) for status, before, *rest in found for after in rest if status[0] == "R"]
    pairs = [pair for pair in moved if pair[1].endswith(".py")]
    different = [
        after
        for before, after in pairs
        if plain(git("show", f"{old}:{before}")) != plain(git("show", f"{new}:{after}"))
    ]
    print(f"{len(pairs)} modules moved, {len(pairs) - len(different)} equal but for imports", *different, sep="\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
