"""What a coordinator hears beside the numbers of a private run: the same whatever the records are."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import coordinator.config.manifest_builder
from coordinator.config.hydra_config import compose_spec
from fl_core import datasets
from fl_core.errors import ConfigError, DataError, ProtocolError, RefusedError, StateError, UnavailableError
from fl_core.rounds.silo_round import run_silo_round
from fl_core.types.values import Part
from privacy.accounting.record_config import round_to_two_digits
from privacy.ledger.ledger import Ledger
from privacy.ledger.registration import register
from privacy.mechanisms.silo import adaptive_clipping
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from service_core.version import PROTOCOL
from silo.connection.session import PULSE_CEILING_S, pulse_period
from silo.service.task_queue import public_reason
from silo.settings import SiloSettings
from silo.storage.home import Home
from silo.training.data_source import DataSource, data_offer
from tests.support import until
from tests.support.fake_coordinator import FakeControl, Hospital, manifest
from tests.support.hospital import Watched
from tests.support.privacy import DATA, HOSPITAL, SEEDED_POLICY, TEST, TRAIN, hospital_level, private

pytestmark = pytest.mark.integration

RUNS = pytest.mark.parametrize("run", [private, hospital_level], ids=["records", "hospital"])


# ---- the size ------------------------------------------------------------------------------------------------------


def test_a_small_hospital_does_not_declare_its_number_of_records(monkeypatch) -> None:
    whole = datasets.load(DATA)

    def cut(n: int) -> float:
        train = datasets.TensorExamples(torch.zeros(n, 1, 8, 8), torch.zeros(n))
        monkeypatch.setattr("silo.training.data_source.datasets.load", lambda *_, **__: replace(whole, train=train))
        return data_offer(DataSource(DATA)).nominal_size

    assert {cut(n) for n in (1, 17, 57, 58, 99, 100)} == {100.0}
    assert (cut(139), cut(140), cut(141)) == (140.0, 140.0, 150.0)


def test_the_rule_rounds_up_to_two_digits_and_never_to_less_than_a_hundred() -> None:
    for n in range(12_000):
        found = round_to_two_digits(n)
        assert found >= max(n, 100)
        assert len(str(found).rstrip("0")) <= 2
        assert found == 100 or found - n < 10 ** (len(str(n)) - 2)


def test_a_typed_size_is_taken_as_it_was_typed_and_what_is_no_size_as_none() -> None:
    spec = compose_spec(["data=digits", "method=fedavg", "privacy=dp_record"])
    declared = [57.0, 139.0, 0.0, -3.0, math.nan, math.inf, 1e300]
    made = coordinator.config.manifest_builder.manifest_from(spec, [f"h{k}" for k in range(7)], declared)
    assert [m.units for m in made.members] == [57, 139, 0, 0, 0, 0, 0]
    for typed in (math.nan, math.inf, 0.5, -1.0):
        with pytest.raises(ConfigError, match="E-CFG-02"):
            SiloSettings(Home(Path()), DATA, nominal_size=typed).source()


def test_no_class_is_named_that_was_read_off_the_records(tmp_path) -> None:
    from PIL import Image

    for split in ("train", "test"):
        for name in ("nevus", "rare"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / split / name / f"{split}.png")
    source = DataSource(f"folder:{tmp_path}")
    assert set(source.load().schema.classes) == {"nevus", "rare"}
    assert list(data_offer(source).classes) == []


# ---- signs of life -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [0.0, -0.0, -5.0, 1e-300, 1e-9, math.nan, -math.inf])
def test_an_interval_that_a_coordinator_asks_for_is_raised_to_the_floor(asked) -> None:
    assert pulse_period(asked, 1.0) == 1.0


def test_an_interval_without_end_is_bounded_too() -> None:
    assert [pulse_period(s, 1.0) for s in (math.inf, 1e300, 5.0)] == [PULSE_CEILING_S, PULSE_CEILING_S, 5.0]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0.5, pytest.param(0.9, marks=pytest.mark.slow)])
def test_pulses_come_at_the_hospitals_pace_however_they_are_asked_for(serving, asked) -> None:
    """By a tiny interval, or by offers that are answered again and again, each with a pulse."""
    floor = 1.0
    slow, ended = threading.Event(), threading.Event()

    def waits(*args):
        slow.set()
        ended.wait(30)
        return run_silo_round(*args)

    hospital = serving(private(), waits, pulse_floor=floor)
    hospital.control.pulse_s = 0.05  # what it really sends: silence would end the session
    facts = pb.Welcome(protocol=PROTOCOL, software="liar", pulse_seconds=asked, recycle_seconds=0.0)
    hospital.control.welcome = lambda hello: pb.CoordinatorMessage(welcome=facts)
    hospital.control.last.end()
    until(lambda: len(hospital.control.sessions) >= 2)
    session = hospital.control.last
    offer = hospital.offer()
    assert slow.wait(30)
    began, before = time.monotonic(), len(session.got("pulse"))
    while len(pulses := session.got("pulse")) < before + 4:
        session.send(offer=offer)
        assert time.monotonic() < began + 20
        threading.Event().wait(0.01)
    assert time.monotonic() - began > 2.5 * floor
    assert {p.SerializeToString() for p in pulses if p.activity == pb.TRAINING} == {
        pb.Pulse(activity=pb.TRAINING, run_id="run-1", round=0).SerializeToString()
    }
    ended.set()


@pytest.mark.slow
def test_a_coordinator_cannot_have_sessions_opened_anew_without_end(serving) -> None:
    hospital = serving(private(), pulse_floor=1.0)
    hospital.control.pulse_s = 0.05
    facts = pb.Welcome(protocol=PROTOCOL, software="liar", pulse_seconds=0.5, recycle_seconds=0.5)
    hospital.control.welcome = lambda hello: pb.CoordinatorMessage(welcome=facts)
    hospital.control.last.end()
    until(lambda: len(hospital.control.sessions) >= 2)
    began, before = time.monotonic(), len(hospital.control.sessions)
    until(lambda: len(hospital.control.sessions) >= before + 3)
    assert time.monotonic() - began > 2 * 1.0


@RUNS
def test_steps_are_for_the_hospitals_own_screen_alone(serving, run) -> None:
    """The number of steps, and when each was done, would tell how long the records take."""
    seen: list[tuple[pb.Pulse, pb.Pulse]] = []

    def steps(runtime, msg, state, data, context, kind):
        for done in range(3):
            data._data._progress(done + 1, 3)
            seen.append((hospital.service.pulse(), hospital.service.doing()))
        return run_silo_round(runtime, msg, state, data, context, kind)

    hospital = serving(run(), steps)
    hospital.train()
    assert [pulse for pulse, _ in seen] == [pb.Pulse(activity=pb.TRAINING, run_id="run-1", round=0)] * 3
    if run is private:
        assert [(own.done, own.total) for _, own in seen] == [(1, 3), (2, 3), (3, 3)]


# ---- errors --------------------------------------------------------------------------------------------------------

BROKEN = [
    OSError("cannot identify image file '/data/doe.png'"),
    MemoryError(),
    ValueError("17 lesions of patient Doe"),
    KeyError("doe"),
    ZeroDivisionError(),
    torch.OutOfMemoryError("17 GiB"),
    RefusedError("E-PRIV-16", "expected a coupled term, found 17 of Doe"),
    ProtocolError("E-WIRE-06", "found 17 Doe"),
    DataError("E-DATA-05", "class 17 of doe.png"),
    StateError("E-STATE-63", "/home/doe"),
    ConfigError("E-CFG-08", "17"),
    UnavailableError("E-NET-12", "17 Doe"),
]


@RUNS
def test_whatever_goes_wrong_with_the_records_a_coordinator_hears_the_same(serving, run) -> None:
    failing = iter(BROKEN)

    def fails(*_):
        raise next(failing)

    hospital = serving(run(), fails)
    for k in range(len(BROKEN)):
        hospital.run_id = f"run-{k}"  # of a manifest of its own: one manifest is tried three times at most
        hospital.digest = hospital.transfer.offer(replace(hospital.manifest, name=f"run {k}").to_json().encode())
        hospital.offer()
        until(lambda k=k: sum(not a.accepted for a in hospital.answers()) == k + 1, what=str(k))
    refused = [a for a in hospital.answers() if not a.accepted]
    assert {(a.code, a.reason) for a in refused} == {("E-RUN-31", refused[0].reason)}
    for word in ("Doe", "doe", "17", "/"):
        assert word not in refused[0].reason
    own = " ".join(n.text for n in hospital.notices if n.event == "refused")
    assert all(word in own for word in ("/data/doe.png", "E-DATA-05", "MemoryError"))  # the hospital itself is told


def test_data_that_cannot_be_loaded_for_a_private_run_are_no_message(serving, monkeypatch) -> None:
    hospital = serving(private())
    codes = set()
    for k, error in enumerate((DataError("E-DATA-05", "doe.png"), DataError("E-DATA-02", "17"), OSError("doe.png"))):

        def broken(*_, error=error, **__):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(DataSource, "load", broken)
            hospital.run_id = f"run-{k}"
            hospital.offer()
            until(lambda k=k: sum(not a.accepted for a in hospital.answers()) == k + 1)
    for answer in hospital.answers():
        codes.add((answer.code, answer.reason))
    assert [code for code, _ in codes] == ["E-RUN-31"]


def test_of_a_plain_run_no_text_of_a_library_leaves_either(serving) -> None:
    def fails(*_):
        raise OSError("cannot identify image file '/data/doe.png'")

    hospital = serving(manifest(), fails)
    hospital.offer()
    refused = hospital.refused()
    assert refused.code == "E-RUN-31"
    assert "doe" not in refused.reason


@pytest.mark.parametrize("code", ["E-STATE-63", "E-DATA-05", "E-BUDGET-01", "E-POLICY-10", "E-CFG-08", "E-XYZ-99"])
def test_a_refusal_that_was_kept_from_another_error_tells_no_path_and_no_number(code) -> None:
    """What an upload failed with is kept as a text and raised again as a refusal, whatever it was; some is not ours."""
    reason = public_reason(RefusedError(code, "expected the file /home/doe/objects/17, found none"))
    assert "/home/doe" not in reason
    assert "17" not in reason


def test_a_clip_of_the_coordinators_own_is_refused_before_it_is_charged(serving, monkeypatch) -> None:
    run = hospital_level()
    hospital = serving(run)
    watched = Watched(monkeypatch)
    hospital.offer(state={"w": hospital.server["w"], adaptive_clipping.PART: {"clip": torch.tensor(3.0)}})
    assert hospital.refused().code == "E-PRIV-15"
    assert watched.read == 0
    assert [Ledger(Home(hospital.folder).ledger).history(name) for name in (TRAIN, TEST, HOSPITAL)] == [[], [], []]


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf, 1e-45, 3.4e38, 0.1])
def test_an_update_has_the_same_number_of_bytes_whatever_its_numbers_are(value) -> None:
    def size(number: float, n: int = 40) -> int:
        filled = Part({"w": torch.full((n, 3), number)}, torch.full((), abs(number)))
        return len(
            codec.pack_bundle({"delta": filled, "metrics": Part({"correct": torch.full((n,), number)}, filled.weight)})
        )

    generator = torch.Generator().manual_seed(7)
    assert size(value) == size(float(torch.rand(1, generator=generator)))


def test_two_hospitals_of_other_records_send_the_same_number_of_bytes(tmp_path) -> None:
    sizes = set()
    for k, data in enumerate((DATA, "digits/p2c5/0")):
        home = Home(tmp_path / str(k)).make()
        home.policy.write_text(SEEDED_POLICY)
        ledger = Ledger(home.ledger)
        register(ledger, datasets.load(data), "center1")
        for split in (TRAIN, TEST):
            ledger.set_budget(split, 8.0, 1e-5, "dpo", "test")
        hospital = Hospital(tmp_path / str(k), private(), data=data)
        hospital.start()
        hospital.offer()
        try:
            hospital.sent()
        finally:
            hospital.end()
        (raw,) = hospital.transfer.uploads.values()
        (opened,) = hospital.transfer.opened.values()
        sizes.add((len(raw), opened.size))
    assert len(sizes) == 1


def test_the_default_of_the_floor_is_in_force_for_every_service() -> None:
    assert FakeControl().pulse_s < SiloSettings(Home(Path()), DATA).pulse_floor == 1.0
