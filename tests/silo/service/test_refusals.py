"""What a silo refuses, what is refused to it, and that the next round works."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
from PIL import Image

from fl_core import datasets
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunMember
from fl_core.types.records import Schema, TrainConfig
from fl_core.types.values import PartSpec
from tests.support import until
from tests.support.fake_coordinator import manifest


def unknown_classes():
    return Schema((1, 8, 8), tuple("abcdefghij"))


def measured_alone():
    schema = manifest().schema
    return derive_layout(build_method("fedavg", {}), build_model("digits_cnn", {}, schema, 3), schema, updates=False)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda: {"privacy": NamedOptions("magic", {})}, "E-PRIV-01"),
        (lambda: {"software": "consilium-fl 99.0.0"}, "E-WIRE-01"),
        (lambda: {"members": (RunMember("center0"), RunMember("center7"))}, "E-RUN-05"),
        (lambda: {"schema": unknown_classes()}, "E-DATA-05"),
        (lambda: {"layout": {"metrics": PartSpec({"correct": (10,)}, (10,))}}, "E-WIRE-06"),
        (lambda: {"cohort": 2}, "E-RUN-33"),
        (lambda: {"rounds": 0}, "E-WIRE-06"),  # an evaluation whose updates would have a model's parts
        (lambda: {"rounds": 0, "layout": measured_alone()}, "E-RUN-33"),  # and one with a round of training
    ],
    ids=["privacy", "software", "stranger", "label space", "layout", "cohort", "parts", "round"],
)
def test_a_manifest_that_does_not_fit_is_refused(started, change, code):
    hospital = started(manifest(**change()))
    offer = hospital.offer()
    assert hospital.refused().code == code
    count = len(hospital.answers())
    hospital.control.last.send(offer=offer)
    until(lambda: len(hospital.answers()) == count + 1)
    assert hospital.answers()[-1].code == code
    assert hospital.transfer.calls.count("Open") == 0


def test_a_refusal_over_the_hospitals_images_names_no_file_of_it(started, tmp_path):
    """Names of files and folders may be names of patients; they stay in the hospital's own log."""
    images = tmp_path / "ward7" / "images"
    for name in ("nevus", "melanoma"):
        (images / name).mkdir(parents=True)
        for k in range(10):
            Image.new("RGB", (40, 40), (20 * k, 40, 90)).save(images / name / f"smith-john-{k}.png")
    schema = Schema((3, 32, 32), ("nevus", "melanoma"))
    small = build_model("simple_cnn", {}, schema, 3)
    layout = derive_layout(build_method("fedavg", {}), small, schema)
    facts = {
        "data": "folder",
        "schema": schema,
        "layout": layout,
        "model": NamedOptions("simple_cnn", {}),
        "image_size": 32,
    }
    hospital = started(manifest(**facts), data=f"folder:{images}")
    for file in images.rglob("*.png"):
        file.write_bytes(file.read_bytes()[:60])  # sound when the service starts, damaged when it trains
    assert any("decoded images are cached in" in notice.text for notice in hospital.notices)
    hospital.offer()
    answer = hospital.refused()
    assert answer.code.startswith("E-DATA")
    for word in ("ward7", "smith", str(tmp_path)):
        assert word not in answer.reason
    assert any("smith-john" in notice.text for notice in hospital.notices)


def test_a_hospital_whose_data_give_no_training_step_says_so_with_the_reason(started):
    hospital = started(manifest(train=TrainConfig(epochs=1, batch_size=1_000, drop_last=True)))
    hospital.offer()
    refused = hospital.refused()
    assert refused.code == "E-RUN-52"
    assert "train.drop_last" in refused.reason
    assert hospital.transfer.calls.count("Open") == 0


def test_another_shape_is_refused(started):
    run = manifest()
    hospital = started(run)
    other = replace(run, model=NamedOptions("simple_cnn"), schema=Schema((3, 32, 32), run.schema.classes))
    hospital.digest = hospital.transfer.offer(other.to_json().encode())
    hospital.offer()
    assert hospital.refused().code == "E-DATA-05"


def test_an_unknown_privacy_profile_is_refused_before_any_data_is_touched(started, monkeypatch):
    hospital = started(manifest(privacy=NamedOptions("magic", {})))
    touched = []
    monkeypatch.setattr(datasets, "load", lambda *a, **k: touched.append(a))
    hospital.offer()
    assert hospital.refused().code == "E-PRIV-01"
    assert touched == []


def test_a_run_that_comes_back_under_another_manifest_is_refused(started):
    hospital = started()
    hospital.offer(0)
    hospital.sent()
    hospital.close(0)
    hospital.settled()
    hospital.digest = hospital.transfer.offer(manifest(seed=99).to_json().encode())
    hospital.offer(1)
    assert hospital.refused().code == "E-RUN-33"


def test_a_manifest_in_another_form_is_refused(started):
    hospital = started()
    hospital.digest = hospital.transfer.offer(b" " + manifest().to_json().encode())
    hospital.offer()
    assert hospital.refused().code == "E-WIRE-04"


@pytest.mark.parametrize("included", [True, False])
def test_an_update_that_the_coordinator_refuses_waits_for_the_close_and_is_never_the_one_that_was_included(
    make, included
):
    hospital = make()
    service = hospital.start()
    hospital.transfer.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "E-RUN-06: the round is closed")
    hospital.offer()
    assert hospital.refused().code == "E-RUN-06"
    until(lambda: len(hospital.control.sessions) >= 2, what="for a session in which closes are named")
    assert [s.round for s in hospital.control.last.hello.staged] == [0]
    assert service.store.committed("run-1") is None
    hospital.close(included=included)
    hospital.settled()
    assert service.store.outbox() == []
    assert (service.store.committed("run-1") is None) is included  # its own state stays where no other was included


def test_a_task_that_fails_is_reported_and_the_next_one_works(started, slow, caplog):
    slow.held, slow.fail = False, RuntimeError("no room for /data/smith_john.png")
    hospital = started(run_round=slow)
    hospital.offer(0)
    answer = hospital.refused()
    assert (answer.code, "the hospital's own log" in answer.reason) == ("E-RUN-31", True)
    assert "smith" not in answer.reason
    assert "smith_john" in caplog.text
    assert any("smith_john" in notice.text for notice in hospital.notices)
    slow.fail = None
    hospital.offer(1)
    hospital.sent()
