"""How large the house is, and how often one question is asked in it: `python -m tests.house`, and on an older tree
`git worktree add OLD COMMIT` and `python -m tests.house OLD`.

Lines of code are lines that hold a token other than comment and newline, less docstrings, of Python files that git
knows; generated code does not count.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

CORE = ("fl_core", "privacy", "protos", "service_core", "coordinator", "silo")
SPINE = [
    "fl_core/types",
    "fl_core/rounds",
    "fl_core/aggregation",
    "fl_core/training",
    "fl_core/kinds",
    "privacy/profiles",
    "privacy/mechanisms",
    "privacy/accounting",
    "privacy/ledger",
    "privacy/secagg",
    "coordinator/runs",
    "coordinator/api",
    "coordinator/storage",
    "coordinator/config",
    "silo/service",
    "silo/connection",
    "silo/training",
    "silo/storage",
    "protos/wire",
]
"""What a newcomer must read to change a run."""
NO_SOURCE = ("tests", "benchmarks", "docs", "examples")
STRATEGIES = re.compile(r"coordinator/runs/(plain|masked)_rounds\.py")
MASKED = re.compile(r"\.masked\b|secagg is (?:not )?None|keys is (?:not )?None")
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Count the lines of a module that hold code."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def read_tree(root: Path) -> Mapping[str, str]:
    """Read the Python files that git knows in a checkout, by their path, without generated ones."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True).stdout
    return {name: (root / name).read_text() for name in listed.split("\n") if name and "_pb2" not in name}


def measure(files: Mapping[str, str]) -> Mapping[str, int]:
    """Count what the plan of the house has aims for; files: text by path."""
    source = {path: text for path, text in files.items() if not path.startswith(tuple(f"{f}/" for f in NO_SOURCE))}
    size = {path: code_lines(text) for path, text in source.items()}

    def lines(where: Callable[[str], bool]) -> int:
        return sum(n for path, n in size.items() if where(path))

    classes = Counter(
        node.name
        for text in source.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {
        "core, lines of code": lines(lambda path: path.startswith(tuple(f"{f}/" for f in CORE))),
        "all source, lines of code": lines(lambda _: True),
        "modules": len(source),
        "spine, lines of code": lines(lambda path: path.startswith(tuple(f"{f}/" for f in SPINE))),
        "files that name TaskKind": sum("TaskKind." in text for text in source.values()),
        "masked-or-plain questions outside of the strategies": sum(
            len(MASKED.findall(text)) for path, text in source.items() if not STRATEGIES.fullmatch(path)
        ),
        "class names taken twice": sum(n > 1 for n in classes.values()),
        "assignments to `found`": sum(len(re.findall(r"\bfound\b *=[^=]", text)) for text in source.values()),
        "test lines": sum(text.count("\n") for path, text in files.items() if path.startswith("tests/")),
    }


def main(root: str = ".") -> None:
    for name, count in measure(read_tree(Path(root))).items():
        print(f"{count:>9,}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
