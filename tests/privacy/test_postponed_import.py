"""Modules of a package without its `__init__`, which runs once when somebody needs it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from privacy.postponed_import import postpone

INIT = """
import time
from made_up_package import part
RUNS = globals().get("RUNS", 0) + 1
time.sleep(0.1)
LATE = part.VALUE + 1
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "made_up_package"
    (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text(INIT)
    (tmp_path / name / "part.py").write_text("VALUE = 1\n")
    (tmp_path / name / "deep/__init__.py").write_text("raise ImportError('not needed')\n")
    (tmp_path / name / "deep/leaf.py").write_text("from made_up_package.part import VALUE\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in (name, f"{name}.part", f"{name}.deep", f"{name}.deep.leaf"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return name


def test_modules_are_imported_without_their_package_which_is_whole_when_it_is_asked(package: str) -> None:
    postpone(package)
    import made_up_package.part as part  # type: ignore[import-not-found]

    made = sys.modules[package]
    assert (part.VALUE, "LATE" in vars(made)) == (1, False)
    assert (made.LATE, made.RUNS, made.part) == (2, 1, part)
    with pytest.raises(AttributeError, match=r"made_up_package.*nothing"):
        _ = made.nothing
    assert made.RUNS == 1


def test_a_package_within_a_package_is_postponed_too(package: str) -> None:
    postpone(package)
    postpone(f"{package}.deep")
    import made_up_package.deep.leaf

    assert made_up_package.deep.leaf.VALUE == 1
    with pytest.raises(ImportError, match="not needed"):
        _ = made_up_package.deep.anything


def test_threads_that_ask_at_once_wait_for_one_that_runs_it(package: str) -> None:
    postpone(package)
    made, ready = sys.modules[package], Barrier(8)

    def ask(_: int) -> tuple[int, int]:
        ready.wait()
        return made.LATE, made.RUNS

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, range(8))) == {(2, 1)}


def test_a_package_that_is_there_or_nowhere_is_left_alone() -> None:
    before = sys.modules["pytest"]
    postpone("pytest")
    postpone("made_up_package_that_nobody_has")
    assert sys.modules["pytest"] is before
    assert "made_up_package_that_nobody_has" not in sys.modules


PROGRAM = """
import sys
from privacy.accounting.accountant import Mechanism, rdp
assert rdp([Mechanism(1.0, 0.1, 10)])[0] > 0
before = "torch" in sys.modules
import torch
from privacy.mechanisms.record.per_sample_gradients import MODES, per_unit
for mode in MODES:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    with per_unit(model, mode) as engine:
        engine.clipped_sum(lambda: model(torch.ones(4, 1, 4, 4)).sum(1), torch.arange(4), 1.0)
print(before, sorted({"scipy.stats", "sympy", "torch.distributed.tensor", "torch._dynamo"} & set(sys.modules)))
import opacus
from opacus.accountants import PRVAccountant
from privacy.mechanisms.record import per_sample_gradients
print(opacus.GradSampleModule is per_sample_gradients.GradSampleModule, hasattr(opacus.PrivacyEngine(), "accountant"))
"""


@pytest.mark.integration
def test_private_steps_and_spending_load_no_statistics_symbols_or_distributed_torch_and_opacus_stays_whole() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False []", "True True"]
