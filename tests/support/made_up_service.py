"""Answers as a lead's service could give them: of seven hospitals, or of twelve whose names and classes are long.

One run waits for a hospital, others are over: finished, failed, private, under masks, a survey, an evaluation.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from coordinator.lead import accuracy
from fl_core.types.clinical import CALIBRATION_BINS, BinnedRange, ClinicalMetrics, ReliabilityBin
from protos.consilium.v1 import federation_pb2 as pb


@dataclass
class MadeUpService:
    """Answers of a service, as a lead's client gives them. error: raised instead, while it is set."""

    silo_list: pb.SiloList = field(default_factory=pb.SiloList)
    details: list[pb.RunDetail] = field(default_factory=list)
    happened: Sequence[pb.Event] = ()
    error: Exception | None = None
    asked: int = 0

    def __call__(self) -> MadeUpService:
        return self

    def silos(self) -> pb.SiloList:
        self.asked += 1
        self._fail()
        return self.silo_list

    def runs(self) -> list[pb.RunInfo]:
        self._fail()
        return [detail.info for detail in self.details]

    def show(self, run: str) -> pb.RunDetail:
        self._fail()
        return next(detail for detail in self.details if detail.info.run_id == run)

    def events(self, run: str, after: int = 0) -> list[pb.Event]:
        self._fail()
        return [event for event in self.happened if event.number > after]

    def close(self) -> None:
        pass

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Study:
    """Who takes part in runs, and what they tell apart. alone: the class that the last hospital alone has."""

    hospitals: Sequence[str]
    tested: Mapping[str, int]
    alone: str = "keratosis"

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.tested)


_SKIN = {
    "melanoma": 140,
    "nevus": 420,
    "keratosis": 110,
    "basal cell carcinoma": 160,
    "dermatofibroma": 30,
    "vascular lesion": 40,
}
SKIN = Study(("aarhus", "basel", "cork", "delft", "evora", "freiburg", "ghent"), _SKIN)
LONG = Study(
    (
        *SKIN.hospitals,
        "universitaetsklinikum-schleswig-holstein-campus-kiel",
        "hospital-universitario-puerta-de-hierro-majadahonda",
        "haukeland",
        "innsbruck",
        "assistance-publique-hopitaux-de-marseille-la-timone",
    ),
    {
        **_SKIN,
        "squamous cell carcinoma in situ (Bowen's disease)": 55,
        "Pneumonoultramicroscopicsilicovolcanoconiosis": 25,
        "pigmented benign keratosis of the elderly": 210,
        "a class that no hospital has tested": 0,
    },
)
WAITS, FEDMR, FEDAVG = "fedmr-skin-1124-0812-7f3c", "fedmr-skin-1123-1640-19ab", "fedavg-skin-1123-1502-c0de"
FAILED, PRIVATE, MASKED, SURVEYED, MEASURED = (
    "fedavg-skin-1122-0900-fa11",
    "analytic-skin-1121-0900-9a1e",
    "fedavg-skin-1120-0900-5ea1",
    "survey-skin-1119-0900-a5ed",
    "evaluate-skin-1118-0900-ea50",
)
DAY, SECONDS = 86400.0, 95.0


def clinical(study: Study, share: Sequence[float]) -> ClinicalMetrics:
    """Make counts in which each class is recognised with this share, and taken for the next one else."""
    c = len(study.classes)
    rows = []
    for k, n in enumerate(study.tested.values()):
        row = [0] * c
        row[k] = round(n * share[k])
        row[(k + 1) % c] = n - row[k]
        rows.append(tuple(row))
    right, of = sum(row[k] for k, row in enumerate(rows)), sum(study.tested.values())
    bins = [ReliabilityBin(0, 0, 0.0)] * (CALIBRATION_BINS - 1) + [ReliabilityBin(of, right, 0.95 * of)]
    areas = (BinnedRange(0.5 + s / 2 - 0.0003, 0.5 + s / 2) for s in share)
    auc = tuple(area if n else None for area, n in zip(areas, study.tested.values(), strict=True))
    return ClinicalMetrics(tuple(rows), auc, tuple(bins))


def share_right(study: Study, method: str, behind: int) -> tuple[float, ...]:
    """Return by class what a model answers right after so many rounds."""
    slow = (0.86, 0.97, 0.78, 0.88, 0.7, 0.9) if method == "fedmr" else (0.7, 0.98, 0.32, 0.84, 0.15, 0.6)
    grown = (1 - math.exp(-behind / 6 * (1 + k % 3)) for k in range(len(study.classes)))
    return tuple(s * g for s, g in zip(cycle(slow), grown, strict=False))


def rounds(study: Study, method: str, last: int, began: float, seconds: float, finished: bool) -> list[pb.RoundInfo]:
    found = []
    for number in range(last + finished):
        found_here = clinical(study, share_right(study, method, number))
        opened = began + number * seconds
        away = "ghent" if number % 7 == 4 else ""
        there = [name for name in study.hospitals if name != away]
        kind = pb.EVALUATE if number == last else pb.TRAIN
        r = pb.RoundInfo(round=number, kind=kind, included=there, opened_unix=opened, closed_unix=opened + seconds - 2)
        r.correct.extend(float(found_here.confusion[k][k]) for k in range(len(study.classes)))
        r.examples.extend(map(float, study.tested.values()))
        r.clinical.CopyFrom(accuracy.clinical_message(found_here))
        if away:
            r.missing[away] = "E-RUN-13: no update (offline 12 min): the round closed without it"
        for k, name in enumerate(there):
            took = seconds * (0.35 + 0.08 * k + 0.05 * math.sin(number + k))
            r.arrivals.append(pb.Arrival(silo=name, bytes=4_200_000 + 1000 * k, at_unix=opened + took))
        r.base_bytes = 4_150_000
        found.append(r)
    return found


def run(
    run_id: str, method: str, state: str, last: int, began: float, study: Study = SKIN, **options: object
) -> pb.RunDetail:
    finished = state == "finished"
    made = rounds(study, method, last, began, SECONDS, finished)
    manifest = {
        "schema": {"classes": list(study.classes)},
        "method": {"name": method, "options": {}},
        "members": [{"name": name} for name in study.hospitals],
        "privacy": {"name": "none", "options": {}},
        "software": "consilium-fl 0.1.0",
    }
    spec = {
        "method": {"name": method, **options},
        "model": {"name": "resnet18"},
        "data": {"name": "folder", "image_size": 128},
        "rounds": 20,
        "seed": 0,
        "train": {"lr": 0.01, "epochs": 2, "batch_size": 64},
    }
    info = pb.RunInfo(
        run_id=run_id,
        name="skin-study",
        state=state,
        method=method,
        data="folder",
        rounds=20,
        closed=last,
        created_unix=began - 20,
        ended_unix=began + (last + 1) * SECONDS if finished else 0.0,
        bytes_up=sum(a.bytes for r in made for a in r.arrivals),
        bytes_down=sum(r.base_bytes * len(study.hospitals) for r in made),
        manifest_digest="5cad08c6f5116f0ac28dc6587ba6c568f42d0cd7e6d814ec37248a1a5fdc1465",
        model_digest="9be1f7a6f6d1a5d0c2b2a1f0b3e4d5c6a7b8c9d0e1f2a3b4c5d6e7f809182736",
        model_object="a" * 64,
    )
    set_accuracies(info, made)
    stated = [
        pb.Declaration(
            silo=name,
            round=max(0, last - 1),
            stated=pb.Attestation(policy_digest=f"{k + 11:02x}" * 32, ledger_seq=40 + k if k % 2 else 0),
        )
        for k, name in enumerate(study.hospitals)
    ]
    return pb.RunDetail(
        info=info, manifest_json=json.dumps(manifest), spec_json=json.dumps(spec), rounds=made, declarations=stated
    )


def set_accuracies(info: pb.RunInfo, made: Sequence[pb.RoundInfo]) -> None:
    sums = [(tuple(r.correct), tuple(r.examples), accuracy.noise_of(r)) for r in made]
    if sums[-1][2] is None:
        info.accuracy = sum(sums[-1][0]) / sum(sums[-1][1])
        info.best_accuracy = max(sum(right) / sum(of) for right, of, _ in sums)
    else:
        accuracy.set_estimates(info, sums)
    accuracy.set_balanced(info, sums[-1])


def consortium(now: float | None = None, study: Study = SKIN) -> MadeUpService:
    """Make the service's answers as of a moment."""
    now = time.time() if now is None else now
    waits = run(WAITS, "fedmr", "running", 12, now - 12 * SECONDS - 71, study, mu1=0.01)
    waits.info.waiting.CopyFrom(pb.Waiting(round=12, there=4, needed=5, opened_unix=now - 71))
    for k, name in enumerate(study.hospitals[:4]):
        waits.info.waiting.arrivals.append(pb.Arrival(silo=name, bytes=4_200_000 + 1000 * k, at_unix=now - 40 + 9 * k))
    waits.info.waiting.silos.extend(
        [
            pb.AwaitedSilo(name="evora", left_s=96, online=True),
            pb.AwaitedSilo(name="freiburg", left_s=110, online=True),
            pb.AwaitedSilo(name="ghent", left_s=540, offline_s=330, classes=[study.alone]),
        ]
    )
    silos = []
    for k, name in enumerate(study.hospitals):
        doing = {"evora": pb.TRAINING, "freiburg": pb.UPLOADING}.get(name, pb.WAITING)
        few = tuple(c for n, c in enumerate(study.classes) if c != study.alone and (n + k) % 3)
        held = study.classes if name == "ghent" else few
        silo = pb.SiloInfo(
            name=name,
            state="offline" if name == "ghent" else "online",
            fingerprint=f"{k + 3:02x}9b41{7 * k + 16:02x}770c5ed1" * 4,
            certificate_until_unix=now + (9 if name == "ghent" else 40 + 5 * k) * DAY,
            last_seen_unix=now - (330 if name == "ghent" else 2),
            activity=doing,
            run_id=WAITS,
            round=12,
            done=620 if name == "evora" else 0,
            total=800 if name == "evora" else 0,
            software="consilium-fl 0.1.0",
            policy_digest=f"{k + 11:02x}" * 32,
        )
        silo.data.CopyFrom(pb.DataOffer(name="folder", classes=study.classes, holds=held, nominal_size=1200 + 310 * k))
        silos.append(silo)
    happened = [
        pb.Event(
            number=1,
            at_unix=now - 700,
            kind="refused",
            round=4,
            silo="ghent",
            text="E-RUN-13: no update (offline 12 min): the round closed without it",
        ),
        pb.Event(
            number=2,
            at_unix=now - 20,
            kind="waiting",
            round=12,
            text=f"4 of 5 updates received; waiting for ghent (offline 5 min; no other hospital has {study.alone})",
        ),
    ]
    details = [
        waits,
        run(FEDMR, "fedmr", "finished", 20, now - 0.7 * DAY, study, mu1=0.01),
        run(FEDAVG, "fedavg", "finished", 20, now - 0.8 * DAY, study),
    ]
    invited = [pb.InvitationInfo(name="heidelberg", expires_unix=now + 2 * DAY)]
    return MadeUpService(pb.SiloList(silos=silos, invitations=invited), details, happened)


def every_kind(now: float | None = None) -> MadeUpService:
    """Make a service with runs of every kind, whose hospitals and classes have long names."""
    now = time.time() if now is None else now
    service = consortium(now, LONG)
    failed = run(FAILED, "fedavg", "failed", 3, now - 3 * DAY, LONG)
    failed.info.reason = "E-RUN-15: expected 8 updates that close round 4, found 2: " + "; ".join(
        f"{name}: E-POL-02: policy.toml refuses privacy none" for name in LONG.hospitals[:10]
    )
    service.details += [failed, _private(now), _masked(now), _survey(now), _evaluation(now)]
    return service


def _changed(detail: pb.RunDetail, **parts: object) -> pb.RunDetail:
    """Put parts of a manifest in the place of others."""
    detail.manifest_json = json.dumps({**json.loads(detail.manifest_json), **parts})
    return detail


def _private(now: float) -> pb.RunDetail:
    made = run(PRIVATE, "analytic", "finished", 1, now - 4 * DAY, LONG)
    for r in made.rounds:
        r.ClearField("clinical")
        r.noise.CopyFrom(pb.Noise(std=20.0, draws=len(LONG.hospitals)))
    made.info.rounds = 1
    set_accuracies(made.info, made.rounds)
    return _changed(made, privacy={"name": "dp_record", "options": {"epsilon": 3.0, "delta": 1e-5, "unit": "patient"}})


def _masked(now: float) -> pb.RunDetail:
    made = run(MASKED, "fedavg", "finished", 20, now - 5 * DAY, LONG)
    return _changed(made, secagg={"class_sums": "complete", "collusion": 1, "min_contributors": 1, "min_sum": 0})


def _survey(now: float) -> pb.RunDetail:
    made = run(SURVEYED, "survey", "finished", 1, now - 6 * DAY, LONG)
    del made.rounds[1:]
    for name in ("correct", "examples", "clinical"):
        made.rounds[0].ClearField(name)
    for name in ("accuracy_estimate", "best_estimate", "balanced_accuracy", "guessed_among"):
        made.info.ClearField(name)
    made.info.rounds, made.info.accuracy, made.info.best_accuracy = 1, -1, -1
    return made


def _evaluation(now: float) -> pb.RunDetail:
    """Measure a model that two hospitals let be shown by itself, and beside models of their own."""
    made = run(MEASURED, "fedavg", "finished", 0, now - 7 * DAY, LONG)
    made.info.rounds = 0
    (measured,) = made.rounds
    found = clinical(LONG, share_right(LONG, "fedmr", 20))
    measured.correct[:] = [float(row[k]) for k, row in enumerate(found.confusion)]
    measured.clinical.CopyFrom(accuracy.clinical_message(found))
    own = pb.OwnModels(
        own=[0.7 * n for n in measured.correct],
        measured=measured.correct,
        examples=measured.examples,
        images=sum(measured.examples),
        difference=0.08 * sum(measured.examples),
        square=0.02 * sum(measured.examples),
    )
    measured.own.CopyFrom(own)
    for name, share in zip((LONG.hospitals[0], LONG.hospitals[7]), (0.25, 0.5), strict=True):
        measured.by_hospital.append(
            pb.HospitalResult(
                silo=name,
                correct=[round(share * n) for n in measured.correct],
                examples=[round(share * n) for n in measured.examples],
            )
        )
    set_accuracies(made.info, made.rounds)
    return made
