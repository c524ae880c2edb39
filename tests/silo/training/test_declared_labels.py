"""What a coordinator hears of a private run that it only asks about: the same for every set of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fl_core import datasets
from fl_core.methods import build_method
from fl_core.models import build_model
from fl_core.rounds.layout import derive_layout
from fl_core.rounds.manifest import NamedOptions, RunManifest, make_members
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from protos.consilium.v1 import federation_pb2 as pb
from silo.storage.home import Home
from tests.support import until
from tests.support.data import write_image
from tests.support.fake_coordinator import MEMBERS, Hospital, manifest
from tests.support.privacy import private

pytestmark = pytest.mark.integration

LABELS = ("keratosis", "melanoma", "nevus")
RECORDS = {
    "all classes": {"nevus": 6, "melanoma": 6, "keratosis": 6},
    "no record of a class": {"nevus": 6, "melanoma": 6},
    "one record of a class": {"nevus": 6, "melanoma": 6, "keratosis": 1},
    "one record more": {"nevus": 7, "melanoma": 6, "keratosis": 6},
    "folders of other names": {"nevus": 6, "keratosis": 6},
}
SPACES = {
    "the declared classes": LABELS,
    "in another order": LABELS[::-1],
    "one class more": (*LABELS, "zoster"),
    "without the rare class": LABELS[1:],
    "without the frequent class": LABELS[:2],
    "without any of them": ("acne", "zoster"),
}


def images(root: Path, records: Mapping[str, int]) -> str:
    """Write images of classes; return the reference of their folder."""
    for name, count in records.items():
        for k in range(count):
            write_image(root / ("test" if k % 3 == 1 else "train") / name / f"{k}.png", 20 + 10 * k, (32, 32))
    return f"folder:{root}"


@cache
def asks(classes: Sequence[str]) -> RunManifest:
    schema = datasets.schema_of("folder", datasets.DataRequest(classes=classes, image_size=32))
    model, terms = NamedOptions("lenet", {}), NamedOptions("dp_record", {"rng": "test", "epsilon": 8.0})
    layout = derive_layout(build_method("fedavg", {}), build_model("lenet", {}, schema, 3), schema)
    members = make_members(MEMBERS, 3, 1.0, [100] * 3)
    facts = {"image_size": 32, "members": members, "privacy": terms}
    return manifest(data="folder", schema=schema, model=model, layout=layout, **facts)


@contextmanager
def asked(folder: Path, data: str, policy: str = "", **settings: object) -> Iterator[Hospital]:
    """Let a hospital serve data that it registered and gave a budget."""
    home = Home(folder).make()
    home.policy.write_text(f'[privacy]\nrng = "test"\n{policy}')
    ledger = Ledger(home.ledger)
    register(ledger, datasets.load(data), "mine")
    for name in ("mine/train", "mine/test"):
        ledger.set_budget(name, 100.0, 1e-5, "dpo", "test")
    hospital = Hospital(home.path, data=data, **{"nominal_size": 100.0, **settings})
    try:
        hospital.start()
        yield hospital
    finally:
        hospital.end()


def answers(hospital: Hospital, run: RunManifest) -> list[bytes]:
    """Ask by a preflight, and by an offer that trains nothing since its message is of another form."""
    digest = hospital.transfer.offer(run.to_json().encode())
    session = hospital.control.last
    before = len(session.got("preflight")), len(hospital.answers())
    session.send(preflight=pb.Preflight(run_id=f"asked-{before[0]}", manifest_digest=digest))
    until(lambda: len(session.got("preflight")) > before[0], seconds=60)
    hospital.run_id, hospital.digest = f"offered-{before[0]}", digest
    hospital.offer(state={"w": {}})
    until(lambda: not all(a.accepted for a in hospital.answers()[before[1] :]), seconds=60)
    return [m.SerializeToString() for m in (*session.got("preflight")[before[0] :], *hospital.answers()[before[1] :])]


def codes(hospital: Hospital, run: RunManifest) -> tuple[str, ...]:
    preflight, *offered = answers(hospital, run)
    found = [pb.PreflightAnswer.FromString(preflight).code, pb.Answer.FromString(offered[-1]).code]
    return tuple(found)


@pytest.mark.parametrize("declared", ["by --holds", "in the policy"])
def test_a_private_run_is_answered_the_same_for_every_set_of_records(tmp_path: Path, declared: str) -> None:
    """For all sets of records of the declared classes, all label spaces that a coordinator may ask about."""
    policy = f"labels = {list(LABELS)}\n" if declared == "in the policy" else ""
    holds = () if policy else LABELS
    heard = {}
    for name, records in RECORDS.items():
        data = images(tmp_path / name, records)
        with asked(tmp_path / f"{name} home", data, policy, holds=holds) as hospital:
            heard[name] = {space: answers(hospital, asks(classes)) for space, classes in SPACES.items()}
            heard[name]["hello"] = [hospital.control.last.hello.data.SerializeToString()]
    first, *others = heard.values()
    assert all(other == first for other in others)
    ready = [space for space, found in first.items() if pb.PreflightAnswer.FromString(found[0]).ready]
    assert ready == ["the declared classes", "in another order", "one class more"]


def test_a_folder_that_is_not_declared_is_found_by_no_dictionary(tmp_path: Path) -> None:
    """Records of an undeclared class are the hospital's fault, which is told whatever names a coordinator tries."""
    data = images(tmp_path / "data", {"nevus": 6, "melanoma": 6, "secret": 6})
    with asked(tmp_path / "home", data, "labels = ['nevus', 'melanoma']\n") as hospital:
        guesses = [("melanoma", "nevus"), ("melanoma", "nevus", "secret"), ("melanoma", "nevus", "other")]
        assert {codes(hospital, asks(guess)) for guess in guesses} == {("E-RUN-31", "E-RUN-31")}
        assert {codes(hospital, asks(g)) for g in (("nevus", "secret"), ("nevus", "other"))} == {
            ("E-POLICY-16", "E-POLICY-16")
        }
        told = " ".join(a.reason for a in hospital.answers())
        assert "secret" not in told
        assert "melanoma" not in told
        own = " ".join(n.text for n in hospital.notices)
        assert "found ['secret']" in own  # whose own log says what to declare


@pytest.mark.parametrize("name", RECORDS)
def test_a_hospital_that_declares_no_classes_of_its_folder_takes_part_in_no_private_run(tmp_path: Path, name) -> None:
    with asked(tmp_path / "home", images(tmp_path / "data", RECORDS[name])) as hospital:
        found = {codes(hospital, asks(classes)) for classes in SPACES.values()}
    assert found == {("E-POLICY-16", "E-POLICY-16")}


@pytest.mark.parametrize(("most", "code"), [("5e-4", "E-POLICY-05"), ("1e-4", "")])
def test_which_delta_a_run_asks_tells_nothing_of_a_size_that_is_hidden(tmp_path: Path, most: str, code: str) -> None:
    """507 records: a delta above 2e-4 would be refused by the size, and one below it accepted."""
    policy = f"delta = {most}\n[runs]\nhide_size = true\n"
    with asked(tmp_path / "home", "digits/p3c4/1", policy, nominal_size=None) as hospital:
        members = make_members(MEMBERS, 3, 1.0, [100] * 3)
        runs = [replace(private(weights="uniform", delta=delta), members=members) for delta in (1e-4, 3e-5, 1e-5)]
        heard = {codes(hospital, run)[0] for run in runs}
        if most == "5e-4":
            heard |= {codes(hospital, replace(private(weights="uniform", delta=4e-4), members=members))[0]}
    assert heard == {code}
