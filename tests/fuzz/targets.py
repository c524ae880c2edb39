"""Every decoder: what it is given, and how it is called. None may raise anything but an error of ours."""

from __future__ import annotations

import atexit
import io
import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import torch
from google.protobuf.message import DecodeError, Message
from PIL import Image

from consilium.research.datasets import leaf
from coordinator.config.hydra_config import compose_spec
from coordinator.config.run_spec import RunSpec
from coordinator.pki.authority import Authority
from fl_core.datasets import references
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.image_loader import ImageFormat, square
from fl_core.datasets.sources import csv_manifest
from fl_core.errors import FederationError
from fl_core.rounds.manifest import RunManifest
from fl_core.types.values import Part
from privacy.accounting.accountant import Mechanism
from privacy.compiled_run import CompiledRun
from privacy.ledger import key
from privacy.ledger.account import Account
from privacy.ledger.ledger import Ledger, LedgerTask, PlannedRelease
from privacy.ledger.sealed import SpendingSummary, seal, unseal
from privacy.policy import Policy
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire import codec, receipts, status
from protos.wire.chunks import Chunk, append_chunk
from protos.wire.codec import BundleFile
from protos.wire.tasks import TaskKey
from service_core.pki import certificates
from service_core.pki.identity import Address, identity_of
from service_core.pki.invitation import InvitationToken
from service_core.pki.offline_signing import Admission, SigningRequest
from service_core.pki.roster import SignedRoster
from service_core.storage.chain import ChainHead
from service_core.storage.generation import Generation, GenerationFile
from silo.admission.rules import HospitalRules
from silo.storage.home import Home
from silo.storage.store import SiloStore
from tests.fuzz.limits import MEMORY
from tests.support import pki
from tests.support.federations import manifest

CONSORTIUM = "demo"
M = TypeVar("M", bound=Message)
_SECRET = b"s" * 32
_HEAD = ChainHead(3, "a" * 64)


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder. samples: what it accepts, or refuses for their content   is_json: its values can be changed."""

    samples: Callable[[], Sequence[bytes]]
    decode: Callable[[bytes], object]
    is_json: bool = False
    allowed: tuple[type[Exception], ...] = ()
    slow: bool = False
    memory: int = MEMORY

    def run(self, data: bytes) -> None:
        """Decode; whatever is raised but an error of ours is a fault."""
        try:
            self.decode(data)
        except (FederationError, *self.allowed):
            pass


@cache
def _folder() -> Path:
    made = Path(mkdtemp(prefix="consilium-fuzz-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@cache
def _authority() -> Authority:
    return pki.authority(_folder() / "authority", pki.today())


def _file(data: bytes, name: str = "input") -> Path:
    file = _folder() / name
    file.write_bytes(data)
    file.chmod(0o600)
    return file


def _text(data: bytes) -> str:
    """Read bytes as text of any kind; what is no UTF-8 becomes lone surrogates, which JSON can bring as well."""
    return data.decode(errors="surrogateescape")


# ---- files of tensors, chunks ---------------------------------------------------------------------------------------


def _state() -> list[bytes]:
    return [codec.pack_state({"w": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0)}, "empty": {}})]


def _bundle() -> list[bytes]:
    return [codec.pack_bundle({"delta": Part.of({"a": torch.ones(3), "b": torch.ones(2, 2)}, 2.0)})]


def _read_bundle(data: bytes) -> None:
    found = BundleFile(_file(data))
    for name in found:
        found.dtypes(name)
        for tensor in found[name].total.values():
            tensor.sum()


def _chunk() -> list[bytes]:
    return [pb.Chunk(offset=o, data=b"x" * 40).SerializeToString() for o in (0, 5)]


def _append(data: bytes) -> None:
    into = io.BytesIO()
    try:
        expected = pb.Chunk.FromString(data)
    except DecodeError:
        expected = None
    try:
        chunk = Chunk.decode(data)
    except DecodeError:
        assert expected is None
        return
    assert expected is not None
    assert (chunk.object, chunk.offset, chunk.data) == (expected.object, expected.offset, expected.data)
    append_chunk(chunk, into, 5, 1 << 20)


def _message(message: M, data: bytes) -> M:
    """Parse into a message; gRPC answers for what is none."""
    try:
        message.ParseFromString(data)
    except DecodeError:
        message.Clear()
    return message


# ---- texts ----------------------------------------------------------------------------------------------------------


def _manifests() -> list[bytes]:
    return [manifest().to_json().encode()]


def _compile(data: bytes) -> None:
    found = RunManifest.from_json(_text(data))
    CompiledRun.of(found)
    found.digest()


def _specs() -> list[bytes]:
    return [compose_spec(("method=fedmr", "data=digits", "privacy=dp_record")).to_json().encode()]


def _policies() -> list[bytes]:
    return [
        b'[runs]\nmethods = ["fedavg"]\nleads = ["lead"]\napprove = "by hand"\n[privacy]\nepsilon = 8.0\n'
        b'delta = 1e-5\n[budget."a/train"]\nepsilon = 1.0\ndelta = 1e-6\n'
    ]


def _tables() -> list[bytes]:
    return [b"path,label,group,split\na.png,x,g1,train\nb.png,y,g2,test\n", b'path,label,group,split\n"a,b",x,,train\n']


_LEAF = json.dumps({"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": [[0.5] * 784], "y": [3]}}}).encode()


def _read_leaf(data: bytes) -> None:
    for split in ("train", "test"):
        folder = _folder() / "leaf" / "femnist" / split
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "all.json").write_bytes(data)
    leaf.read("femnist", _folder() / "leaf")


def _images() -> list[bytes]:
    found = []
    for form in ("PNG", "JPEG", "BMP", "GIF", "TIFF"):
        data = io.BytesIO()
        Image.new("RGB", (9, 7), (200, 10, 30)).save(data, form)
        found.append(data.getvalue())
    return found


# ---- identities -----------------------------------------------------------------------------------------------------


def _certificates() -> list[bytes]:
    return [_certificate(), _authority().server_credentials().cert_pem]


@cache
def _certificate() -> bytes:
    return pki.certified(_authority(), "north")


def _requests() -> list[bytes]:
    return [certificates.make_request(certificates.new_key())]


def _tokens() -> list[bytes]:
    return [_authority().invite("north").token.encode()]


def _rosters() -> list[bytes]:
    ca = _authority()
    return [pki.roster(ca, [pki.member(ca, _certificate())], 1).pack()]


def _receipts() -> list[bytes]:
    own = _authority().server_credentials()
    plain = pb.Receipt(contribution_id="c", run_id="run-1", round=2, kind=pb.TRAIN, silo="north", size=3)
    return [receipts.sign(plain, own.key_pem, own.cert_pem).SerializeToString()]


def _verify_receipt(data: bytes) -> None:
    found = _message(pb.Receipt(), data)
    receipts.verify(found, _authority().ca_pem, CONSORTIUM)
    TaskKey.of(found)


def _signing_requests() -> list[bytes]:
    return [SigningRequest(certificates.make_request(certificates.new_key())).to_json().encode()]


def _admission() -> bytes:
    ca = _authority()
    where, members = (Address.parse("fl.example.org:8443"),), [pki.member(ca, _certificate())]
    return Admission(where, ca.ca_pem, pki.roster(ca, members, 1), _certificate()).to_json().encode()


# ---- what lies on the disk ------------------------------------------------------------------------------------------


def _sealed() -> list[bytes]:
    return [seal(_SECRET, _HEAD, 0, SpendingSummary.of(Account()))]


@cache
def _ledger() -> tuple[bytes, bytes]:
    """Make a ledger with an entry of every state; return its file and its key."""
    folder = _folder() / "ledger"
    folder.mkdir()
    ledger = Ledger(folder / "ledger.db")
    ledger.register("a/train", "record", "v1", 2, ["one", "two"])
    ledger.set_budget("a/train", 8.0, 1e-5, "dpo", "why")
    for t in range(3):
        task = LedgerTask("run", "digest", t, "train", "v1")
        entry = ledger.reserve("a/train", task, [PlannedRelease("training", Mechanism(2.0, 0.1, 5))])
        if t:
            ledger.start(entry)
        if t == 1:
            ledger.commit(entry, "sha")
    copy = folder / "copy.db"
    with closing(sqlite3.connect(ledger.chain.file)) as db:
        db.execute("VACUUM INTO ?", (str(copy),))
    return copy.read_bytes(), ledger.chain.key_file.read_bytes()


def _place_ledger(data: bytes) -> Path:
    for old in _folder().glob("ledger.db*"):
        old.unlink()
    _file(_ledger()[1], "ledger.key")
    return _file(data, "ledger.db")


def _open_ledger(data: bytes) -> None:
    ledger = Ledger(_place_ledger(data))
    ledger.verify()
    for name in ledger.collections():
        ledger.status(name, prv=False)


def _ledger_rows() -> list[bytes]:
    events = ("seq", "entry", "subject", "state", "detail", "created_at", "hash")
    rows = [["event", column, 3, "x"] for column in events]
    rows += [["entry", "round", 1, 0], ["mechanism", "noise", 1, 2.0], ["budget", "epsilon", 1, 8.0]]
    return [json.dumps(row).encode() for row in rows]


def _edit_ledger(data: bytes) -> None:
    """Put a value into a row, as somebody with the file but without the key."""
    try:
        table, column, row, value = json.loads(data)
        with closing(sqlite3.connect(_place_ledger(_ledger()[0]))) as db:
            triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
            for name, _ in triggers:
                db.execute(f"DROP TRIGGER {name}")
            db.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', (value, row))
            for _, sql in triggers:
                db.execute(sql)
            db.commit()
    except (ValueError, TypeError, OverflowError, RecursionError, sqlite3.Error):
        return  # such an edit cannot be made
    Ledger(_folder() / "ledger.db").verify()


@cache
def _database() -> bytes:
    store = SiloStore(_folder() / "made.db")
    store.record_run("run-1", "name", "d" * 64, "b" * 64)
    store.end_run("run-1", "finished", "")
    store.close_database()
    copy = _folder() / "made-copy.db"
    with closing(sqlite3.connect(_folder() / "made.db")) as db:
        db.execute("VACUUM INTO ?", (str(copy),))
    return copy.read_bytes()


def _open_store(data: bytes) -> None:
    for old in _folder().glob("silo.db*"):
        old.unlink()
    store = SiloStore(_file(data, "silo.db"), accept_loss=True)  # its generation is counted beside it
    try:
        store.outbox()
        store.missing_receipts()
        store.referenced()
    finally:
        store.close_database()


def _generations() -> list[bytes]:
    noted = GenerationFile(_folder() / "counted.db")
    noted.replace(Generation("a" * 32, 7))
    return [noted.path.read_bytes()]


def _attested(data: bytes) -> None:
    home = _home("attested.json", data)
    store = SiloStore(home.database)
    try:
        HospitalRules(home, store).latest_attestation()
    finally:
        store.close_database()


def _open_authority(data: bytes) -> None:
    home = _folder() / "another"
    home.mkdir(exist_ok=True)
    shutil.copytree(_authority().folder, home / _authority().folder.name, dirs_exist_ok=True)
    (home / _authority().folder.name / "authority.json").write_bytes(data)
    Authority.open(home)


def _home(name: str, data: bytes) -> Home:
    home = Home(_folder() / "home")
    home.path.mkdir(exist_ok=True)
    (home.path / name).write_bytes(data)
    return home


TARGETS: Mapping[str, Target] = {
    "address": Target(lambda: [b"fl.example.org:8443", b"[::1]:80"], lambda d: Address.parse(_text(d))),
    "addresses_file": Target(lambda: [b'["127.0.0.1:8443"]'], lambda d: _home("addresses.json", d).addresses(), True),
    "admission": Target(lambda: [_admission()], lambda d: Admission.from_json(_text(d)), True),
    "attested": Target(lambda: [b'["p", 3, "h", "ff", 0]'], _attested, True),
    "authority": Target(lambda: [(_authority().folder / "authority.json").read_bytes()], _open_authority, True),
    "bundle": Target(_bundle, _read_bundle),
    "certificate": Target(_certificates, identity_of),
    "certificate_request": Target(_requests, certificates.load_request),
    "chunk": Target(_chunk, _append),
    "csv": Target(_tables, lambda d: csv_manifest.scan(_file(d, "table.csv"), None)),
    "data_reference": Target(
        lambda: [b"digits/p5c2/0", b"isic2019/clients12@3/4"], lambda d: references.parse(_text(d))
    ),
    "generation": Target(_generations, lambda d: GenerationFile(_file(d, "g.generation").with_name("g")).read(), True),
    "image": Target(
        _images, lambda d: square(_file(d, "image"), ImageFormat(8)), allowed=(UnreadableError,), memory=1 << 30
    ),
    "instance": Target(
        lambda: [b'{"id": "a", "place": "b"}'], lambda d: _home("instance.json", d).begin_instance(), True
    ),
    "invitation": Target(_tokens, lambda d: InvitationToken.decode(_text(d))),
    "key": Target(lambda: [certificates.new_key()], lambda d: certificates.load_key(d, "here")),
    "ledger": Target(lambda: [_ledger()[0]], _open_ledger, slow=True),
    "ledger_key": Target(lambda: [_ledger()[1]], lambda d: key.read(_file(d, "any.key")), True),
    "ledger_place": Target(lambda: [b'{"ledger": "/a/b.db"}'], lambda d: _home("ledger.json", d).ledger, True),
    "ledger_rows": Target(_ledger_rows, _edit_ledger, True, slow=True),
    "leaf": Target(lambda: [_LEAF], _read_leaf, True),
    "manifest": Target(_manifests, _compile, True),
    "policy": Target(_policies, lambda d: Policy.read(_file(d, "policy.toml"))),
    "receipt": Target(_receipts, _verify_receipt),
    "roster": Target(_rosters, lambda d: SignedRoster.unpack(d).verify(_authority().ca_pem, CONSORTIUM)),
    "sealed_figures": Target(_sealed, lambda d: unseal(_SECRET, _HEAD, 0, d)),
    "signing_request": Target(_signing_requests, lambda d: SigningRequest.from_json(_text(d)), True),
    "silo_database": Target(lambda: [_database()], _open_store),
    "spec": Target(_specs, lambda d: RunSpec.from_json(_text(d)), True),
    "state": Target(_state, lambda d: codec.read_state(_file(d))),
    "status": Target(lambda: [b"E-RUN-05: expected this"], lambda d: status.from_status("INTERNAL", _text(d))),
}
