"""A model is measured at the hospitals and nobody trains: over real gRPC, with real silos."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from consilium.report.lead import export
from coordinator.cli import evaluation
from coordinator.cli import runs as lead
from coordinator.storage.records import StoredRun
from fl_core.errors import ConfigError, FederationError
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.metric_parts import BY_HOSPITAL, METRIC_PARTS
from tests.support import until
from tests.support.coordinator import World
from tests.support.federation import Hospital, hospitals

pytestmark = pytest.mark.integration

SIX = ("north", "east", "south", "west", "hill", "lake")
TRAINED = ["data=digits", "model=digits_linear", "method=fedgela", "rounds=2", "train.epochs=2", "threads=1"]
UPDATE = 1 << 16
"""More than the counts of ten classes take, and far less than a model of a hospital."""


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, Hospital], StoredRun]]:
    """Six hospitals, two of which let their results be shown and one that sends accuracies alone, and a model."""
    folder = tmp_path_factory.mktemp("six")
    with hospitals(folder) as people:
        world, sites = people.world, people.hospitals
        for name in SIX:
            send = "" if name == "lake" else '[evaluation]\nsend = "clinical"\n'
            people.join(name, data="digits/p6c5", policy=send + "by_hospital = true\n" * (name not in ("hill", "lake")))
        lead.run(TRAINED, home=world.home, as_json=True)
        yield world, sites, world.finished(world.server.store.runs.find("latest").id)


def measured(world: World, run: StoredRun):
    assert world.server is not None
    (row,) = world.server.store.runs.rounds(run.id)
    return row.record


def test_a_stored_model_is_measured_at_six_hospitals_and_no_update_is_sent(
    six: tuple[World, dict[str, Hospital], StoredRun], capsys: pytest.CaptureFixture[str]
) -> None:
    world, _, parent = six
    capsys.readouterr()
    evaluation.evaluate(parent.id, home=world.home, as_json=True)
    found = said(capsys)
    done = world.finished(str(found["run"]))
    record, trained = measured(world, done), world.server.store.runs.rounds(parent.id)
    assert record.kind is TaskKind.EVALUATE
    assert set(record.included) == set(SIX)
    closing = trained[-1].record
    assert (record.correct, record.examples, record.clinical) == (closing.correct, closing.examples, closing.clinical)
    manifest = RunManifest.from_json(done.manifest)
    assert set(manifest.layout) <= METRIC_PARTS
    sent = [u.size for u in world.server.store.contributions.arrivals(done.id)]
    assert len(sent) == len(SIX)
    assert max(sent) < UPDATE
    assert found["bytes_up"] == sum(sent)
    assert done.model_digest == parent.model_digest
    assert done.closed == 0
    assert record.by_hospital == {}


def test_hospitals_that_allow_it_are_shown_and_no_other(
    six: tuple[World, dict[str, Hospital], StoredRun], capsys: pytest.CaptureFixture[str]
) -> None:
    world, _, parent = six
    evaluation.evaluate(parent.id, home=world.home, by_hospital=True, as_json=True)
    found = said(capsys)
    done = world.finished(str(found["run"]))
    record = measured(world, done)
    shown = set(SIX) - {"hill", "lake"}
    assert set(record.by_hospital) == shown
    assert BY_HOSPITAL in RunManifest.from_json(done.manifest).layout
    own = found["round"][0]["by_hospital"]
    assert set(own["hospitals"]) == shown
    for name, result in record.by_hospital.items():
        assert own["hospitals"][name]["correct"] == list(result.correct)
        assert result.clinical is not None
        assert result.clinical.examples == sum(result.examples) > 0
        assert all(right <= of for right, of in zip(result.correct, result.examples, strict=True))
    lead.show(done.id, home=world.home)
    printed = capsys.readouterr().out
    assert "Results of the hospitals that allow it" in printed
    assert "2 hospitals in the sums alone" in " ".join(printed.split())
    assert (
        "hill"
        not in printed.split("Results of the hospitals that allow it")[1].split("cannot rank")[0].split("is lowest")[0]
    )


def test_some_hospitals_are_named(six: tuple[World, dict[str, Hospital], StoredRun]) -> None:
    world, _, parent = six
    evaluation.evaluate(parent.id, on="north,west", home=world.home, detach=True)
    done = world.finished(world.server.store.runs.find("latest").id)
    assert set(measured(world, done).included) == {"north", "west"}


def test_an_exported_file_is_measured_like_the_run_that_it_is_of(
    six: tuple[World, dict[str, Hospital], StoredRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, _, gela = six
    lead.run([w for w in TRAINED if not w.startswith("method")] + ["method=fedavg", "rounds=1"], home=world.home)
    parent = world.finished(world.server.store.runs.find("latest").id)
    for run in (parent, gela):
        export(run.id, out=tmp_path, home=world.home)
    capsys.readouterr()
    evaluation.evaluate(str(tmp_path / f"{parent.id}.safetensors"), home=world.home, as_json=True)
    record = measured(world, world.finished(str(said(capsys)["run"])))
    closing = world.server.store.runs.rounds(parent.id)[-1].record
    assert (record.correct, record.examples, record.clinical) == (closing.correct, closing.examples, closing.clinical)
    with pytest.raises(ConfigError, match=r"E-CFG-08.*fixed vectors: evaluate its run"):
        evaluation.evaluate(str(tmp_path / f"{gela.id}.safetensors"), home=world.home)


def test_models_that_hospitals_trained_alone_are_measured_beside(
    six: tuple[World, dict[str, Hospital], StoredRun], capsys: pytest.CaptureFixture[str]
) -> None:
    world, sites, parent = six
    alone = [w for w in TRAINED if not w.startswith("method")] + ["method=local", "personal=true"]
    lead.run([*alone, f"silos=[{','.join(SIX[:5])}]"], home=world.home, detach=True)
    local = world.finished(world.server.store.runs.find("latest").id)
    capsys.readouterr()
    evaluation.evaluate(parent.id, beside=local.id, by_hospital=True, home=world.home, as_json=True)
    found = said(capsys)
    done = world.finished(str(found["run"]))
    record = measured(world, done)
    assert record.own is not None
    assert sum(record.own.examples) == sum(record.examples) - images_of(world, done, "lake")
    personal = [row.record.personal for row in world.server.store.runs.rounds(local.id) if row.record.personal]
    shown = {name: r.own for name, r in record.by_hospital.items()}
    assert set(shown) == {"north", "east", "south", "west"}
    accuracies = [sum(own.own) / sum(own.examples) for own in shown.values()]
    assert min(accuracies) > 0.5
    assert personal
    ahead = record.own.auc_ahead
    assert ahead is not None
    assert -1 < ahead[0] < 1
    assert ahead[1] > 0
    own = found["round"][0]["own_models"]
    assert own["auc_ahead"] == pytest.approx(ahead[0])
    lead.show(done.id, home=world.home)
    assert "models that they trained alone" in " ".join(capsys.readouterr().out.split())
    assert "no local model of this hospital" in " ".join(sites["lake"].told("alone"))
    assert not sites["north"].told("alone")


def images_of(world: World, run: StoredRun, name: str) -> float:
    """Count the test images of a hospital, as the sums with it and without say."""
    evaluation.evaluate(run.id, on=",".join(n for n in SIX if n != name), home=world.home, detach=True)
    rest = world.finished(world.server.store.runs.find("latest").id)
    return sum(measured(world, run).examples) - sum(measured(world, rest).examples)


@pytest.mark.parametrize("masks", ["off", "on"])
def test_two_models_of_the_federation_are_measured_on_the_same_images(
    six: tuple[World, dict[str, Hospital], StoredRun], masks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a method of its own; the second one's numbers are those of its own closing evaluation."""
    world, _, gela = six
    others = [w for w in TRAINED if not w.startswith(("method", "rounds"))] + ["method=fednh", "rounds=1", "seed=5"]
    lead.run(others, home=world.home, detach=True)
    nh = world.finished(world.server.store.runs.find("latest").id)
    capsys.readouterr()
    evaluation.evaluate(gela.id, [f"secagg={masks}"], beside=nh.id, home=world.home, as_json=True)
    done = world.finished(str(said(capsys)["run"]))
    record = measured(world, done)
    first, second = (world.server.store.runs.rounds(run.id)[-1].record for run in (gela, nh))
    assert record.own is not None
    assert (record.own.measured, record.own.own) == (first.correct, second.correct)
    assert record.own.examples == record.examples
    if masks == "off":  # sums under masks hold counts alone
        point, error = record.own.auc_ahead or (0.0, 0.0)
        assert point
        assert 0 < error < 0.1
    lead.show(done.id, home=world.home)
    assert f"balanced accuracy of {nh.id} " in " ".join(capsys.readouterr().out.split())
    other = RunManifest.from_json(done.manifest).evaluation.other
    assert other is not None
    until(lambda: not world.server.objects.has(other.object), "the second model goes with its run")


def test_a_model_is_level_with_itself(six: tuple[World, dict[str, Hospital], StoredRun]) -> None:
    world, _, parent = six
    evaluation.evaluate(parent.id, beside=parent.id, home=world.home, detach=True)
    record = measured(world, world.finished(world.server.store.runs.find("latest").id))
    assert record.own is not None
    assert record.own.own == record.own.measured == record.correct
    assert record.own.auc_ahead is None  # no difference that varies


def test_a_second_model_is_one_that_a_run_keeps(six: tuple[World, dict[str, Hospital], StoredRun]) -> None:
    world, _, parent = six
    evaluation.evaluate(parent.id, on="north", home=world.home, detach=True)
    done = world.finished(world.server.store.runs.find("latest").id)
    with pytest.raises(FederationError, match=r"E-RUN-11.*closed round"):
        evaluation.evaluate(parent.id, beside=done.id, home=world.home)
    with pytest.raises(FederationError, match="E-RUN-10"):
        evaluation.evaluate(parent.id, beside="none-such", home=world.home)
    with pytest.raises(ConfigError, match=r"E-CFG-02.*give the file as the model"):
        evaluation.evaluate(parent.id, beside=__file__, home=world.home)


@pytest.mark.parametrize(
    ("model", "on", "expected"),
    [
        ("nothing/here.safetensors", "all", "E-CFG-02.*no file of weights at"),
        ("weights.pt", "all", "E-CFG-02.*no file of weights at"),
        ("no-such-run", "all", "E-RUN-10"),
        ("latest", "north,north", "E-CFG-02.*each once"),
        ("latest", "north,", "E-CFG-02.*each once"),
        ("PARENT", "nobody", "E-RUN-05"),
    ],
)
def test_a_wrong_request_is_refused(
    six: tuple[World, dict[str, Hospital], StoredRun], model: str, on: str, expected: str
) -> None:
    with pytest.raises(FederationError, match=expected):
        evaluation.evaluate(model.replace("PARENT", six[2].id), on=on, home=six[0].home)


def test_a_run_of_no_rounds_needs_a_model(six: tuple[World, dict[str, Hospital], StoredRun]) -> None:
    with pytest.raises(FederationError, match=r"E-CFG-02.*rounds=0 only evaluates a complete model"):
        lead.run(["data=digits", "rounds=0"], home=six[0].home)


def test_an_evaluation_is_no_model_to_go_on_from(six: tuple[World, dict[str, Hospital], StoredRun]) -> None:
    world, _, parent = six
    evaluation.evaluate(parent.id, on="north", home=world.home, detach=True)
    done = world.finished(world.server.store.runs.find("latest").id)
    with pytest.raises(FederationError, match=r"E-RUN-11.*closed round"):
        lead.run([], start_from=done.id, home=world.home)


def test_a_masked_evaluation_opens_sums_alone(
    six: tuple[World, dict[str, Hospital], StoredRun], capsys: pytest.CaptureFixture[str]
) -> None:
    world, _, parent = six
    capsys.readouterr()
    evaluation.evaluate(parent.id, ["secagg=on"], home=world.home, as_json=True)
    found = said(capsys)
    record = measured(world, world.finished(str(found["run"])))
    closing = world.server.store.runs.rounds(parent.id)[-1].record
    assert (record.correct, record.examples) == (closing.correct, closing.examples)
    assert record.by_hospital == {}
