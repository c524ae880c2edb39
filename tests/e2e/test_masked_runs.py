"""Masked runs through real processes: the model of the simulation, and nothing of one hospital at the coordinator."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from consilium.research.engines.in_process import SiloShare, local_ports
from consilium.research.simulate import runner
from coordinator.config.hydra_config import compose_spec
from fl_core import datasets
from fl_core.aggregation.flat_blocks import CHECK_WORDS, WORDS
from fl_core.methods import METHODS, build_method
from fl_core.types.enums import Capability, TaskKind
from fl_core.types.secagg import MODEL
from fl_core.types.values import RoundContext
from privacy.compiled_run import CompiledRun
from privacy.secagg.keys import RunKeys
from privacy.secagg.terms import BLOCKS
from silo.storage.secagg_keys import MaskedRun
from tests.support import until
from tests.support.processes import World, world

pytestmark = pytest.mark.integration

SITES = [f"digits/p4c3/{k}" for k in range(4)]
SHORT = ("data=digits", "federation=p4c3", "rounds=2", "train.epochs=1", "seed=3", "secagg=on")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("masked")) as made:
        made.federation(SITES)
        yield made


@pytest.mark.parametrize(
    "overrides",
    [
        ("method=fedavg",),
        ("method=fednh", "secagg.min_contributors=2"),
        ("method=analytic", "rounds=1"),
        ("method=fedgela", "cohort=3", "secagg.class_sums=each", "rounds=3"),
    ],
)
def test_a_masked_run_ends_in_the_model_of_its_simulation(masked: World, overrides: tuple[str, ...]) -> None:
    run = masked.submit(*SHORT, *overrides)
    if "secagg.min_contributors=2" in overrides:  # it asks which classes to go on without
        assert masked.wait(run, "paused")["reason"].startswith("E-RUN-53")
        masked.client.resume(run, 0)
    done = masked.wait(run)
    simulated = runner.run(compose_spec((*SHORT, *overrides))).summary()
    assert done["model_digest"] == simulated["model_digest"]
    measured = zip(done["round"], simulated["accuracy_by_round"], strict=True)
    whole = [(r["accuracy"], value) for r, value in measured if len(r["included"]) == len(SITES)]
    assert len(whole) >= 1
    assert all(found == value for found, value in whole)  # a cohort measures its own test images, a simulation all
    assert all(r["missing"] == {} for r in done["round"])


SUMMED = {"fedgen": ("method.mode=secagg",)}
"""Options with which a method's server needs sums alone."""


def _goes_under_masks(name: str) -> bool:
    options = dict(word.removeprefix("method.").split("=") for word in SUMMED.get(name, ()))
    method = build_method(name, options)
    return not method.unsummed_parts and Capability.SECURE_AGGREGATION not in method.unsupported


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_t48_every_method_whose_server_needs_sums_alone_ends_in_the_model_of_its_simulation(masked: World) -> None:
    done = dict[str, tuple[object, object]]()
    for name in filter(_goes_under_masks, sorted(METHODS)):
        words = (*SHORT, f"method={name}", *SUMMED.get(name, ()), "personal=true")
        run = masked.wait(masked.submit(*words), seconds=300)
        done[name] = run["model_digest"], runner.run(compose_spec(words)).summary()["model_digest"]
    assert len(done) >= 24
    assert {name: a == b for name, (a, b) in done.items()} == dict.fromkeys(done, True)


_PIECE, _NEEDLE = 1 << 20, 32


@dataclass(frozen=True)
class Secrets:
    """What the coordinator must not have: of each hospital runs of its words, and of the first one what hides them.

    seen: something that it does have, which the search must find.
    """

    numbers: list[bytes]
    seeds: list[bytes]
    seen: bytes

    @classmethod
    def of(cls, masked: World, run_id: str, keys: RunKeys, terms: MaskedRun, words: tuple[str, ...]) -> Secrets:
        run, home = terms.run, masked.home / "coordinator.sqlite"
        with closing(sqlite3.connect(f"file:{home}?mode=ro", uri=True)) as db:
            rows = db.execute("SELECT round, base_digest FROM rounds WHERE run_id = ?", (run_id,)).fetchall()
        seeds = list(keys.chains)
        for number, base in rows:
            kind = "train" if number < run.rounds else "evaluate"
            round = run.round(keys.keys_digest, kind, number, bytes.fromhex(base))
            if round.position >= keys.position:
                seeds += [keys.of(round).pair_seed(round, v, block) for v in (0, 1) for block in BLOCKS]
        manifest = runner.run(compose_spec(words)).manifest
        setup = CompiledRun.of(manifest)
        shares = [SiloShare(data.train, data.test) for data in map(datasets.load, SITES)]
        msg = setup.method.broadcast(setup.initial_state())
        context = RoundContext(manifest.seed, len(manifest.schema.classes), manifest.rounds, 0, len(SITES))
        numbers = []
        for port in local_ports(setup, shares):
            sent = port.round(msg, context, TaskKind.TRAIN)
            raw = sent[MODEL].total[WORDS].numpy().tobytes()
            numbers += [raw[at : at + _NEEDLE] for at in range(4 * CHECK_WORDS, len(raw) - _NEEDLE, len(raw) // 20)]
        numbers = [n for n in numbers if len(set(n)) > 16]  # rows of zeros are everywhere
        return cls(numbers, seeds, run.manifest_digest.hex().encode()[:_NEEDLE])


def _known(home: Path, run_id: str) -> tuple[RunKeys, MaskedRun] | None:
    """Read a hospital's keys of a run off its database, as soon as they are there."""
    with closing(sqlite3.connect(f"file:{home / 'silo.db'}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        row = db.execute("SELECT * FROM secagg_runs WHERE run_id = ? AND state = 'ready'", (run_id,)).fetchone()
    if row is None:
        return None
    chains = tuple(row["chains"][k : k + 32] for k in range(0, len(row["chains"]), 32))
    peers = tuple(row["peers"][k : k + 32] for k in range(0, len(row["peers"]), 32))
    keys = RunKeys(row["place"], row["keys_digest"], row["sign"], peers, chains, row["position"])
    return keys, MaskedRun.from_json(row["terms"])


def _memory(pid: int) -> Iterator[bytes]:
    """Read the heap, the stacks and whatever else a process allocated, in pieces that overlap."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            where, rights, _, _, file, *_ = line.split()
            begin, end = (int(part, 16) for part in where.split("-"))
            for at in range(begin, end if rights.startswith("rw") and file == "0" else begin, _PIECE):
                memory.seek(at)
                with suppress(OSError):
                    yield memory.read(min(_PIECE + _NEEDLE, end - at))


def _found(needles: set[bytes], pid: int) -> set[bytes]:
    """Return which of the needles are in a process's memory."""
    begins = np.array([int.from_bytes(n[:4], "little") for n in needles], np.uint32)
    table = np.zeros(1 << 16, bool)
    table[begins & 0xFFFF] = True
    found = set()
    for piece in filter(bytes.strip, _memory(pid)):
        for shift in (0, 1):
            pairs = np.frombuffer(piece, "<u2", (len(piece) - shift) // 2, shift)
            at = np.flatnonzero(table[pairs[:-1]])
            here = at[np.isin(pairs[at].astype(np.uint32) | pairs[at + 1].astype(np.uint32) << 16, begins)]
            found |= {text for k in here if (text := piece[2 * k + shift :][:_NEEDLE]) in needles}
    return found


def test_t62_the_coordinators_memory_has_no_number_of_one_hospital_and_no_seed_after_a_run(masked: World) -> None:
    words = (*SHORT, "method=fedavg", "rounds=5", "aggregator=mean")
    run_id = masked.submit(*words)
    keys, terms = until(lambda: _known(masked.folder / "hospital0", run_id), "its keys")
    masked.wait(run_id)
    secrets = Secrets.of(masked, run_id, keys, terms, words)
    assert len(secrets.numbers) >= 20
    assert len(secrets.seeds) >= 4 + 4 * 2
    wanted = {n for n in (*secrets.numbers, *secrets.seeds, secrets.seen) if n[0] and n[1]}
    assert _found(wanted, masked.running["coordinator"].pid) == {secrets.seen}


def test_a_masked_run_goes_on_without_a_hospital_that_is_killed(masked: World) -> None:
    run = masked.submit(
        "method=fedavg", "data=digits", "rounds=20", "train.epochs=1", "seed=3", "secagg=on", "patience_s=1"
    )
    until(lambda: masked.info(run)["closed"] >= 2, "two rounds")
    masked.kill("hospital3")
    done = masked.wait(run, seconds=300)
    assert any(list(r["missing"]) == ["hospital3"] for r in done["round"])
    masked.silo("hospital3", SITES[3])
    masked.online(["hospital3"])


def _allow(masked: World, name: str, text: str) -> None:
    policy = masked.folder / name / "policy.toml"
    policy.write_text(text)
    policy.chmod(0o600)


def test_a_survey_is_summed_under_masks_and_holds_back_what_a_policy_does_not_allow(masked: World) -> None:
    for name in ("hospital0", "hospital1"):
        _allow(masked, name, '[survey]\nallow = ["classes", "images"]\n')
    _allow(masked, "hospital2", '[survey]\nallow = ["images"]\n')
    found = masked.lead("survey", "classes", "images", "data=digits")
    assert "secagg" in json.loads(masked.lead("show", found["run"])["manifest"])
    sets = [datasets.load(site) for site in SITES]
    classes, images = (answer["cells"] for answer in found["answers"])
    counts = sum(s.train.labels.bincount(minlength=10) + s.test.labels.bincount(minlength=10) for s in sets[:2])
    assert [cell["images"] for cell in classes] == counts.tolist()
    assert {cell["held"] for cell in classes} == {2}
    splits = [sum(len(split(s)) for s in sets[:3]) for split in (attrgetter("train"), attrgetter("test"))]
    assert [cell["images"] for cell in images] == splits
    assert {cell["held"] for cell in images} == {1}


def test_an_evaluation_is_summed_under_masks_and_no_update_is_sent(masked: World) -> None:
    run = masked.wait(masked.submit(*SHORT, "method=fedavg"))
    found = masked.lead("evaluate", run["run"])
    assert found["global_accuracy"] == run["global_accuracy"]
    assert found["model_digest"] == run["model_digest"]
    assert found["bytes_up"] < len(SITES) * 16384 < run["bytes_up"] / 10
    assert "secagg" in json.loads(found["manifest"])
    _allow(masked, "hospital3", '[evaluation]\nsend = "nothing"\n')
    without = masked.lead("evaluate", run["run"])
    assert [r["included"] for r in without["round"]] == [[f"hospital{k}" for k in range(4)]]
    assert sum(without["round"][0]["examples"]) == sum(len(datasets.load(site).test) for site in SITES[:3])
    (masked.folder / "hospital3/policy.toml").unlink()
