"""A file that cannot be read costs a hospital that record and not the run, in whichever round it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from fl_core import datasets
from fl_core.datasets import ImageLoader
from fl_core.errors import DataError, FederationError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest, make_members
from fl_core.rounds.silo_round import run_silo_round
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.records import Schema, TrainConfig
from privacy.compiled_run import CompiledRun
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from protos.wire.tasks import TaskKey
from silo.admission.controls import HospitalControls, TaskQuestion
from silo.storage.feature_cache import FeatureCache
from silo.storage.run_data import RunData
from silo.storage.store import SiloStore
from silo.training.data_source import BrokenRecords, DataSource
from silo.training.trainer import TRIES, Trainer
from tests.support import until
from tests.support.fake_coordinator import MEMBERS, enrolled, manifest
from tests.support.privacy import SEEDED_POLICY

CLASSES = ("melanoma", "nevus")
RUN = "run-1"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Make ten images of each class, of which a fifth are the test images."""
    for c, name in enumerate(CLASSES):
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(10):
            image = Image.effect_noise((32, 32), 20 + 10 * k).convert("RGB")
            image.putpixel((0, 0), (k, c, 7))
            image.save(tmp_path / "images" / name / f"{k}.png")
    return tmp_path / "images"


def images_run(**more) -> RunManifest:  # type: ignore[no-untyped-def]
    schema, model = Schema((3, 32, 32), CLASSES), NamedOptions("simple_cnn", {})
    built = build_model("simple_cnn", {}, schema, 3)
    frozen = more.get("train", TrainConfig()).freeze != "none"
    made = manifest(data="folder", schema=schema, model=model, image_size=32, rounds=3, layout={}, **more)
    if frozen:
        setup = CompiledRun(made)
        return replace(made, layout=derive_layout(setup.method, setup.new_model(), setup.schema))
    return replace(made, layout=derive_layout(build_method("fedavg", {}), built, schema))


def private_run() -> RunManifest:
    return images_run(
        members=make_members(MEMBERS, 3, 1.0, [100] * 3),
        privacy=NamedOptions("dp_record", {"rng": "test", "epsilon": 8.0}),
    )


FROZEN = TrainConfig(epochs=1, batch_size=64, freeze="features")


def trained_on(images: Path) -> list[Path]:
    return list(datasets.load(f"folder:{images}", datasets.DataRequest(CLASSES, 32)).train.paths)  # type: ignore[attr-defined]


def cut(path: Path) -> bytes:
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    return whole


class Bench:
    """A hospital at work without its service, whose process can be replaced by a new one."""

    def __init__(self, folder: Path, images: Path, run: RunManifest) -> None:
        self.home, self.images = enrolled(folder), images
        self.run, self.store = CompiledRun.of(run), SiloStore(self.home.database)
        self.state = self.run.method.broadcast(self.run.initial_state())
        self.run_round = run_silo_round
        if self.run.private:
            self.home.policy.write_text(SEEDED_POLICY)
            ledger, data = Ledger(self.home.ledger), datasets.load(f"folder:{images}")
            for collection in register(ledger, data, "own"):
                ledger.set_budget(collection, 8.0, 1e-5, "dpo", "test")
        self.restart()

    def restart(self) -> None:
        controls = HospitalControls(self.home, self.store, "f")
        loader = ImageLoader(cache_bytes=0, threads=1)
        self.data = DataSource(f"folder:{self.images}", loader=loader, holds=CLASSES, nominal_size=None)
        features = FeatureCache(self.home.features, 1 << 30)
        self.controls = controls
        self.trainer = Trainer(
            MEMBERS[1],
            self.data,
            controls,
            torch.device("cpu"),
            features,
            run_round=lambda *args: self.run_round(*args),
        )

    @property
    def broken(self) -> set[str]:
        return set(self.store.run_data.broken().get(RUN, ()))

    def round(self, number: int = 0) -> tuple[str, float]:
        """Do a round as `TaskRunner` does; return the update's digest and its weight."""
        began = self.store.run_data.find(RUN)
        prepared = self.trainer.prepare(RUN, self.run, lambda _: {}, began)
        known = BrokenRecords(self.broken, lambda names: self.store.run_data.leave_out(RUN, names) and None)
        key = TaskKey(RUN, number, TaskKind.TRAIN)
        begins = self.trainer.data_now() if began is None else None
        task = TaskQuestion(prepared.access, key, len(MEMBERS), message=lambda: self.state, begins=begins)
        access = self.controls.admit(self.trainer.request(RUN, self.run.manifest)._replace(task=task)).task
        result = self.trainer.train(prepared, access, None, lambda *_: None, broken=known)
        parts = {f"{name}/{key}": value for name, part in result.bundle.items() for key, value in part.total.items()}
        return tensor_maps.digest(parts), float(result.bundle["delta"].weight)


@pytest.mark.fault(
    "a hospital", "becomes unable to read an image during a run", "the run continues without this record"
)
@pytest.mark.parametrize("train", [TrainConfig(epochs=1, batch_size=64), FROZEN])
def test_a_record_that_breaks_between_rounds_is_left_out_for_good_also_after_a_restart(tmp_path, images, train):
    bench = Bench(tmp_path / "home", images, images_run(train=train))
    assert bench.round(0)[1] == 16
    path = trained_on(images)[0]
    name = path.relative_to(images).as_posix()
    whole = cut(path)
    first = bench.round(1)
    assert first[1] == 15
    assert bench.broken == {name}
    assert bench.round(1) == first  # what is repeated is the same
    bench.restart()
    assert bench.round(1) == first
    path.write_bytes(whole)
    assert bench.round(1) == first  # whole again, and still left out of this run
    bench.restart()
    assert bench.round(1) == first


def test_a_record_that_breaks_while_the_service_is_down_is_left_out(tmp_path, images):
    bench = Bench(tmp_path / "home", images, images_run())
    bench.round(0)
    cut(trained_on(images)[2])
    bench.restart()
    assert bench.round(1)[1] == 15
    assert len(bench.broken) == 1


def test_a_record_that_was_broken_when_the_run_began_stays_left_out(tmp_path, images):
    path = trained_on(images)[3]
    whole = cut(path)
    bench = Bench(tmp_path / "home", images, images_run())
    first = bench.round(0)
    assert first[1] == 15
    path.write_bytes(whole)
    bench.restart()
    assert bench.round(0) == first
    path.write_bytes(trained_on(images)[4].read_bytes())
    assert bench.round(0) == first  # whatever it is now
    assert Bench(tmp_path / "other", images, images_run()).round(0)[1] == 16  # another run


@pytest.mark.parametrize("train", [TrainConfig(epochs=1, batch_size=64), FROZEN])
def test_with_too_many_broken_records_the_task_fails_and_the_log_names_them(tmp_path, images, train, caplog):
    bench = Bench(tmp_path / "home", images, images_run(train=train))
    bench.round(0)
    paths = trained_on(images)[:2]
    for path in paths:
        cut(path)
    with pytest.raises(DataError, match="E-DATA-04"):
        bench.round(1)
    said = [record.getMessage() for record in caplog.records]
    assert all(any(str(path) in text for text in said) for path in paths)


def test_another_image_or_one_more_is_another_version_as_before(tmp_path, images):
    bench = Bench(tmp_path / "home", images, images_run())
    bench.round(0)
    cut(trained_on(images)[0])
    bench.round(1)
    path = trained_on(images)[1]
    whole = path.read_bytes()
    path.write_bytes(trained_on(images)[2].read_bytes())
    with pytest.raises(DataError, match="E-DATA-10"):
        bench.round(2)
    path.write_bytes(whole)
    bench.round(2)
    (images / "nevus" / "more.png").write_bytes(whole)
    with pytest.raises(DataError, match="E-DATA-10"):
        bench.round(2)


def breaks_inside(bench: Bench, break_it: Callable[[int], object]) -> list[int]:
    """Break files after examples were looked at and before the round reads them; return how often it began."""
    begun = list[int]()

    def run_round(*args):  # type: ignore[no-untyped-def]
        begun.append(len(begun))
        break_it(begun[-1])
        return run_silo_round(*args)

    bench.run_round = run_round
    return begun


def test_a_record_that_breaks_inside_a_round_has_it_made_anew_without_it(tmp_path, images):
    expected = Bench(tmp_path / "without", images, images_run())
    path = trained_on(images)[0]
    whole = cut(path)
    without = expected.round(0)
    path.write_bytes(whole)
    bench = Bench(tmp_path / "home", images, images_run())
    begun = breaks_inside(bench, lambda attempt: attempt or cut(path))
    assert bench.round(0) == without
    assert begun == [0, 1]
    assert len(bench.broken) == 1


def test_a_round_in_which_files_break_again_and_again_fails(tmp_path, images):
    bench = Bench(tmp_path / "home", images, images_run())
    path = trained_on(images)[0]
    whole = path.read_bytes()

    def flicker(_: int) -> None:
        path.write_bytes(whole[:50])

    def mended(*args):  # type: ignore[no-untyped-def]
        path.write_bytes(whole)
        return original(*args)

    original = bench.trainer._examples
    bench.trainer._examples = mended  # whole whenever it is looked at
    begun = breaks_inside(bench, flicker)
    with pytest.raises(FederationError, match="E-DATA-04"):
        bench.round(0)
    assert len(begun) == TRIES
    assert bench.broken == set()


def charges(bench: Bench) -> list[str]:
    ledger = Ledger(bench.home.ledger)
    return [state for collection in ledger.collections() for _, state, _ in ledger.entries(collection)]


@pytest.mark.integration
@pytest.mark.fault(
    "a hospital", "cannot read an image in a private run", "it contributes nothing, and the charge is the usual one"
)
def test_a_private_run_goes_on_with_the_charges_of_a_whole_one(tmp_path, images):
    whole_run, bench = (Bench(tmp_path / name, images, private_run()) for name in ("whole", "home"))
    path = trained_on(images)[0]
    before = [whole_run.round(0), whole_run.round(1)]
    assert bench.round(0) == before[0]
    content = cut(path)
    after = bench.round(1)
    assert bench.broken
    assert after[1] == before[1][1] == 100  # the declared size
    assert charges(bench) == charges(whole_run)
    bench.restart()
    assert bench.round(2)[1] == 100
    path.write_bytes(content)
    inside = Bench(tmp_path / "inside", images, private_run())
    assert inside.round(0) == before[0]
    begun = breaks_inside(inside, lambda _: cut(path))
    assert inside.round(1) == after  # that it broke inside the round changes nothing
    assert begun == [0]
    assert charges(inside) == charges(whole_run)


def test_the_hospital_is_told_and_the_coordinator_is_not(started, tmp_path, images):
    path = trained_on(images)[0]
    cut(path)
    hospital = started(images_run(), data=f"folder:{images}")
    hospital.offer(0)
    hospital.sent(1)
    (said,) = [notice for notice in hospital.notices if notice.event == "broken"]
    assert path.name in said.text
    assert said.facts["left_out"] == 1
    told = "".join(str(message) for session in hospital.control.sessions for message in session.received)
    assert path.name not in told
    assert "left_out" not in told


def test_a_manifest_whose_file_is_gone_goes_on(tmp_path, images):
    paths = [path.relative_to(images) for path in sorted(images.rglob("*.png"))]
    rows = [f"{path},{path.parent},,{'train' if k % 5 else 'test'}" for k, path in enumerate(paths)]
    (images / "list.csv").write_text("\n".join(["path,label,group,split", *rows]))
    source = DataSource(f"manifest:{images / 'list.csv'}", loader=ImageLoader(cache_bytes=0, threads=1))
    source.load()
    began = source.run_data()
    (images / rows[1].split(",")[0]).unlink()
    assert source.refresh()
    source.load()
    assert source.as_begun(began)[1] == began.version
    assert source.as_begun(RunData(began.version))[1] != began.version  # a run of an earlier version of the software
    until(lambda: not source.refresh())
