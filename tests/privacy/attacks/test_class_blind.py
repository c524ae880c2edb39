"""T-58: two hospitals with different classes leave transcripts that a trained distinguisher cannot tell apart."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from consilium.research.engines.in_process import local_ports
from fl_core.aggregation.flat_blocks import CHECK_WORDS, WORDS
from fl_core.aggregation.masked_sum import unsigned
from fl_core.rounds.manifest import NamedOptions
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import BLOCKS, Secagg
from fl_core.types.values import RoundContext
from privacy.secagg import silo_side
from privacy.secagg.keys import MemberKeys, OwnKeys, RunKeys
from privacy.secagg.messages import MaskedUpload, Words
from privacy.secagg.terms import SecaggRun
from tests.support.federations import manifest, shares

pytestmark = pytest.mark.integration

DRAWS = 400
Blocks = tuple[Words, Words]
Features = NDArray[np.float64]


def vectors() -> tuple[Blocks, Blocks]:
    """Return what two hospitals with other classes lay out in a round of FedNH, prototypes and metrics included."""
    plain = manifest("fednh")
    members = tuple(replace(m, units=14) for m in plain.members)
    run = RunSetup.of(replace(plain, members=members, aggregator=NamedOptions("mean"), secagg=Secagg(1)))
    ports, context = local_ports(run, shares()), RoundContext(3, 4, 3, 0, 3)
    message = run.method.broadcast(run.initial_state())
    found = []
    for port in (ports[0], ports[2]):
        update = port.round(message, context, TaskKind.TRAIN)
        model, classes = (unsigned(update[block].total[WORDS]).copy() for block in BLOCKS)
        found.append((model, classes))
    return found[0], found[1]


def stream(label: str) -> Callable[[int], bytes]:
    """Return bytes that look random and are the same in each run of the test."""
    counter = itertools.count()

    def drawn(n: int) -> bytes:
        return hashlib.shake_256(f"{label} {next(counter)}".encode()).digest(n)

    return drawn


def uploads(blocks: Blocks, label: str) -> Iterator[MaskedUpload]:
    """Mask one vector in many runs, each with keys of its own."""
    ring = "ring64" if blocks[0].itemsize == 8 else "ring32"
    for draw in range(DRAWS):
        random = stream(f"{label} {draw}")
        run = SecaggRun(f"run {draw}", bytes(32), ("a", "b", "c"), 3, ring, Secagg(1))
        own = [OwnKeys.new(random) for _ in run.members]
        entries: list[MemberKeys] = [o.entry(run, n, b"", lambda _: b"") for o, n in zip(own, run.members, strict=True)]
        keys = RunKeys.agree(run, "a", own[0], entries, lambda *_: True)
        round = run.round(keys.keys_digest, "train", 0, bytes(32))
        yield silo_side.mask(keys, round, None, blocks[0].copy(), blocks[1].copy(), random)


def features(upload: MaskedUpload) -> Features:
    """Say what a curious coordinator may look at: how often each byte comes, the first words, means, lengths."""
    found: list[float] = []
    for part in (upload.model, upload.classes, upload.packages, upload.commitments):
        raw = np.frombuffer(part.tobytes(), np.uint8)
        found += [part.size, *(np.bincount(raw, minlength=256) / len(raw) * 256)]
    for words in (upload.model, upload.classes):
        scaled = words.astype(np.float64) / float(np.iinfo(words.dtype).max)
        found += [*scaled[CHECK_WORDS : CHECK_WORDS + 64], scaled.mean(), scaled.std()]
    return np.array(found)


def told_apart(a: Features, b: Features) -> tuple[float, float]:
    """Train on half of both, and return the AUC on the other half with its standard error where nothing is to tell."""
    x, y = np.concatenate((a, b)), np.repeat((0, 1), (len(a), len(b)))
    train = np.arange(len(x)) % 2 == 0
    mean, std = x[train].mean(0), x[train].std(0)
    x = (x - mean) / np.where(std > 0, std, 1.0)
    model = LogisticRegression(C=0.01, max_iter=2000).fit(x[train], y[train])
    n = int((~train).sum()) // 2
    error = float(np.sqrt((2 * n + 1) / (12 * n * n)))  # of the Mann-Whitney statistic, n against n
    return float(roc_auc_score(y[~train], model.decision_function(x[~train]))), error


def test_t58_two_hospitals_with_different_classes_leave_transcripts_that_nobody_tells_apart() -> None:
    one, other = vectors()
    seen = [np.stack([features(u) for u in uploads(v, label)]) for v, label in ((one, "one"), (other, "other"))]
    assert len({row[0] for rows in seen for row in rows}) == 1
    auc, error = told_apart(*seen)
    assert abs(auc - 0.5) <= 1.96 * error, (auc, error)


def test_without_masks_the_same_distinguisher_tells_them_apart() -> None:
    one, other = vectors()
    noise, seen = np.random.default_rng(1), []
    for model, classes in (one, other):
        rows = []
        for _ in range(DRAWS // 4):
            moved = model + noise.integers(0, 2**10, len(model)).astype(model.dtype)
            zeros = np.zeros(1, np.uint8)
            rows.append(features(MaskedUpload(zeros, zeros, zeros, moved, classes)))
        seen.append(np.stack(rows))
    auc, _ = told_apart(*seen)
    assert auc > 0.99


def test_t58_lengths_and_order_of_tensors_follow_from_the_run_alone() -> None:
    one, other = vectors()
    shapes = []
    for blocks in (one, other, (np.zeros_like(one[0]), np.zeros_like(one[1]))):
        upload = next(uploads(blocks, "shape"))
        shapes.append([(f, getattr(upload, f).shape, getattr(upload, f).dtype) for f in MaskedUpload.__slots__])
    assert shapes[0] == shapes[1] == shapes[2]
