"""A hospital in runs with a frozen body: one pass over its images, whose features are kept; all else is as ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from consilium.research.engines.in_process import SiloShare, local_ports, with_features
from fl_core import datasets
from fl_core.errors import DataError, RefusedError
from fl_core.methods.disjoint import analytic
from fl_core.methods.disjoint.analytic import Analytic
from fl_core.models import build_model
from fl_core.models.split_model import behind_body
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.memory_need import LiveTensors
from fl_core.rounds.run_setup import RunSetup
from fl_core.training import local_data, memory
from fl_core.training.frozen_features import feature_batches
from fl_core.training.local_data import PlainLocalData
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import RoundData
from fl_core.types.values import Examples, RoundContext
from privacy.compiled_run import CompiledRun
from privacy.release_log import InMemoryReleaseLog
from protos.wire.tasks import TaskKey
from silo.admission.controls import HospitalControls, TaskQuestion
from silo.admission.run_request import request_of
from silo.storage.feature_cache import Block, FeatureCache, FeatureKey
from silo.storage.home import Home
from silo.storage.store import SiloStore
from silo.training import trainer
from silo.training.data_source import DataSource
from silo.training.trainer import Trainer
from tests.support.fake_coordinator import MEMBERS, enrolled, manifest
from tests.support.federations import schema
from tests.support.hospital import rounds_equal
from tests.support.privacy import TRAIN, budgeted, private

CPU = torch.device("cpu")


def frozen(run: RunManifest) -> RunManifest:
    made = replace(run, train=replace(run.train, freeze="features"))
    setup = RunSetup(made)
    return replace(made, layout=derive_layout(setup.method, setup.new_model(), setup.schema))


def viewed(**more) -> RunManifest:
    made = manifest(**more)
    return replace(made, train=replace(made.train, freeze="features", augment=True, views=3))


def shares() -> list[SiloShare]:
    return [SiloShare(d.train, d.test) for d in (datasets.load(f"digits/p3c4/{k}") for k in range(3))]


@pytest.mark.integration
@pytest.mark.parametrize("made", [manifest, private, viewed])
def test_rounds_equal_the_simulation_bit_for_bit(started, tmp_path, made):
    if made is private:
        ledger = budgeted(tmp_path / "home0")
    run = frozen(made())
    hospital = started(run)
    compiled = CompiledRun.of(run)
    doors = [compiled.profile.data_factory(k, InMemoryReleaseLog()) for k in range(3)]
    port = local_ports(compiled, with_features(compiled, shares()), doors)[1]
    rounds_equal(hospital, port, [compiled.method.broadcast(compiled.initial_state())] * 3)
    found = FeatureCache(Home(tmp_path / "home0").features, 0).files()
    assert [(file.sound, file.left_out) for file in found] == [(True, 0)] * 2
    if made is private:
        assert {state for _, state, _ in ledger.entries(TRAIN)} == {"SPENT"}


class Bench:
    """A trainer at one hospital, without its service."""

    def __init__(self, folder: Path, run: RunManifest, gib: float = 4.0) -> None:
        home = enrolled(folder)
        self.controls = HospitalControls(home, SiloStore(home.database), "f")
        self.data = DataSource("digits/p3c4/1")
        self.features = FeatureCache(home.features, int(gib * 2**30))
        self.trainer = Trainer(MEMBERS[1], self.data, self.controls, CPU, self.features)
        self.run = CompiledRun.of(run)
        self.state = self.run.method.broadcast(self.run.initial_state())
        self.told: list[tuple[int, int]] = []

    def prepared(self):
        return self.trainer.prepare("run-1", self.run, lambda _: {})

    def admitted(self, prepared):
        task = TaskQuestion(
            prepared.access, TaskKey("run-1", 0, TaskKind.TRAIN), len(MEMBERS), message=lambda: self.state
        )
        return self.controls.admit(self.trainer.request("run-1", self.run.manifest)._replace(task=task)).task

    def round(self):
        prepared = self.prepared()
        return self.trainer.train(
            prepared, self.admitted(prepared), None, lambda done, total: self.told.append((done, total))
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "home", frozen(manifest()))


def test_progress_is_told_while_features_are_made_and_they_are_made_once(bench, monkeypatch):
    n = len(bench.data.load().train)
    bench.round()
    first, before = list(bench.told), {p: p.read_bytes() for p in bench.features.folder.iterdir()}
    assert (n, n) in first
    bench.told.clear()
    bench.round()
    assert (n, n) not in bench.told
    assert len(bench.told) < len(first)
    assert {p: p.read_bytes() for p in bench.features.folder.iterdir()} == before


def test_a_cancelled_pass_leaves_nothing_and_the_next_one_ends(bench):
    class StoppedError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise StoppedError

    prepared = bench.prepared()
    with pytest.raises(StoppedError):
        bench.trainer.train(prepared, bench.admitted(prepared), None, stop)
    assert bench.features.files() == []
    assert not list(bench.features.folder.glob("*.part"))
    assert bench.round().bundle["delta"].total


@pytest.mark.fault(
    "an attacker with write access to the home", "edits features between two rounds", "the update is the same"
)
def test_an_update_does_not_follow_an_edited_file(bench):
    honest = bench.round().bundle["delta"].total
    for path in bench.features.folder.glob("*.rows"):
        path.write_bytes(bytes(4000) + path.read_bytes()[4000:])
    again = bench.round().bundle["delta"].total
    assert all(torch.equal(again[name], value) for name, value in honest.items())


def test_another_body_or_other_threads_have_features_of_their_own(tmp_path):
    folder = tmp_path / "home"
    for run, files in (
        (manifest(), 2),
        (manifest(seed=4), 4),
        (manifest(threads=2), 6),
        (manifest(rounds=7), 6),
        (viewed(), 7),
    ):
        bench = Bench(folder, frozen(run))
        bench.round()
        assert len(bench.features.files()) == files


def test_a_run_whose_features_never_fit_is_refused_before_round_1(tmp_path):
    bench = Bench(tmp_path / "home", frozen(manifest()), gib=1e-6)
    with pytest.raises(RefusedError, match=r"E-RUN-38.*--feature-cache"):
        bench.prepared()


def test_memory_for_a_batch_of_images_in_the_body_is_asked_for_before_round_1(bench, monkeypatch):
    prepared = bench.prepared()
    prepared.require_memory()
    need = prepared.body_memory
    rows, step = prepared.step_memory
    assert need > step.need(rows.training, rows.evaluating)  # a batch of images in a network, and rows in a head
    monkeypatch.setattr(memory, "free_memory", lambda _: need - 1)
    with pytest.raises(RefusedError, match=r"E-RUN-38.*frozen body"):
        prepared.require_memory()


def test_features_go_when_the_data_change_and_when_others_are_served(bench, started, tmp_path, monkeypatch):
    bench.round()
    monkeypatch.setattr(bench.data, "refresh", lambda: True)
    bench.prepared()
    assert bench.features.files() == []
    hospital = started(frozen(manifest()))
    hospital.stop()
    cache = FeatureCache(Home(hospital.folder).features, 1 << 20)
    for origin in ("digits/p3c4/1", "digits/p3c4/2"):
        cache.get(FeatureKey(origin, "d", "r", "train", "m"), 0, lambda: iter(()))
    hospital.start()
    assert [file.path.stem for file in cache.files()] == [FeatureKey("digits/p3c4/1", "d", "r", "train", "m").name]


def test_whoever_decides_about_a_run_reads_that_the_body_is_frozen():
    asked = request_of(CompiledRun.of(frozen(manifest())), "center1", True)
    assert asked.model == "digits_cnn with a frozen body"


def test_what_goes_wrong_with_images_of_a_private_run_is_hidden_and_not_charged(started, tmp_path, monkeypatch):
    ledger = budgeted(tmp_path / "home0")

    def broken(*_: object) -> Sequence[Block]:
        raise DataError("E-DATA-04", "expected 17 more readable images")

    monkeypatch.setattr(trainer.Trainer, "_blocks", broken)
    hospital = started(frozen(private()))
    hospital.offer(state=CompiledRun.of(hospital.manifest).initial_state())
    refused = hospital.refused()
    assert refused.code == "E-RUN-31"
    assert "17" not in refused.reason
    assert ledger.entries(TRAIN) == []


class Endless(Examples):
    """So many images, made when they are read."""

    def __init__(self, n: int) -> None:
        self.labels = torch.zeros(n, dtype=torch.long)

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        del augment
        return index.float().view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous(), self.labels[index]


def test_memory_does_not_grow_with_the_number_of_images(tmp_path):
    held, run = [], CompiledRun.of(frozen(manifest()))
    for n in (2_000, 20_000):
        examples, live = Endless(n), LiveTensors(CPU, None)
        cache = FeatureCache(tmp_path / str(n), 1 << 30)

        def blocks(examples=examples):
            for batch in run.features(examples, CPU, train=True):
                yield Block(batch.positions.tolist(), batch.rows.flatten(1).numpy())

        with live:
            kept = cache.get(FeatureKey("o", "d", "r", "s", "m"), n, blocks)
        assert kept.rows.shape[0] == n
        assert Path(cache.files()[0].path).stat().st_size > kept.rows.nbytes
        held.append(max(live.after))
    assert 0 < held[1] <= held[0]


@pytest.mark.integration
@pytest.mark.parametrize("gone", [[], [5]], ids=["all", "without one"])
def test_4608_features_and_their_second_moments_take_the_same_memory_for_any_number_of_images(
    tmp_path, gone, monkeypatch
):
    width, built, summed, method, images = 4608, [], [], Analytic(), schema((1, 8, 8))
    network = build_model("random_features", {"width": width}, images, 0)
    model = behind_body(network, "random_features")
    monkeypatch.setattr(local_data, "EVAL_BATCH", 32)  # so that a few hundred images are many batches
    for n in (100, 400):
        examples = Endless(n)
        cache = FeatureCache(tmp_path / str(n), 1 << 30)

        def blocks(examples=examples):
            for batch in feature_batches(network.body, examples, CPU):
                yield Block(batch.positions.tolist(), batch.rows.flatten(1).numpy())

        with LiveTensors(CPU, None) as live:
            kept = cache.get(FeatureKey("o", "d", "r", "s", "m"), n, blocks)
        built.append(max(live.after))
        few = 8 * n * 8  # numbers of examples, and labels
        with LiveTensors(CPU, None) as live:
            train = trainer._of_features(examples, kept, gone, 1)
        assert max(live.after) < kept.rows.nbytes + few  # the file, mapped and not read into memory
        context = RoundContext(1, len(images.classes), rounds=1, cohort=1).for_silo(0, 0)
        broadcast = method.broadcast(method.init_server(model, context))
        with LiveTensors(CPU, None) as live:
            data = PlainLocalData(RoundData(train, train, manifest().train, context))
            sums = method.local(model, broadcast, {}, data, context).bundle[analytic.MOMENTS].total["a"]
        summed.append(max(live.after))
        left = np.delete(np.round(kept.rows[:, 0].astype(np.float64) * 2**14) / 2**14, gone)
        assert float(sums[0]) == (left**2).sum() > 1
        assert len(train) == n - len(gone)
    assert 0 < built[1] <= built[0]
    assert 0 < summed[1] <= summed[0] + few
    assert summed[1] < 5 * 8 * width**2  # four matrices, and a little
