"""Regenerate what is generated and committed: the protocol code and docs/errors.md.

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

from fl_core.errors.catalogue import page

ROOT = Path(__file__).resolve().parents[1]
PROTO = "protos/consilium/v1/federation.proto"


def generate(out: Path) -> list[Path]:
    """Write all generated files below `out`; return their paths relative to it."""
    (out / "docs").mkdir()
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
    return sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())


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
