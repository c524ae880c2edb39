"""Hospitals that call one disease by different names train one run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consilium.research.engines.in_process import MemoryStateStore, SiloShare, with_features
from consilium.research.simulate.engine import SimulationEngine
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.manifest_builder import manifest_from, request_of
from fl_core import datasets
from fl_core.datasets import SiloDataset
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import Dictionary, RunManifest
from fl_core.types import tensor_maps
from fl_core.types.records import RoundRecord
from fl_core.types.values import State
from privacy.compiled_run import CompiledRun
from tests.support.data import write_image

pytestmark = pytest.mark.integration

NAMES = ("north", "south", "west")
OWN = ({"naevus": "nevus"}, {"D22": "nevus", "C43": "melanoma"}, {})
SHADES = {"melanoma": 60, "nevus": 190}
WORDS = [
    "data=folder",
    "data.classes=[melanoma,nevus]",
    "data.image_size=32",
    "model=lenet",
    "rounds=4",
    "train.epochs=3",
    "train.lr=0.01",
    "threads=1",
    "method=fedavg",
]


def hospitals(root: Path, coarse: int = 0) -> list[str]:
    """Write the same images at three hospitals under their own names; coarse: more images that are either class."""
    found = []
    for name, table in zip(NAMES, OWN, strict=True):
        words = {to: own for own, to in table.items()}
        for label, shade in SHADES.items():
            for k in range(10):
                split = "test" if k % 5 == 4 else "train"
                write_image(root / name / split / words.get(label, label) / f"{k}.png", shade + k, (8, 8))
        lines = [f'"{own}" = "{to}"' for own, to in table.items()]
        for k in range(coarse):
            write_image(root / name / "train" / "lesion" / f"{k}.png", 120 + k, (8, 8))
        lines += ['lesion = ["melanoma", "nevus"]'] * bool(coarse)
        if lines:
            (root / name / "labels.toml").write_text("\n".join(["[labels]", *lines]))
        found.append(f"folder:{root / name}")
    return found


class _Last(Observer):
    record: RoundRecord

    def closed(self, record: RoundRecord, server: State) -> None:
        self.record = record


def trained(references: list[str], *words: str) -> tuple[RunManifest, list[SiloDataset], State, RoundRecord]:
    spec = compose_simulation([*WORDS, *words])
    sets = datasets.load_all(references, request_of(spec))
    told = {
        n: Dictionary(s.dictionary.digest, s.coarse) for n, s in zip(NAMES, sets, strict=True) if s.dictionary.digest
    }
    run, last = CompiledRun.of(manifest_from(spec, NAMES, dictionaries=told)), _Last()
    shares = with_features(run, [SiloShare(s.train, s.test) for s in sets], torch.device("cpu"), 1)
    final = SimulationEngine().simulate(run, shares, last, None, MemoryStateStore())
    return run.manifest, sets, final, last.record


def test_two_hospitals_with_other_names_and_one_without_train_as_if_all_used_one(tmp_path: Path) -> None:
    manifest, sets, final, record = trained(hospitals(tmp_path))
    assert record.accuracy == 1.0
    assert record.examples == (6.0, 6.0)
    digests = [s.dictionary.digest for s in sets]
    assert [m.labels for m in manifest.members] == digests
    assert [bool(d) for d in digests] == [True, True, False]
    assert not any(m.coarse for m in manifest.members)
    for name, table in zip(NAMES, OWN, strict=True):  # the same images under the run's own names
        (tmp_path / name / "labels.toml").unlink(missing_ok=True)
        for split in ("train", "test"):
            for own, to in table.items():
                (tmp_path / name / split / own).rename(tmp_path / name / split / to)
    plain, _, same, _ = trained([f"folder:{tmp_path / name}" for name in NAMES])
    assert tensor_maps.digest(final["w"]) == tensor_maps.digest(same["w"])
    assert "labels" not in plain.to_json()
    assert RunManifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "feddyn", "local"])
def test_coarse_labels_are_trained_on_and_not_tested(tmp_path: Path, method: str) -> None:
    manifest, sets, _, record = trained(hospitals(tmp_path, coarse=3), f"method={method}", "rounds=2")
    assert [int((s.train.labels < 0).sum()) for s in sets] == [3, 3, 3]
    assert all(m.coarse for m in manifest.members)
    assert sum(record.examples) == (0 if method == "local" else 12)


def test_coarse_labels_move_a_model_and_leave_no_trace_in_a_closed_form(tmp_path: Path) -> None:
    references = hospitals(tmp_path, coarse=3)
    words = ("train.freeze=features", "model=random_features")
    runs = {"fedavg": ("method=fedavg", "rounds=1"), "analytic": ("method=analytic", "rounds=1", *words)}
    with_sets = {method: trained(references, *said)[2]["w"] for method, said in runs.items()}
    for name in NAMES:
        path = tmp_path / name / "labels.toml"
        path.write_text(path.read_text().replace('["melanoma", "nevus"]', "[]"))
    without = {method: trained(references, *said)[2]["w"] for method, said in runs.items()}
    digests = {method: [tensor_maps.digest(w[method]) for w in (with_sets, without)] for method in runs}
    assert len(set(digests["fedavg"])) == 2
    assert len(set(digests["analytic"])) == 1
