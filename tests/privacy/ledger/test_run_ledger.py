"""The release log over the ledger, the registration of records, and what is released once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_core import datasets
from fl_core.datasets import SiloDataset, TensorExamples
from fl_core.errors import RefusedError
from fl_core.rounds.manifest import NamedOptions
from fl_core.types.records import Schema
from privacy.accounting.accountant import Mechanism
from privacy.accounting.release_plan import Release
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register, unit_names
from privacy.ledger.run_ledger import RunLedger
from tests.support.privacy import DATA, TEST, TRAIN, budgeted, private

STEPS = Release("training", "train", Mechanism(2.0, 0.1, 10))
LOOK = Release("evaluation", "test", Mechanism(20.0))


def test_a_task_is_reserved_and_started_before_it_is_done_and_committed_after(tmp_path: Path) -> None:
    ledger = budgeted(tmp_path)
    run_ledger = RunLedger(ledger, CompiledRun.of(private()), datasets.load(DATA))
    run_ledger.begin("run")
    run_ledger.reserve(0, True, [STEPS, LOOK])
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["RUNNING"]
    run_ledger.commit("sha")
    run_ledger.commit("sha")  # nothing is open any more
    assert [state for _, state, _ in ledger.entries(TRAIN) + ledger.entries(TEST)] == ["SPENT", "SPENT"]
    run_ledger.begin("run")
    run_ledger.reserve(1, True, [STEPS])
    run_ledger.begin("other")
    run_ledger.commit("sha")  # of the other run, which did nothing: the first one's task stays as it was left
    assert [state for _, state, _ in ledger.entries(TRAIN)] == ["SPENT", "RUNNING"]


def test_what_was_released_once_is_kept_for_the_version_the_classes_and_the_kind_of_noise(tmp_path: Path) -> None:
    ledger, dataset, run = budgeted(tmp_path), datasets.load(DATA), private()
    log = RunLedger(ledger, CompiledRun.of(run), dataset)
    assert log.cached("class counts") is None
    value = torch.rand(10) * 100 / 3
    log.cache("class counts", value)
    log.cache("class counts", value + 1)  # a second release does not replace the one that was paid for
    again = RunLedger(Ledger(tmp_path / "ledger.db"), CompiledRun.of(replace(run, rounds=9)), dataset)
    for found in (log.cached("class counts"), again.cached("class counts")):
        assert found is not None
        assert torch.equal(found, value)
    secure = replace(run, privacy=NamedOptions("dp_record", {"rng": "secure"}))
    assert RunLedger(ledger, CompiledRun.of(secure), dataset).cached("class counts") is None
    turned = replace(run, schema=Schema(run.schema.shape, tuple(reversed(run.schema.classes))))
    assert RunLedger(ledger, CompiledRun.of(turned), dataset).cached("class counts") is None


def test_a_book_needs_every_split_registered_as_it_is(tmp_path: Path) -> None:
    ledger, dataset = budgeted(tmp_path), datasets.load(DATA)
    grown = replace(dataset, fingerprint="another")
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        RunLedger(ledger, CompiledRun.of(private()), grown)
    register(ledger, grown, "center1")
    RunLedger(ledger, CompiledRun.of(private()), grown)
    assert ledger.collections() == [TEST, TRAIN, "hospital"]


def test_a_policys_budget_stands_beside_the_ledgers(tmp_path: Path) -> None:
    from privacy.accounting.accountant import Filter

    ledger = budgeted(tmp_path, epsilon=50.0)
    run_ledger = RunLedger(ledger, CompiledRun.of(private()), datasets.load(DATA), {TRAIN: Filter.of(0.5, 1e-5)})
    with pytest.raises(RefusedError, match="E-BUDGET-01"):
        run_ledger.reserve(0, True, [LOOK, STEPS])
    assert ledger.history(TRAIN) == ledger.history(TEST) == []


def test_units_are_the_same_under_any_label_space_and_patients_count_once(tmp_path: Path) -> None:
    plain = datasets.load(DATA)
    names = unit_names(plain.train)
    turned = datasets.load(DATA, datasets.DataRequest(classes=tuple(reversed(plain.schema.classes))))
    assert unit_names(turned.train) == names
    assert len(set(names)) == len(plain.train)
    assert turned.fingerprint == plain.fingerprint
    x = torch.rand(4, 1, 2, 2)
    patients = TensorExamples(x, torch.zeros(4), ("a", "b", "a", "c"))
    assert unit_names(patients) == ["group a", "group b", "group c"]
    torn = SiloDataset(plain.schema, patients, TensorExamples(x[:1], torch.zeros(1), ("c",)), "x", "v1")
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        register(Ledger(tmp_path / "ledger.db"), torn, "x")


def test_image_files_are_identified_by_their_bytes(tmp_path: Path) -> None:
    from PIL import Image

    for c, colour in (("a", 10), ("b", 200)):
        for k in range(3):
            file = tmp_path / "images" / c / f"{k}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (colour, k * 40, 0)).save(file)
    small, large = (
        datasets.load(f"folder:{tmp_path / 'images'}", datasets.DataRequest(classes=["a", "b"], image_size=size))
        for size in (8, 16)
    )
    assert unit_names(small.train) == unit_names(large.train)
    assert len(set(unit_names(small.train) + unit_names(small.test))) == 6
