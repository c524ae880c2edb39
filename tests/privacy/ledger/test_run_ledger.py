"""The release log over the ledger, the registration of records, and what is released once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from fl_core import datasets
from fl_core.datasets import SiloDataset, TensorExamples
from fl_core.errors import RefusedError
from fl_core.rounds.manifest import NamedOptions
from fl_core.types.records import Schema
from privacy.accounting.accountant import Mechanism
from privacy.accounting.release_plan import Release
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import as_registered, register, unit_names, version
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
    from privacy.accounting.accountant import PrivacyFilter

    ledger = budgeted(tmp_path, epsilon=50.0)
    run_ledger = RunLedger(ledger, CompiledRun.of(private()), datasets.load(DATA), {TRAIN: PrivacyFilter.of(0.5, 1e-5)})
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


CRP = 'label = "dx"\nclasses = ["a", "b"]\n[columns.crp]\ntype = "number"\nmin = 0\nmax = 500\n'
SHORT = [round(0.1 + 0.3 * k, 1) for k in range(120)]
LONG = [500 * (k * 0.6180339887498949 % 1) for k in range(120)]


def crp_table(file: Path, values: Sequence[float]) -> SiloDataset:
    """Write a table of one number and a class, as text or in a column of float32, and load it."""
    file.with_suffix(".toml").write_text(CRP)
    if file.suffix == ".csv":
        file.write_text("crp,dx\n" + "".join(f"{v!r},{'ab'[k % 2]}\n" for k, v in enumerate(values)))
    else:
        pd.DataFrame({"crp": np.array(values, np.float32), "dx": list("ab" * 60)}).to_parquet(file)
    return datasets.load(f"table:{file}")


@pytest.mark.parametrize("values", [SHORT, LONG], ids=["one decimal", "all digits"])
@pytest.mark.parametrize("first", ["a.csv", "b.parquet"])
def test_the_same_rows_as_csv_and_as_float32_have_one_budget(
    tmp_path: Path, values: Sequence[float], first: str
) -> None:
    one, other = sorted((crp_table(tmp_path / name, values) for name in ("a.csv", "b.parquet")), key=lambda d: d.origin)
    if first != "a.csv":
        one, other = other, one
    ledger = Ledger(tmp_path / "ledger.db")
    assert register(ledger, one, "one")["one/train"]
    assert not register(ledger, other, "one")["one/train"]  # the same version under the same name
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        register(ledger, other, "two")


def registered_by_0_1_0(ledger: Ledger, dataset: SiloDataset, cells: Mapping[str, Sequence[str]]) -> None:
    """Write into a ledger what 0.1.0 wrote of a table; cells: of each split, as it named them."""
    earlier = dataset if dataset.earlier is None else dataset.earlier()
    for split, texts in cells.items():
        names = [f"content {hashlib.sha256(f'row crp={text}'.encode()).hexdigest()}" for text in texts]
        ledger.register(f"one/{split}", "record", version(earlier, split), len(names), names, names)
    ledger.register("hospital", "hospital", version(earlier, "hospital"), 120, ["hospital"])


def halves(texts: Sequence[str]) -> dict[str, list[str]]:
    """Divide rows as 0.1.0 did: a fifth is test, by a hash of what it called them."""
    drawn = [int.from_bytes(hashlib.sha256(f"split crp={text}".encode()).digest()[:8]) / 2**64 for text in texts]
    test = [text for text, share in zip(texts, drawn, strict=True) if share < 0.2]
    return {"train": [text for text in texts if text not in test], "test": test}


@pytest.mark.parametrize(
    ("file", "values"), [("a.csv", SHORT), ("a.csv", LONG), ("a.parquet", SHORT), ("a.parquet", LONG)]
)
def test_data_that_0_1_0_registered_stay_the_same_collection_and_get_no_fresh_budget(
    tmp_path: Path, file: str, values: Sequence[float]
) -> None:
    stored = values if file == "a.csv" else [float(np.float32(v)) for v in values]
    ledger = Ledger(tmp_path / "ledger.db")
    dataset = crp_table(tmp_path / file, values)
    registered_by_0_1_0(ledger, dataset, halves([repr(v) for v in stored]))
    served = as_registered(ledger, dataset)
    assert ledger.collection_of(version(served, "train")) == "one/train"
    assert sorted(len(split) for split in (served.train, served.test)) == sorted(
        len(texts) for texts in halves([repr(v) for v in stored]).values()
    )
    for name in ("two", "three"):
        with pytest.raises(RefusedError, match="E-BUDGET-04"):
            register(ledger, dataset, name)
    assert not any(register(ledger, dataset, "one").values())  # now the ledger knows the new names, too
    for again in ("again.csv", "again.parquet"):
        with pytest.raises(RefusedError, match="E-BUDGET-04"):
            register(ledger, crp_table(tmp_path / again, values), "two")


def test_a_patient_whose_number_is_exported_with_a_point_is_the_same_patient(tmp_path: Path) -> None:
    ledger, made = Ledger(tmp_path / "ledger.db"), []
    for name, spelt, shift in (("a", "{}", 0.0), ("b", "{}.0", 0.5)):
        file = tmp_path / f"{name}.csv"
        file.with_suffix(".toml").write_text('group = "patient"\n' + CRP)
        body = (f"{spelt.format(k // 2)},{k + shift},{'ab'[k % 2]}\n" for k in range(120))
        file.write_text("patient,crp,dx\n" + "".join(body))
        made.append(datasets.load(f"table:{file}"))
    assert set(made[0].test.groups or ()) == set(made[1].test.groups or ())
    register(ledger, made[0], "one")
    with pytest.raises(RefusedError, match="E-BUDGET-04"):
        register(ledger, made[1], "two")
    assert unit_names(made[0].train) == unit_names(made[1].train)


def test_numbers_in_memory_are_the_same_record_in_every_width() -> None:
    class Wide(TensorExamples):
        def stored(self, index: Tensor) -> Tensor:
            return super().stored(index).double()

    x, y = torch.rand(4, 3), torch.zeros(4)
    assert unit_names(Wide(x, y)) == unit_names(TensorExamples(x, y))
