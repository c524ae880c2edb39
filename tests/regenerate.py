"""Regenerate what is generated and committed: the protocol code, docs/errors.md, docs/operations/metrics.md,
consilium/report/paper_tables.txt and paper_claims.txt, and the table of claims in benchmarks/paper/results/claims.md.

python -m tests.regenerate          writes
python -m tests.regenerate --check  fails, and says what differs, when something committed is not what would be written
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.paper import claims
from coordinator.operations import metrics as coordinator_metrics
from fl_core.errors.catalogue import page
from service_core.operations import metrics
from silo.operations import metrics as silo_metrics

_METRICS_HEAD = """# Metrics

The metrics that `coordinator serve --metrics PORT` and `silo serve --metrics PORT` serve at `/metrics`.
[Operations](README.md#metrics) says who may read them. A histogram consists of `_bucket`, `_count` and `_sum`. Both
services also have `process_*` (memory, CPU seconds, open files, start time). Counters start at 0 with each start of
the service. `make protos` writes this page.
"""
ROOT = Path(__file__).resolve().parents[1]
PROTO = "protos/consilium/v1/federation.proto"


def generate(out: Path) -> list[Path]:
    """Write all generated files below `out`; return their paths relative to it."""
    (out / "docs/operations").mkdir(parents=True)
    flags = ["--python_out", "--mypy_out", "--grpc_python_out", "--mypy_grpc_out"]
    plugins = Path(sys.executable).parent
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{ROOT}",
        *(f"{flag}={out}" for flag in flags),
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        str(ROOT / PROTO),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (out / "docs/errors.md").write_text(page(), encoding="utf-8")
    (out / "consilium/report").mkdir(parents=True)
    (out / "consilium/report/paper_tables.txt").write_text(_paper_tables(), encoding="utf-8")
    (out / "consilium/report/paper_claims.txt").write_text(claims.packaged(), encoding="utf-8")
    (out / "benchmarks/paper/results").mkdir(parents=True)
    (out / "benchmarks/paper/results/claims.md").write_text(claims.written(claims.PAGE.read_text()), encoding="utf-8")
    (out / "docs/operations/metrics.md").write_text(_metrics_page(), encoding="utf-8")
    return sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())


def _paper_tables() -> str:
    """Write which tables of benchmarks/paper run which method."""
    tables: dict[str, list[str]] = {}
    for file in sorted((ROOT / "benchmarks/paper/tables").glob("*.yaml")):
        runs = " ".join(map(str, yaml.safe_load(file.read_text())["methods"].values())).split()
        for name in sorted({_method(word.removeprefix("method=")) for word in runs if word.startswith("method=")}):
            tables.setdefault(name, []).append(file.stem)
    lines = (f"{name} {' '.join(files)}\n" for name, files in sorted(tables.items()))
    return "# Tables of benchmarks/paper by method; `make protos` writes this file.\n" + "".join(lines)


def _method(choice: str) -> str:
    """Return the method of a choice, which may be a preset of one."""
    preset = ROOT / f"configs/method/{choice}.yaml"
    return str(yaml.safe_load(preset.read_text())["defaults"][0]) if preset.exists() else choice


def _metrics_page() -> str:
    """Write what each service's metrics are."""
    tables = {"Coordinator": coordinator_metrics.FAMILIES, "Silo": silo_metrics.FAMILIES}
    parts = [f"\n## {side}\n\n{metrics.table(families)}" for side, families in tables.items()]
    return _METRICS_HEAD + "".join(parts)


def _same(a: Path, b: Path) -> bool:
    return a.exists() and a.read_bytes() == b.read_bytes()


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        files = generate(Path(scratch))
        differ = [f for f in files if not _same(ROOT / f, Path(scratch) / f)]
        if check:
            for path in differ:
                print(f"differs from what would be generated: {path}; run `make protos`")
            return int(bool(differ))
        for path in differ:
            shutil.copyfile(Path(scratch) / path, ROOT / path)
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
