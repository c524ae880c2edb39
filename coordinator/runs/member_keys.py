"""The keys of a masked run's members: checked as their answers to the preflight come, then fixed as one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from coordinator.pki.membership import roster_member
from coordinator.storage.store import Store
from fl_core.errors import RefusedError, StateError
from privacy.secagg.keys import Entry, Vouch, Vouched, pinned_signature, vouch
from privacy.secagg.terms import SecaggError, SecaggRun
from protos.consilium.v1 import federation_pb2 as pb
from service_core.storage.object_store import ObjectStore

ENTRY_BYTES = 16 << 10
"""Of one member's keys, its certificate included: nothing signs what stands around a certificate."""


@dataclass(frozen=True, slots=True)
class MemberKeys:
    """The keys of one masked run. consortium: as certificates name it.

    Guarantees: once they are stored they stay what they are, whatever a member sends.
    """

    run: SecaggRun
    consortium: str
    store: Store
    objects: ObjectStore

    @property
    def object(self) -> str | None:
        """Return the digest of the object with everybody's keys; None before it is stored."""
        return self.store.secagg.keys(self.run.run_id)

    def check(self, name: str, found: pb.SecaggEntry | None) -> None:
        """Check what came with a member's answer.

        Raises RefusedError: E-WIRE-01 where nothing did, E-ID-33 on keys that the member's certificate did not sign.
        """
        if found is None:
            raise RefusedError(
                "E-WIRE-01",
                "expected the hospital's keys for a run with masks, found none: its software is from before them; "
                "upgrade it, or submit the run with secagg=off",
            )
        if (size := found.ByteSize()) > ENTRY_BYTES:
            raise SecaggError("E-ID-33", f"expected keys of at most {ENTRY_BYTES} bytes, found {size}")
        entry = _entry(name, found)
        if not self._trust()(entry, entry.message(self.run)):
            raise SecaggError(
                "E-ID-33", f"expected keys of {name} for this run under its certificate here, found another signature"
            )

    def keep(self, entries: Mapping[str, pb.SecaggEntry]) -> str:
        """Fix the keys of all members and return their object's digest; raises SecaggError (E-ID-33) as `vouch`."""
        found = pb.SecaggKeys(entries=[entries[name] for name in self.run.members])
        self._vouch(found, self._trust())
        raw = found.SerializeToString(deterministic=True)
        with self.objects.lock:
            digest = self.objects.put(raw)
            text = f"the keys of {len(entries)} hospitals are fixed for this run"
            return self.store.secagg.keep_keys(self.run.run_id, digest, len(raw), text)

    def vouched(self) -> Vouched:
        """Read the keys that are stored; raises StateError (E-STATE-22) when they cannot be read."""
        digest = self.object
        assert digest is not None
        raw = self.objects.verified(digest).read_bytes()
        try:
            return self._vouch(pb.SecaggKeys.FromString(raw), lambda *_: True)  # as it was when they were stored
        except DecodeError as error:
            raise StateError("E-STATE-22", f"expected the keys of {self.run.run_id}, found other bytes") from error

    def _vouch(self, found: pb.SecaggKeys, trusted: Vouch) -> Vouched:
        return vouch(self.run, [_entry(n, e) for n, e in zip(self.run.members, found.entries, strict=True)], trusted)

    def _trust(self) -> Vouch:
        members = {s.name: roster_member(s) for s in self.store.members.silos() if not s.revoked}
        pins = {name: member.fingerprint for name, member in members.items()}
        return lambda entry, message: pinned_signature(entry, message, self.consortium, pins, members)


def _entry(name: str, found: pb.SecaggEntry) -> Entry:
    return Entry(name, found.agree, found.sign, found.certificate_pem, found.signature)
