"""What a hospital refused and has put right since is looked at anew when the lead resumes the run."""

from __future__ import annotations

import os

import pytest
from PIL import Image

from fl_core import datasets
from fl_core.errors import DataError
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions
from fl_core.types.records import Schema
from privacy.ledger.registration import register
from tests.support import until
from tests.support.fake_coordinator import manifest
from tests.support.privacy import DATA, SEEDED_POLICY, TEST, TRAIN, budgeted, private

pytestmark = pytest.mark.integration


def policy_forbids(folder, monkeypatch):
    home = folder / "policy.toml"
    budgeted(folder, policy='[privacy]\nrng = "secure"\n')
    return lambda: home.write_text(SEEDED_POLICY)


def budget_is_short(folder, monkeypatch):
    ledger = budgeted(folder, epsilon=0.5)
    return lambda: ledger.set_budget(TRAIN, 8.0, 1e-5, "dpo", "raised")


def data_are_not_registered(folder, monkeypatch):
    ledger = budgeted(folder)
    (folder / "ledger.db").unlink()
    (folder / "ledger.key").unlink()

    def mend():
        from privacy.ledger.ledger import Ledger

        fresh = Ledger(folder / "ledger.db")
        register(fresh, datasets.load(DATA), "center1")
        for collection in (TRAIN, TEST):
            fresh.set_budget(collection, 8.0, 1e-5, "dpo", "test")

    del ledger
    return mend


def data_cannot_be_read(folder, monkeypatch):
    budgeted(folder)
    load, broken = datasets.load, [True]

    def reading(*args, **kwargs):
        if broken and len(args) > 1 and args[1].classes is not None:
            raise DataError("E-DATA-04", "an image is broken")
        return load(*args, **kwargs)

    monkeypatch.setattr(datasets, "load", reading)
    return broken.clear


def disk_is_full(folder, monkeypatch):
    from silo.storage import outbox

    budgeted(folder)
    whole = outbox.Outbox.begin

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox.Outbox, "begin", full)
    return lambda: monkeypatch.setattr(outbox.Outbox, "begin", whole)


@pytest.mark.fault("a hospital", "has fixed the reason for its refusal", "asked again on resume")
@pytest.mark.parametrize(
    ("break_it", "code"),
    [
        (policy_forbids, "E-POLICY"),
        (budget_is_short, "E-BUDGET-01"),
        (data_are_not_registered, "E-BUDGET-0"),
        (data_cannot_be_read, "E-RUN-31"),
        (disk_is_full, "E-"),
    ],
)
def test_a_refusal_that_was_mended_is_no_refusal_after_a_resume(make, tmp_path, monkeypatch, break_it, code):
    hospital = make(private(reserve_rounds=2))
    mend = break_it(tmp_path / "home0", monkeypatch)
    hospital.start()
    hospital.offer()
    assert hospital.refused().code.startswith(code)
    mend()
    hospital.offer()  # after a reconnection, say: nobody has resumed the run
    until(lambda: len(hospital.answers()) >= 2)
    assert not hospital.answers()[-1].accepted
    hospital.offer(attempt=1)
    hospital.sent()
    assert hospital.answers()[-1].accepted


def test_an_update_that_was_refused_is_sent_once_more(make):
    import grpc

    hospital = make(manifest())
    hospital.transfer.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "E-WIRE-09: over the quota of unfinished uploads")
    hospital.start()
    hospital.offer()
    hospital.refused()
    hospital.transfer.refusal = None
    hospital.offer(attempt=1)
    hospital.sent()
    assert hospital.events().count("training") == 1


def pictures(folder, names, suffix="png"):
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for k in range(10):
            Image.new("RGB", (40, 40), (20 * k, 40, 90)).save(folder / name / f"{k}.{suffix}")


def images_run(names):
    schema = Schema((3, 32, 32), names)
    model = NamedOptions("simple_cnn", {})
    layout = derive_layout(build_method("fedavg", {}), build_model("simple_cnn", {}, schema, 3), schema)
    return manifest(data="folder", schema=schema, layout=layout, model=model, image_size=32, rounds=3)


@pytest.mark.fault(
    "a hospital", "changes its data during a run", "the hospital refuses (E-DATA-10), and the lead is notified"
)
def test_data_that_change_during_a_run_are_refused_until_they_are_as_they_were(started, tmp_path):
    images, names = tmp_path / "images", ("nevus", "melanoma")
    pictures(images, names)
    hospital = started(images_run(names), data=f"folder:{images}")
    hospital.offer(0)
    hospital.sent(1)
    hospital.close(0)
    hospital.settled(1)
    added = images / "nevus" / "one-more.png"
    Image.new("RGB", (40, 40), (1, 2, 3)).save(added)
    hospital.stop()  # a restart changes nothing
    hospital.start()
    hospital.offer(1)
    refused = hospital.refused()
    assert refused.code == "E-DATA-10"
    assert "one-more" not in refused.reason
    assert any("E-DATA-10" in notice.text for notice in hospital.notices)
    added.unlink()
    hospital.offer(1, attempt=1)
    hospital.sent(2)


@pytest.mark.fault(
    "a hospital",
    "replaces an image but keeps its size and date",
    "the hospital refuses (E-DATA-10), and the lead is notified",
)
def test_an_image_that_is_replaced_with_its_size_and_date_kept_is_refused_and_one_that_is_touched_is_not(
    started, tmp_path
):
    images, names = tmp_path / "images", ("nevus", "melanoma")
    pictures(images, names, "bmp")
    hospital = started(images_run(names), data=f"folder:{images}")
    hospital.offer(0)
    hospital.sent(1)
    hospital.close(0)
    hospital.settled(1)
    one, other = images / "nevus" / "1.bmp", images / "nevus" / "2.bmp"
    before, date = one.read_bytes(), one.stat().st_mtime_ns
    assert one.stat().st_size == other.stat().st_size
    one.write_bytes(other.read_bytes())
    os.utime(one, ns=(date, date))
    hospital.offer(1)
    refused = hospital.refused()
    assert refused.code == "E-DATA-10"
    assert "1.bmp" not in refused.reason
    one.write_bytes(before)
    other.touch()
    hospital.offer(1, attempt=1)
    hospital.sent(2)
    hospital.close(1)
    hospital.settled(2)
    one.write_bytes(other.read_bytes())
    os.utime(one, ns=(date, date))
    hospital.stop()  # what a run began with outlives a restart
    hospital.start()
    hospital.offer(2)
    until(lambda: [a.code for a in hospital.answers() if not a.accepted] == ["E-DATA-10"] * 2)
