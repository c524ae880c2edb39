"""Answers of a coordinator as they could be: seven hospitals, a run that waits for one of them, two that are over."""

from __future__ import annotations

import json
import math
import time

from coordinator.lead import accuracy
from fl_core.types.clinical import CALIBRATION_BINS, ClinicalMetrics, Range, ReliabilityBin
from protos.consilium.v1 import federation_pb2 as pb
from tests.support.lead_page import MadeUpService

CLASSES = ("melanoma", "nevus", "keratosis", "basal cell carcinoma", "dermatofibroma", "vascular lesion")
HOSPITALS = ("aarhus", "basel", "cork", "delft", "evora", "freiburg", "ghent")
TESTED = (140, 420, 110, 160, 30, 40)
WAITS, FEDMR, FEDAVG = "fedmr-skin-1124-0812-7f3c", "fedmr-skin-1123-1640-19ab", "fedavg-skin-1123-1502-c0de"
DAY, SECONDS = 86400.0, 95.0


def clinical(share: tuple[float, ...]) -> ClinicalMetrics:
    """Make counts in which each class is recognised with this share, and taken for the next one else."""
    c = len(CLASSES)
    rows = []
    for k, n in enumerate(TESTED):
        row = [0] * c
        row[k] = round(n * share[k])
        row[(k + 1) % c] = n - row[k]
        rows.append(tuple(row))
    right, of = sum(row[k] for k, row in enumerate(rows)), sum(TESTED)
    bins = [ReliabilityBin(0, 0, 0.0)] * (CALIBRATION_BINS - 1) + [ReliabilityBin(of, right, 0.95 * of)]
    auc = tuple(Range(0.5 + s / 2 - 0.0003, 0.5 + s / 2) for s in share)
    return ClinicalMetrics(tuple(rows), auc, tuple(bins))


def share_right(method: str, behind: int) -> tuple[float, ...]:
    """Return by class what a model answers right after so many rounds."""
    slow = (0.86, 0.97, 0.78, 0.88, 0.7, 0.9) if method == "fedmr" else (0.7, 0.98, 0.32, 0.84, 0.15, 0.6)
    grown = (1 - math.exp(-behind / 6 * (1 + k % 3)) for k in range(len(slow)))
    return tuple(s * g for s, g in zip(slow, grown, strict=True))


def rounds(method: str, last: int, began: float, seconds: float, finished: bool) -> list[pb.RoundInfo]:
    found = []
    for number in range(last + finished):
        found_here = clinical(share_right(method, number))
        opened = began + number * seconds
        away = "ghent" if number % 7 == 4 else ""
        there = [name for name in HOSPITALS if name != away]
        kind = pb.EVALUATE if number == last else pb.TRAIN
        r = pb.RoundInfo(round=number, kind=kind, included=there, opened_unix=opened, closed_unix=opened + seconds - 2)
        r.correct.extend(float(found_here.confusion[k][k]) for k in range(len(CLASSES)))
        r.examples.extend(map(float, TESTED))
        r.clinical.CopyFrom(accuracy.clinical_message(found_here))
        if away:
            r.missing[away] = "E-RUN-13: no update (offline 12 min): the round closed without it"
        for k, name in enumerate(there):
            took = seconds * (0.35 + 0.08 * k + 0.05 * math.sin(number + k))
            r.arrivals.append(pb.Arrival(silo=name, bytes=4_200_000 + 1000 * k, at_unix=opened + took))
        r.base_bytes = 4_150_000
        found.append(r)
    return found


def run(run_id: str, method: str, state: str, last: int, began: float, **options: object) -> pb.RunDetail:
    finished = state == "finished"
    made = rounds(method, last, began, SECONDS, finished)
    manifest = {
        "schema": {"classes": list(CLASSES)},
        "members": [{"name": name} for name in HOSPITALS],
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
        bytes_down=sum(r.base_bytes * len(HOSPITALS) for r in made),
        manifest_digest="5cad08c6f5116f0ac28dc6587ba6c568f42d0cd7e6d814ec37248a1a5fdc1465",
        model_digest="9be1f7a6f6d1a5d0c2b2a1f0b3e4d5c6a7b8c9d0e1f2a3b4c5d6e7f809182736",
        model_object="a" * 64,
        accuracy=sum(made[-1].correct) / sum(TESTED),
        best_accuracy=max(sum(r.correct) / sum(TESTED) for r in made),
    )
    stated = [
        pb.Declaration(
            silo=name,
            round=last - 1,
            stated=pb.Attestation(policy_digest=f"{k + 11:02x}" * 32, ledger_seq=40 + k if k % 2 else 0),
        )
        for k, name in enumerate(HOSPITALS)
    ]
    return pb.RunDetail(
        info=info, manifest_json=json.dumps(manifest), spec_json=json.dumps(spec), rounds=made, declarations=stated
    )


def consortium(now: float | None = None) -> MadeUpService:
    """Make the service's answers as of a moment."""
    now = time.time() if now is None else now
    waits = run(WAITS, "fedmr", "running", 12, now - 12 * SECONDS - 71, mu1=0.01)
    waits.info.waiting.CopyFrom(pb.Waiting(round=12, there=4, needed=5, opened_unix=now - 71))
    for k, name in enumerate(HOSPITALS[:4]):
        waits.info.waiting.arrivals.append(pb.Arrival(silo=name, bytes=4_200_000 + 1000 * k, at_unix=now - 40 + 9 * k))
    waits.info.waiting.silos.extend(
        [
            pb.AwaitedSilo(name="evora", left_s=96, online=True),
            pb.AwaitedSilo(name="freiburg", left_s=110, online=True),
            pb.AwaitedSilo(name="ghent", left_s=540, offline_s=330, classes=["keratosis"]),
        ]
    )
    silos = []
    for k, name in enumerate(HOSPITALS):
        doing = {"evora": pb.TRAINING, "freiburg": pb.UPLOADING}.get(name, pb.WAITING)
        few = tuple(c for n, c in enumerate(CLASSES) if c != "keratosis" and (n + k) % 3)
        held = CLASSES if name == "ghent" else few
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
        silo.data.CopyFrom(pb.DataOffer(name="folder", classes=CLASSES, holds=held, nominal_size=1200 + 310 * k))
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
            text="4 of 5 updates that are needed; waits for ghent (offline 5 min; nobody else holds keratosis)",
        ),
    ]
    details = [
        waits,
        run(FEDMR, "fedmr", "finished", 20, now - 0.7 * DAY, mu1=0.01),
        run(FEDAVG, "fedavg", "finished", 20, now - 0.8 * DAY),
    ]
    invited = [pb.InvitationInfo(name="heidelberg", expires_unix=now + 2 * DAY)]
    return MadeUpService(pb.SiloList(silos=silos, invitations=invited), details, happened)
