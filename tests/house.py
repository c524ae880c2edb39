"""How large the house is, and how often one question is asked in it: `python -m tests.house`, and on an older tree
`git worktree add OLD COMMIT` and `python -m tests.house OLD`.

Lines of code are lines that hold a token other than comment and newline, less docstrings, of Python files that git
knows; generated code does not count.

`python -m tests.house --walk` trains with three hospitals in this process, and names the source files that run from the
last update of a round, on its hospital's disk, to the announcement that the round is closed.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import FrameType

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
    "silo/admission",
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


# ---- the walk of an update -------------------------------------------------------------------------------------------

_ROUND = 1
"""The round that is watched: by then everything that is made once per run is there."""


_STANDING = ("maintenance", "audit-log", "session-pulse", "idle-watch")
"""Threads that work every second or so, whatever updates do."""


class Recorder:
    """The functions of the core that are called while `on`, by file; for `threading.setprofile`."""

    def __init__(self, root: Path) -> None:
        self.on = False
        self.functions = set[tuple[str, str]]()
        self._root = f"{root}/"

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        del argument
        if self.on and event == "call":
            path = frame.f_code.co_filename.removeprefix(self._root)
            if path.startswith(CORE) and "_pb2" not in path and threading.current_thread().name not in _STANDING:
                self.functions.add((path, frame.f_code.co_qualname))

    @property
    def files(self) -> Mapping[str, int]:
        """Return how many functions of each file were called."""
        return dict(sorted(Counter(path for path, _ in self.functions).items()))


def walk(*words: str) -> Recorder:
    """Train a run of three real hospitals, and record one update's way. words: of the run's configuration."""
    from coordinator.config.hydra_config import compose_spec
    from coordinator.lead.client import LeadClient
    from coordinator.operations.metrics import CoordinatorMetrics
    from silo.storage.store import SiloStore
    from tests.support import until
    from tests.support.coordinator import World
    from tests.support.federation import hospitals

    names, recorder, worlds = ("north", "east", "south"), Recorder(Path.cwd()), list[World]()
    stage, close, staged = SiloStore.stage, CoordinatorMetrics.round_closed, list[str]()

    def record_the_last(store: SiloStore, entry: object, evaluation: object) -> None:
        stage(store, entry, evaluation)  # type: ignore[arg-type]
        if entry.key.round == _ROUND:  # type: ignore[attr-defined]
            staged.append(entry.key.run_id)  # type: ignore[attr-defined]
            if len(staged) == len(names):
                arrived = worlds[0].server.store.contributions.arrivals  # type: ignore[union-attr]
                until(lambda: len(arrived(staged[0], _ROUND)) == len(names) - 1, "the other updates")
                time.sleep(1.0)  # what follows from them is over
                recorder.on = True

    def stop_at_the_close(metrics: CoordinatorMetrics, row: object) -> None:
        recorder.on = recorder.on and row.round != _ROUND  # type: ignore[attr-defined]
        close(metrics, row)  # type: ignore[arg-type]

    threading.setprofile(recorder)
    SiloStore.stage, CoordinatorMetrics.round_closed = record_the_last, stop_at_the_close  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as folder, hospitals(Path(folder)) as people:
            world = people.world
            worlds.append(world)
            people.join(*names)
            with closing(LeadClient.open(world.home)) as client:
                members = list(client.silos().silos)
            common = ["data=digits", "threads=1", "rounds=2", "train.epochs=1", "model=digits_linear", "method=fedavg"]
            spec = compose_spec([*common, *words]).to_json()
            world.finished(world.server.runs.submit(world.compose(spec, members), spec, "walk").id, 120)  # type: ignore[union-attr]
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        SiloStore.stage, CoordinatorMetrics.round_closed = stage, close  # type: ignore[method-assign]
    return recorder


def show_walk() -> None:
    for name, words in (("plain", "secagg=off"), ("masked", "secagg=on")):
        recorder = walk(words)
        print(f"{name}: {len(recorder.files)} files, {len(recorder.functions)} functions")
        for path, number in recorder.files.items():
            print(f"{number:>9,}  {path}")


def main(root: str = ".") -> None:
    if root == "--walk":
        show_walk()
        return
    for name, count in measure(read_tree(Path(root))).items():
        print(f"{count:>9,}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
