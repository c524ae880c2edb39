"""How many hospitals a class has: a hospital computes it itself, and what does not prove it stops the run here."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from sqlalchemy import update

from consilium.pages.hospital.site import HospitalPage
from consilium.web.serve import PageServer
from fl_core.aggregation.contributor_floor import CENSUS, HOSPITALS
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.flat_blocks import WORDS
from fl_core.rounds.manifest import NamedOptions
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import CLASSES, MASKS, MODEL, Secagg
from fl_core.types.values import Part
from privacy.compiled_run import CompiledRun
from privacy.secagg import silo_side
from privacy.secagg.coordinator_side import SealedRound, UploadSum
from privacy.secagg.messages import CHECK_WORDS, MaskedUpload
from privacy.secagg.terms import SecaggError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec
from protos.wire.tasks import TaskKey
from silo.admission.census import read_proof
from silo.cli.main import run as silo
from silo.storage.home import Home
from silo.storage.schema import secagg_runs
from tests.support.masked import (
    OWN,
    MaskedHospital,
    confirmation_of,
    masked_manifest,
    open_message,
    read_upload,
    shares_of,
    sign_as_coordinator,
)
from tests.support.pages import Browser

GRID = FixedPointFormat("ring64", 3, {CENSUS: 2.0**61})
RUN = masked_manifest(method=NamedOptions("fednh", {}), secagg=Secagg(2), grid=GRID)
HELD = {0: [1, 1, 0, 0, 0, 0, 0, 0, 0, 1], 2: [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]}
"""Classes of the two colleagues; those of the hospital are its data's."""


class Counted(MaskedHospital):
    """A hospital whose census was answered, sealed and opened, and the proof that it may be sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, RUN)
        self.start()
        self.exchange()
        base = self.keys_digest.hex()
        self.census = self.ask(0, pb.CENSUS, base_digest=base, base_size=0)
        self.sent()
        raws = {OWN: bytes(list(self.transfer.uploads.values())[-1])}
        round, sizes = self.round_of(self.census), self.sizes(TaskKind.CENSUS)
        total = UploadSum(round, *sizes)
        for u, colleague in self.colleagues.items():
            raws[u] = _packed(self._masked(u, HELD[u]))
            colleague.keep(silo_side.uploaded(round, read_upload(raws[u], self.folder)[0]))
        for u in sorted(raws):
            total.add(u, *read_upload(raws[u], self.folder))
        keys = self.colleagues[0].keys
        assert keys is not None
        state = SealedRound(total, total.seal(sign_as_coordinator), keys.peers)
        self.send_seal(state.seal)
        state.confirm(OWN, confirmation_of(self.confirmed()))
        for u, colleague in self.colleagues.items():
            state.confirm(u, colleague.confirm(self.run, state.seal))
        self.control.last.send(secagg_open=open_message(state.opening(OWN)))
        state.answer(OWN, shares_of(self.shares()))
        for u, colleague in self.colleagues.items():
            state.answer(u, colleague.answer(self.run, state.opening(u)))
        opened = state.finish()
        assert opened.classes is not None
        self.holders = [int(n) for n in opened.classes]
        self.proof = pb.SecaggCensus(
            confirmations=[pb.Confirmed(index=u, signature=s) for u, s in state.confirmations],
            uploads=[raws[u] for u in sorted(raws)],
            seeds=[pb.OpenedSeed(block=b, member=u, seed=s) for (b, u), s in opened.own_seeds.items()],
            hospitals=self.holders,
        )
        self.proof.seal.CopyFrom(_message(state.seal))
        self.close(0, kind=pb.CENSUS)

    def _masked(self, u: int, held: list[int]) -> MaskedUpload:
        round, sizes = self.round_of(self.census), self.sizes(TaskKind.CENSUS)
        blocks = [silo_side.blank(k, round.run.dtype) for k in sizes]
        blocks[1][CHECK_WORDS:] = held
        keys = self.colleagues[u].keys
        assert keys is not None
        return silo_side.mask(keys, round, None, *blocks)

    def begin(self, holders: list[int], proof: pb.SecaggCensus | None = None) -> None:
        """Offer round 0 with what the coordinator says of the classes, and what it proves it by."""
        state = {**CompiledRun.of(RUN).method.broadcast(CompiledRun.of(RUN).initial_state())}
        state[HOSPITALS] = {HOSPITALS: torch.tensor(holders, dtype=torch.float64)}
        sent = (proof or self.proof).SerializeToString(deterministic=True)
        base = codec.pack_state(state)
        facts = {"base_digest": self.transfer.offer(base), "base_size": len(base)}
        self.ask(0, pb.TRAIN, secagg_census_digest=self.transfer.offer(sent), **facts)


def _packed(upload: MaskedUpload) -> bytes:
    def part(**values: object) -> Part:
        tensors = {name: torch.from_numpy(v.copy()) for name, v in values.items()}  # type: ignore[attr-defined]
        return Part(tensors, torch.zeros((), dtype=next(iter(tensors.values())).dtype))

    signed = {"<u4": "<i4", "<u8": "<i8"}
    blocks = {
        name: part(**{WORDS: words.view(signed[words.dtype.str])})
        for name, words in ((MODEL, upload.model), (CLASSES, upload.classes))
    }
    extra = part(salt=upload.salt, commitments=upload.commitments, packages=upload.packages)
    return codec.pack_bundle({**blocks, MASKS: extra})


def _message(seal: object) -> pb.SecaggSeal:
    from tests.support.masked import seal_message

    return seal_message(seal)  # type: ignore[arg-type]


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Counted]:
    made = Counted(tmp_path / "home0")
    yield made
    made.end()


def test_t59_with_the_proof_of_the_census_the_hospital_trains(counted: Counted) -> None:
    counted.begin(counted.holders)
    counted.sent(2)
    assert "census" in counted.events()


def test_t59_a_census_told_wrongly_is_refused_though_it_is_proved(counted: Counted) -> None:
    told = [n + 1 if k == 4 else n for k, n in enumerate(counted.holders)]
    counted.begin(told)
    assert counted.refused().code == "E-RUN-48"


@pytest.mark.parametrize("lie", ["upload", "seed", "confirmations", "set", "nothing"])
def test_t59_what_does_not_prove_the_census_is_refused(counted: Counted, lie: str) -> None:
    proof = pb.SecaggCensus()
    proof.CopyFrom(counted.proof)
    if lie == "upload":
        proof.uploads[0] = proof.uploads[2]
    elif lie == "seed":
        proof.seeds[-1].seed = bytes(32)
    elif lie == "confirmations":
        del proof.confirmations[1:]
    elif lie == "set":
        del proof.seal.updates[0]
        del proof.uploads[0]
    else:
        proof.Clear()
    counted.begin(counted.holders, proof)
    assert counted.refused().code in {"E-RUN-45", "E-RUN-48", "E-RUN-50", "E-RUN-51"}


def test_whatever_bytes_a_proof_has_it_is_refused_with_a_code(counted: Counted, tmp_path: Path) -> None:
    draw, raw, file = random.Random(3), counted.proof.SerializeToString(), tmp_path / "proof"
    for _ in range(200):
        changed = bytearray(raw[: draw.randrange(len(raw))] if draw.random() < 0.3 else raw)
        for _ in range(draw.randrange(1, 20)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        file.write_bytes(bytes(changed))
        with suppress(SecaggError):  # another error fails the test; what can be read is held against the seal later
            read_proof(file)


def test_the_census_is_proved_once_and_known_after_a_restart(counted: Counted) -> None:
    counted.begin(counted.holders)
    counted.sent(2)
    counted.stop()
    counted.start()
    assert list(counted.service.store.secagg.coverages()[counted.run_id].hospitals) == counted.holders


def test_page_and_status_name_the_classes_once_the_census_is_proved(counted: Counted, capsys) -> None:
    def shown() -> tuple[str, str, object]:
        page = HospitalPage(Home(counted.folder))
        server = PageServer(page.site(), counted.folder)
        server.start()
        try:
            text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", Browser(server).open().get().text)).split())
        finally:
            server.stop()
            page.close()
        capsys.readouterr()
        assert silo(["status", "--home", str(counted.folder)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert silo(["status", "--json", "--home", str(counted.folder)]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        return text, said, run["classes"]

    page, status, facts = shown()
    assert "the model cannot recognise" not in page + status
    assert facts is None
    counted.begin(counted.holders)
    counted.sent(2)
    page, status, facts = shown()
    assert facts["hospitals"] == counted.holders == [1, 2, 1, 0, 1, 1, 1, 1, 0, 1]
    for line in (
        "1 of 10 classes trained at 2 hospitals each",
        "0, 2, 4, 5, 6, 7, 9: left out because fewer than 2 hospitals have them: the model cannot recognise them",
        "3, 8: at no hospital: the model cannot recognise them",
    ):
        assert line in page
        assert f"{counted.run_id}: {line}" in status


def test_a_census_of_0_1_0_is_still_proved_and_names_no_class(counted: Counted) -> None:
    counted.begin(counted.holders)
    counted.sent(2)
    with counted.service.store.database.write() as db:
        db.execute(update(secagg_runs).values(holders=json.dumps(counted.holders)))
    kept = counted.service.store.secagg.coverages()[counted.run_id]
    assert list(kept.hospitals) == counted.holders
    assert kept.lines() == []


def test_a_second_census_of_a_run_is_refused(counted: Counted) -> None:
    counted.ask(0, pb.CENSUS, base_digest=counted.keys_digest.hex(), base_size=0)
    assert counted.refused().code in {"E-RUN-33", "E-RUN-50"}
    assert counted.service.store.secagg.row(TaskKey(counted.run_id, 0, TaskKind.CENSUS)) is not None
