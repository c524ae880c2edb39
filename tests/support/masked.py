"""A hospital in a masked run: the real service of one member; the others are state machines at a test's command."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from consilium.research.engines.in_process import SiloShare, local_ports
from fl_core import datasets
from fl_core.aggregation.flat_blocks import CHECK_WORDS, WORDS, FlatLayout
from fl_core.methods import build_method
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.secagg import CLASSES, MASKS, MODEL, Secagg
from fl_core.types.values import RoundContext
from privacy.compiled_run import CompiledRun
from privacy.secagg import silo_side
from privacy.secagg.coordinator_side import UploadSum
from privacy.secagg.keys import KEYS_CONTEXT, MemberKeys, OwnKeys, RunKeys
from privacy.secagg.messages import Confirmation, MaskedUpload, Opening, RevealedShares, Seal
from privacy.secagg.terms import Round, SecaggRun
from privacy.secagg_run import secagg_run
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import BundleFile
from protos.wire.tasks import FROM_WIRE, TO_WIRE
from service_core.pki import certificates
from service_core.pki.roster import RosterMember
from service_core.storage import digests
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home
from tests.support import until
from tests.support.fake_coordinator import Hospital, authority, enrolled, manifest

OWN = 1
"""The place of the hospital among the members."""
SINCE = "2026-01-01T00:00:00+00:00"


def masked_manifest(**other: object) -> RunManifest:
    plain = manifest(**{"secagg": Secagg(1), "aggregator": NamedOptions("mean"), **other})
    return replace(plain, members=tuple(replace(m, units=510) for m in plain.members))


@dataclass
class Colleague:
    """Another member: its identity, its keys of a run, and what it sent."""

    name: str
    key_pem: bytes = field(default_factory=certificates.new_key)
    own: OwnKeys = field(default_factory=OwnKeys.new)
    cert_pem: bytes = b""
    keys: RunKeys | None = None
    rows: dict[tuple[str, int], silo_side.MaskedTaskRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.cert_pem:
            self.cert_pem = authority().sign_silo(certificates.make_request(self.key_pem), self.name)

    def entry(self, run: SecaggRun, key_pem: bytes | None = None) -> MemberKeys:
        key = certificates.load_key(key_pem or self.key_pem, "a test")
        return self.own.entry(run, self.name, self.cert_pem, partial(certificates.sign, key, KEYS_CONTEXT))

    def keep(self, row: silo_side.MaskedTaskRow) -> None:
        self.rows[row.kind, row.number] = row

    def upload(self, round: Round, digest: bytes, model: np.ndarray, classes: np.ndarray) -> MaskedUpload:
        """Mask two blocks as the update of this digest."""
        assert self.keys is not None
        blocks = []
        for words in (model, classes):
            blocks.append(silo_side.blank(len(words), round.run.dtype))
            blocks[-1][CHECK_WORDS:] = words
        self.keep(silo_side.uploaded(round, digest))
        return silo_side.mask(self.keys, round, None, *blocks)

    def confirm(self, run: SecaggRun, seal: Seal) -> Confirmation:
        assert self.keys is not None
        row, cohort = self.rows.get((seal.kind, seal.round)), range(len(run.members))
        return silo_side.confirm(run, self.keys, seal, row, cohort=cohort, signed=lambda *_: True, store=self.keep)

    def answer(self, run: SecaggRun, opening: Opening) -> RevealedShares:
        assert self.keys is not None
        row = self.rows.get((opening.kind, opening.round))
        return silo_side.answer(run, self.keys, opening, row, cohort=range(len(run.members)))


def pinned(home: Home, others: list[Colleague], version: int = 1) -> None:
    """Pin the roster of a consortium in a home that has joined it."""
    identity = SiloIdentity(home.path)
    certs = [identity.current_credentials().cert_pem, *(c.cert_pem for c in others)]
    signed = authority().roster([RosterMember.of(cert, SINCE) for cert in certs], [], version)
    if identity.pins().load().signed is None:
        identity.pins().first(signed).save()


def sign_as_coordinator(message: bytes) -> bytes:
    key_pem, _, _ = authority().server_credentials()
    return certificates.sign(certificates.load_key(key_pem, "a test"), Seal.CONTEXT, message)


class MaskedHospital(Hospital):
    """A hospital, center1, that pinned its two colleagues; they exchange keys and rounds at the test's word."""

    def __init__(self, folder: Path, run: RunManifest | None = None, **settings: object) -> None:
        super().__init__(folder, run or masked_manifest(), **settings)
        self.names = [member.name for member in self.manifest.members]
        self.colleagues = {u: Colleague(name) for u, name in enumerate(self.names) if u != OWN}
        pinned(enrolled(folder), list(self.colleagues.values()))
        self.keys_object, self.keys_digest = "", b""
        self.random = np.random.default_rng(5)

    @property
    def run(self) -> SecaggRun:
        return secagg_run(self.run_id, self.manifest)

    # ---- keys ----

    def preflight(self, times: int = 1) -> pb.PreflightAnswer:
        """Ask whether it is ready; return the newest answer."""
        session = self.control.last
        before = len(session.got("preflight"))
        session.send(preflight=pb.Preflight(run_id=self.run_id, manifest_digest=self.digest))
        until(lambda: len(session.got("preflight")) > before, what=str([n.text for n in self.notices]))
        return session.got("preflight")[-1]

    def entries(self) -> list[MemberKeys]:
        sent = self.preflight().secagg_entry
        own = MemberKeys(self.names[OWN], sent.agree, sent.sign, sent.certificate_pem, sent.signature)
        return [own if u == OWN else self.colleagues[u].entry(self.run) for u in range(len(self.names))]

    def publish(self, entries: list[MemberKeys]) -> str:
        """Offer everybody's keys as an object."""
        fields = [{name: value for name, value in e._asdict().items() if name != "name"} for e in entries]
        made = pb.SecaggKeys(entries=[pb.SecaggEntry(**f) for f in fields])
        return self.transfer.offer(made.SerializeToString(deterministic=True))

    def exchange(self) -> None:
        """Let all members have each other's keys."""
        entries = self.entries()
        self.keys_object = self.publish(entries)
        for colleague in self.colleagues.values():
            colleague.keys = RunKeys.agree(self.run, colleague.name, colleague.own, entries, lambda *_: True)
            self.keys_digest = colleague.keys.keys_digest

    # ---- a round ----

    def ask(self, round: int = 0, kind: pb.TaskKind.ValueType = pb.TRAIN, **other: object) -> pb.Offer:
        facts = {"secagg_keys_digest": self.keys_object, "cohort": len(self.names)}
        return self.offer(round, kind, **{**facts, **other})

    def train(self, round: int = 0, kind: pb.TaskKind.ValueType = pb.TRAIN) -> pb.Offer:
        """Let it do a round, until its receipt is there."""
        before = self.events().count("sent")
        offer = self.ask(round, kind)
        self.sent(before + 1)
        return offer

    def round_of(self, offer: pb.Offer) -> Round:
        base, kind = bytes.fromhex(offer.base_digest), FROM_WIRE[offer.kind].value
        return self.run.round(self.keys_digest, kind, offer.round, base)

    def sizes(self, kind: TaskKind) -> tuple[int, int]:
        layout: FlatLayout = CompiledRun.of(self.manifest).updates.layouts[kind]
        return layout.words(MODEL) - CHECK_WORDS, layout.words(CLASSES) - CHECK_WORDS

    def uploaded(self) -> tuple[bytes, MaskedUpload]:
        """Read the newest update that arrived."""
        return read_upload(bytes(list(self.transfer.uploads.values())[-1]), self.folder)

    def sum_of(
        self, offer: pb.Offer, own: bool = True, absent: Collection[int] = ()
    ) -> tuple[UploadSum, list[np.ndarray]]:
        """Add the updates of the colleagues, random words, and of the hospital; return their plain sum as well.

        absent: colleagues that are left out, whether they sent or not.
        """
        round, sizes = self.round_of(offer), self.sizes(FROM_WIRE[offer.kind])
        total, plain = UploadSum(round, *sizes), [np.zeros(k, round.run.dtype) for k in sizes]
        for u, colleague in self.colleagues.items():
            if u in absent:
                continue
            words = [self.random.integers(0, 2**31, k).astype(round.run.dtype) for k in sizes]
            digest = bytes([u]) * 32
            total.add(u, digest, colleague.upload(round, digest, *words))
            plain = [a + b for a, b in zip(plain, words, strict=True)]
        if own:
            total.add(OWN, *self.uploaded())
        return total, plain

    def send_seal(self, seal: Seal) -> None:
        self.control.last.send(secagg_seal=seal_message(seal))

    def confirmed(self, times: int = 1) -> pb.SecaggConfirm:
        return self._newest("secagg_confirm", times)

    def shares(self, times: int = 1) -> pb.SecaggShares:
        return self._newest("secagg_shares", times)

    def refusal(self, times: int = 1) -> pb.SecaggRefusal:
        return self._newest("secagg_refusal", times)

    def _newest(self, kind: str, times: int):
        def found() -> list:
            return [m for session in self.control.sessions for m in session.got(kind)]

        until(lambda: len(found()) >= times, what=str([n.text for n in self.notices]))
        return found()[-1]


def seal_message(seal: Seal, signer_pem: bytes | None = None) -> pb.SecaggSeal:
    _, cert_pem, _ = authority().server_credentials()
    return pb.SecaggSeal(
        run_id=seal.run_id,
        round=seal.round,
        kind=TO_WIRE[TaskKind(seal.kind)],
        base_digest=seal.base_digest.hex(),
        keys_digest=seal.keys_digest,
        updates=[pb.SealedUpdate(index=u, object_digest=digest.hex()) for u, digest in seal.uploads],
        signer_pem=cert_pem if signer_pem is None else signer_pem,
        signature=seal.signature,
    )


def open_message(opening: Opening) -> pb.SecaggOpen:
    return pb.SecaggOpen(
        run_id=opening.run_id,
        round=opening.round,
        kind=TO_WIRE[TaskKind(opening.kind)],
        seal_hash=opening.seal_hash,
        confirmations=[pb.Confirmed(index=u, signature=signature) for u, signature in opening.confirmations],
        packages=[pb.SealedPackage(index=u, salt=salt, package=package) for u, salt, package in opening.packages],
    )


def confirmation_of(message: pb.SecaggConfirm) -> Confirmation:
    about = message.run_id, FROM_WIRE[message.kind].value, message.round
    return Confirmation(*about, message.seal_hash, message.signature)


def shares_of(message: pb.SecaggShares) -> RevealedShares:
    about = message.run_id, FROM_WIRE[message.kind].value, message.round
    return RevealedShares(
        *about, message.seal_hash, tuple((s.block, s.dealer, s.slot, s.share) for s in message.shares)
    )


def read_upload(raw: bytes, folder: Path) -> tuple[bytes, MaskedUpload]:
    """Read an update's file: its digest, and its five tensors."""
    file = folder / "read-by-a-test"
    file.write_bytes(raw)
    bundle = BundleFile(file)
    parts = {name: bundle[MASKS].total[name].numpy() for name in ("salt", "commitments", "packages")}
    model, classes = (_unsigned(bundle[block].total[WORDS]) for block in (MODEL, CLASSES))
    file.unlink()
    return bytes.fromhex(digests.digest(raw)), MaskedUpload(**parts, model=model, classes=classes)


def _unsigned(words: torch.Tensor) -> np.ndarray:
    return words.numpy().view("<u4" if words.dtype == torch.int32 else "<u8")


def in_clear(run: RunManifest, offer: pb.Offer, hospital: Hospital) -> list[np.ndarray]:
    """Compute what the hospital's update is without masks, in another process's stead: both blocks, no check words."""
    shares = [SiloShare(d.train, d.test) for d in (datasets.load(f"digits/p3c4/{k}") for k in range(3))]
    port = local_ports(CompiledRun.of(run), shares)[OWN]
    msg = build_method(run.method.name, run.method.options).broadcast(hospital.server)
    context = RoundContext(3, 10, run.rounds, offer.round, 3)
    flat = port.round(msg, context, FROM_WIRE[offer.kind])
    return [_unsigned(flat[block].total[WORDS])[CHECK_WORDS:] for block in (MODEL, CLASSES)]
