"""Several labels at once: hospitals that each looked for some of them learn all of them together."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor

from consilium.model import calibration, inputs, model_file
from consilium.model.predictor import Predictor, calibrated, tally
from consilium.research.simulate import runner
from consilium.research.simulate.engine import SimulationEngine
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.manifest_builder import request_of
from fl_core import datasets
from fl_core.datasets.image_loader import ImageLoader
from fl_core.errors import ConfigError, DataError, SchemaError, StateError
from fl_core.rounds.manifest import RunManifest
from tests.support import some
from tests.support.data import write_csv

pytestmark = pytest.mark.integration

LABELS = ("even", "large", "loop")
SCHEMA = 'labels = ["even", "large", "loop"]\nsplit = "split"\n' + "".join(
    f'[columns.p{k}]\ntype = "number"\nmin = 0\nmax = 16\n' for k in range(64)
)
WORDS = ["data=table", "threads=1", "train.lr=0.1", "train.epochs=3", "rounds=6"]
FROZEN = ("train.freeze=features", "rounds=1")
MARGIN = 0.1
"""By how much knowing that nobody looked must beat taking it for "not there", in accuracy."""


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Give pixels (1797, 64) and the labels (1797, 3) of the digits: even, 5 or more, with a loop."""
    found = load_digits()
    y = found.target
    return found.data, np.stack((y % 2 == 0, y >= 5, np.isin(y, (0, 6, 8, 9))), 1).astype(int)


def hospitals(root: Path, absent: str = "") -> list[str]:
    """Write the tables of three hospitals, of which each looked for one label; absent: what stands for the others."""
    x, y = digits()
    references = []
    for k, name in enumerate(LABELS):
        rows = []
        for i in range(k, 1500, 3):
            answers = [y[i, j] if j == k else absent for j in range(3)]
            rows.append([*x[i], *answers, "test" if i % 5 == 0 else "train"])
        header = [*(f"p{c}" for c in range(64)), *LABELS, "split"]
        table = write_csv(root / name / "patients.csv", header, rows)
        table.with_suffix(".toml").write_text(SCHEMA)
        references.append(f"table:{table}")
    return references


def labelled(folder: Path, rows: range) -> str:
    """Write a table of digits of which all labels are known."""
    x, y = digits()
    header = [*(f"p{c}" for c in range(64)), *LABELS, "split"]
    splits = ["train", *["test"] * len(rows)]
    table = write_csv(
        folder / "patients.csv", header, [[*x[i], *y[i], s] for i, s in zip([0, *rows], splits, strict=True)]
    )
    table.with_suffix(".toml").write_text(SCHEMA)
    return f"table:{table}"


def picture_lists(root: Path) -> list[str]:
    """Write the same hospitals as lists of images, of which each has a column for the label that it looked for."""
    x, y = digits()
    references = []
    for k, name in enumerate(LABELS):
        (root / name).mkdir(parents=True)
        rows = []
        for i in range(k, 1500, 3):
            pixels = (x[i].reshape(8, 8) * 15.9).astype("uint8")
            Image.fromarray(pixels).save(root / name / f"{i}.png")
            rows.append([f"{i}.png", y[i, k], "test" if i % 5 == 0 else "train"])
        file = write_csv(root / name / "images.csv", ["path", name, "split"], rows)
        file.with_suffix(".toml").write_text(f'labels = ["{name}"]\nsplit = "split"\n')
        references.append(f"manifest:{file}")
    return references


IMAGES = ("data=manifest", "model=random_features", "data.image_size=8", f"data.classes=[{','.join(LABELS)}]")


@pytest.mark.parametrize("words", [("method=fedavg",), ("method=analytic", *FROZEN)])
def test_images_with_several_labels_are_learnt_as_rows_of_tables_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    references = picture_lists(tmp_path)
    found = simulated(monkeypatch, references, *IMAGES, *words)
    assert found.manifest.schema.multi_label
    record = found.records[-1]
    assert record.examples == (100.0, 100.0, 100.0)
    assert record.balanced_accuracy > 0.8
    clinical = record.clinical
    assert clinical is not None
    model = found.compiled.classifier(found.server).eval()
    for k, reference in enumerate(references):
        test = datasets.load(reference, request_of(compose_simulation(list(IMAGES)))).test
        x, y = test.batch(torch.arange(100))
        assert torch.equal(y != -1, torch.arange(3).expand(100, 3) == k)  # the others are unknown
        with torch.no_grad():
            exact = roc_auc_score(y[:, k], model(x)[:, k].double())
        area = clinical.auc[k]
        assert area is not None
        assert area.low <= exact <= area.high


def simulated(monkeypatch: pytest.MonkeyPatch, references: list[str], *words: str) -> runner.Result:
    monkeypatch.setattr(runner, "read_silos", lambda spec, root, read: read(references, request_of(spec)))
    return runner.run(compose_simulation([*WORDS, *words]), engine=SimulationEngine(workers=1))


def accuracy(found: runner.Result) -> Tensor:
    """Return the share of right answers by label, on digits that no hospital had and whose labels are all known."""
    x, y = digits()
    model = found.compiled.classifier(found.server).eval()
    with torch.no_grad():
        logits = model(torch.tensor(x[1500:] / 8 - 1, dtype=torch.float32))
    return ((logits > 0) == torch.tensor(y[1500:] == 1)).float().mean(0)


@pytest.mark.parametrize("method", some(["fedavg", "fedprox", "scaffold", "analytic"]))
def test_what_nobody_looked_for_is_unknown_and_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    more = {"analytic": FROZEN, "scaffold": ["train.lr=0.5", "rounds=8"]}
    words = (f"method={method}", *more.get(method, ()))
    known = simulated(monkeypatch, hospitals(tmp_path / "unknown"), *words)
    negative = simulated(monkeypatch, hospitals(tmp_path / "absent", absent="0"), *words)
    ours, theirs = accuracy(known), accuracy(negative)
    assert float(ours.mean()) >= float(theirs.mean()) + MARGIN, (ours, theirs)
    assert bool((ours > 0.75).all())
    assert known.manifest.schema.multi_label
    assert RunManifest.from_json(known.manifest.to_json()) == known.manifest
    assert known.records[-1].examples == (100.0, 100.0, 100.0)  # of each label the test records of who looked for it
    assert known.manifest.evaluation.metrics == "clinical"
    found = known.records[-1].clinical
    assert found is not None
    assert [sum(table) for table in found.labels] == [100, 100, 100]
    assert found.balanced_accuracy == known.records[-1].balanced_accuracy == known.summary()["balanced_accuracy"]
    assert found.macro_auc is not None
    assert found.macro_auc.low > 0.85


def test_an_exported_model_predicts_each_label_as_the_evaluation_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = hospitals(tmp_path / "tables")
    monkeypatch.setattr(runner, "read_silos", lambda spec, root, read: read(references, request_of(spec)))
    made = runner.run(compose_simulation(WORDS), engine=SimulationEngine(workers=1), out=tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    model = model_file.load(file, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    assert model.facts.multi_label
    loader, found = ImageLoader(cache_bytes=0), []
    for reference in references:
        found += Predictor(model).predictions(inputs.from_reference(reference, "test", model.facts, None, loader))
    network = made.compiled.classifier(made.server).eval()
    tests = [datasets.load(reference).test.batch(torch.arange(100))[0] for reference in references]
    with torch.no_grad():
        logits = network(torch.cat(tests)).double()
    p = torch.tensor([one.probabilities for one in found], dtype=torch.float64)
    assert torch.allclose(p, torch.sigmoid(logits), atol=1e-6)
    assert [one.labels for one in found] == [
        tuple(label for label, z in zip(LABELS, row, strict=True) if z > 0) for row in logits.tolist()
    ]
    counted = tally(found, LABELS)
    assert [counted.classes[label].right for label in LABELS] == list(made.records[-1].correct)
    assert [counted.classes[label].examples for label in LABELS] == [100, 100, 100]
    assert {one.answer_text for one in found if not one.labels} == {"none of the labels"}
    known = labelled(tmp_path / "known", range(1500, 1796, 2)), labelled(tmp_path / "new", range(1501, 1797, 2))
    given, new = (inputs.from_reference(reference, "test", model.facts, None, loader) for reference in known)
    made_of = calibrated(model, given, 0.9, 0.1)
    assert sum(made_of.facts.fitted) + sum(made_of.facts.held) == 3 * 148
    (place := tmp_path / "c.safetensors").write_bytes(calibration.to_bytes(made_of))
    read = calibration.read(place, model.sha256, LABELS, multi_label=True)
    assert read.facts == made_of.facts
    with pytest.raises(StateError, match="E-STATE-22"):
        calibration.read(place, model.sha256, LABELS)
    answers = Predictor(model, read).predictions(new)
    plain = Predictor(model).predictions(new)
    assert [one.labels for one in answers] == [one.labels for one in plain]
    whole = tally(answers, LABELS).whole
    assert whole.examples == 3 * 148
    assert whole.covered / whole.examples == pytest.approx(0.9, abs=0.06)  # 148 records: 2.4 standard deviations
    assert 0 < whole.in_sets <= 2 * whole.examples
    for one in answers:
        for label, held, p in zip(LABELS, one.sets.values(), one.probabilities, strict=True):
            assert held in ("there", "not there", "open", "empty")
            assert held != "there" or p > 0.1, label
            assert held != "not there" or p < 0.9
    for reference, wanted in ((references[0], "together"), (references[1], "together")):
        one = calibrated(model, inputs.from_reference(reference, "test", model.facts, None, loader), 0.9, 0.1)
        assert set(one.facts.sources) == {wanted}  # of each answer fewer than 49
    few = labelled(tmp_path / "few", range(1500, 1506))
    with pytest.raises(DataError, match="E-DATA-08: expected at least 30 labelled"):
        calibrated(model, inputs.from_reference(few, "test", model.facts, None, loader), 0.9, 0.1)
    one_class = tmp_path / "one" / "patients.csv"
    header = [*(f"p{c}" for c in range(64)), "kind", "split"]
    write_csv(one_class, header, [[k, *[0] * 63, LABELS[k % 3], ("train", "test")[k // 3]] for k in range(6)])
    one_class.with_suffix(".toml").write_text(SCHEMA.replace("labels = ", 'label = "kind"\nclasses = ', 1))
    with pytest.raises(SchemaError, match="E-DATA-05: expected data with any number of labels"):
        inputs.from_reference(f"table:{one_class}", "test", model.facts, None, loader)


def test_one_hospital_with_all_records_has_the_same_closed_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over those who looked, whoever they are: with every other column empty, or in one table."""
    words = ("method=analytic", *FROZEN)
    apart = simulated(monkeypatch, references := hospitals(tmp_path), *words)
    lines = [Path(r.removeprefix("table:")).read_text().splitlines() for r in references]
    whole = tmp_path / "whole" / "patients.csv"
    whole.parent.mkdir()
    whole.write_text("\n".join([lines[0][0], *(row for table in lines for row in table[1:])]))
    whole.with_suffix(".toml").write_text(SCHEMA)
    together = simulated(monkeypatch, [f"table:{whole}"], *words)
    assert apart.model_digest == together.model_digest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=fedmr"], "method fedmr cannot be used with several labels at once"),
        (["method=fedprox", "method.prototypes=mixture"], "set method.prototypes=off"),
        (["privacy=dp_record"], "expected privacy.test_data=public for multi-label data"),
        (
            ["method=analytic", "train.freeze=features", "privacy=dp_record", "privacy.test_data=public"],
            "no noisy release",
        ),
        (["method=analytic", *FROZEN, "method.head=lda"], "multi-label data need method.head=ridge"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        simulated(monkeypatch, hospitals(tmp_path), *words)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "words", [["privacy=dp_record", "privacy.epsilon=8", "privacy.test_data=public"], ["secagg=on"]]
)
def test_private_and_masked_runs_learn_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    found = simulated(monkeypatch, hospitals(tmp_path), "method=fedavg", "rounds=2", *words)
    assert found.records[-1].examples == (100.0, 100.0, 100.0)
    assert not found.records[-1].missing


def test_a_run_is_divided_evenly_or_not_at_all(tmp_path: Path) -> None:
    reference = hospitals(tmp_path)[0]
    assert len(datasets.load(f"{reference}#iid-2/0").train) == 200
    with pytest.raises(ConfigError, match="federation=iid-N"):
        datasets.load(f"{reference}#p2c1/0")
