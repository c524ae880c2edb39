"""Make the release of the commit that is checked out: python -m release dist."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from release.build import SUMS, ReleaseError, make, require_clean

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("out", type=Path, help="the folder to write into: new, or with an earlier release")
    out: Path = parser.parse_args().out
    try:
        require_clean(ROOT)
        files = make(ROOT, out)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 2
    for file in files:
        print(file)
    print(f"check them: cd {out} && sha256sum --check {SUMS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
