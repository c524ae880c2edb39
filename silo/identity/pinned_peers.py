"""The peers that a silo accepts. The CA signs the roster; the hospital decides which keys in it to accept.

The CA alone must not be able to invent peers. So each member's public key is pinned when it is first accepted, and
another key under the same name needs a signature of the old key.
"""

from __future__ import annotations

import base64
import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fl_core.errors import ConfigError, RefusedError, StateError
from service_core.pki.identity import format_fingerprint
from service_core.pki.roster import Roster, RosterMember, SignedRoster, renewed_from
from service_core.storage import private_files


@dataclass(frozen=True, slots=True)
class RosterChange:
    """The changes in a newer roster, by name. held: name -> the reason why the key is not accepted."""

    version: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    rekeyed: tuple[str, ...]
    held: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PinnedPeers:
    """The pinned roster in one file: the signed document, and the pinned fingerprints by name.

    pins: of accepted members   former: of removed ones, so that a name cannot come back with another key   by_hand: of
    members whose fingerprint a person here compared with the other hospital; a proved renewal keeps the confirmation.
    """

    path: Path
    ca_pem: bytes
    consortium: str
    signed: SignedRoster | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)
    by_hand: Mapping[str, str] = field(default_factory=dict)

    def first(self, signed: SignedRoster) -> PinnedPeers:
        """Pin all members of the roster that came with the first certificate; raises RefusedError (E-ID-14)."""
        roster = signed.verify(self.ca_pem, self.consortium)
        pins = {member.name: member.fingerprint for member in roster.members}
        return PinnedPeers(self.path, self.ca_pem, self.consortium, signed, pins)

    def update(self, signed: SignedRoster, accept_additions: bool = True, asked_at: int | None = None) -> RosterChange:
        """Take over a roster and save it.

        asked_at: the version that was pinned when this roster was requested. If another answer has pinned a newer
        roster since then, one of version `asked_at` or later is ignored: nothing changes.

        | member in the roster                   | result                                                    |
        |----------------------------------------|-----------------------------------------------------------|
        | missing                                | removed at once; its key is remembered                    |
        | new, or back with its former key       | added if `accept_additions`, else not accepted (held)     |
        | other key, chain of proofs from ours   | rekeyed                                                   |
        | other key, no such chain               | held; the old key is not accepted either                  |

        Raises RefusedError (E-ID-14) if the roster is not the CA's, not this consortium's or inconsistent, if it is
        older than the pinned one, or if it differs from the pinned one of the same version. On an error nothing
        changes.
        """
        roster = signed.verify(self.ca_pem, self.consortium)
        with self._locked():
            return self._update(signed, roster, accept_additions, asked_at)

    def _update(
        self, signed: SignedRoster, roster: Roster, accept_additions: bool, asked_at: int | None
    ) -> RosterChange:
        pinned = self.load()
        before = pinned._roster()
        if before is not None and pinned.signed is not None:
            if asked_at is not None and asked_at <= roster.version < before.version:
                return RosterChange(before.version, (), (), (), {})
            if roster.version < before.version:
                raise RefusedError(
                    "E-ID-14",
                    f"the roster has version {roster.version}, but the pinned one has {before.version}: somebody "
                    "sent an old list, perhaps with a revoked silo. The newer one stays. Ask the lead",
                )
            if roster.version == before.version and signed.document != pinned.signed.document:
                raise RefusedError(
                    "E-ID-14",
                    f"this roster of version {before.version} differs from the pinned one: two different lists of "
                    "that version exist. Compare `silo fingerprint` with another hospital, and ask the lead",
                )
        pins, change = _decide(pinned, roster, accept_additions)
        pinned._pin(signed, pins)
        return change

    def _pin(self, signed: SignedRoster, pins: Mapping[str, str]) -> None:
        former = {n: f for n, f in {**self.former, **self.pins}.items() if n not in pins}
        # A proved new key stays confirmed, and so does a member that returns with the same key.
        by_hand = {n: pins.get(n, f) if self.pins.get(n) == f else f for n, f in self.by_hand.items()}
        replace(self, signed=signed, pins=pins, former=former, by_hand=by_hand).save()

    def held(self) -> dict[str, RosterMember]:
        """Return the members of the pinned roster whose present key this silo does not accept."""
        pinned = self.load()
        return {name: m for name, m in pinned.members().items() if pinned.pins.get(name) != m.fingerprint}

    def accept(self, name: str, fingerprint: str) -> None:
        """Accept the key of one member. fingerprint: in hex, as read out by the other hospital.

        Raises ConfigError (E-ID-16), and changes nothing, if the roster has no member with that name and key.
        """
        with self._locked():
            pinned = self.load()
            roster = pinned._roster()
            keys = {} if roster is None else {m.name: m.fingerprint for m in roster.members}
            if keys.get(name) != fingerprint or pinned.signed is None:
                listed = (
                    f"the key {format_fingerprint(keys[name])}"
                    if name in keys
                    else f"the members {', '.join(sorted(keys))}"
                )
                raise ConfigError(
                    "E-ID-16",
                    f"expected a member {name} with the key {format_fingerprint(fingerprint)} in the roster, found "
                    f"{listed}; ask that hospital for its `silo fingerprint` outside this software, for example by "
                    "telephone",
                )
            marked = replace(pinned, by_hand={**pinned.by_hand, name: fingerprint})
            marked._pin(pinned.signed, {**pinned.pins, name: fingerprint})

    def confirmed(self) -> frozenset[str]:
        """Return the names of members whose key a person of this hospital confirmed by its fingerprint (`accept`)."""
        pinned = self.load()
        return frozenset(name for name in pinned.accepted() if pinned.by_hand.get(name) == pinned.pins[name])

    def members(self) -> dict[str, RosterMember]:
        """Return the members of the pinned roster, accepted or not."""
        roster = self.load()._roster()
        return {} if roster is None else {member.name: member for member in roster.members}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file between reading and writing it, against the service and other commands."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def accepted(self) -> dict[str, bytes]:
        pinned = self.load()
        accepted = {name: m for name, m in pinned.members().items() if pinned.pins.get(name) == m.fingerprint}
        return {name: member.certificate.encode() for name, member in accepted.items()}

    def load(self) -> PinnedPeers:
        """Read the file; return this object unchanged if there is none. Raises StateError (E-STATE-43) if damaged."""
        if not self.path.exists():
            return self
        try:
            raw = json.loads(self.path.read_text())
            signed = SignedRoster(base64.b64decode(raw["document"]), base64.b64decode(raw["signature"]))
            pins, former, by_hand = (
                {str(name): str(fingerprint) for name, fingerprint in kept.items()}
                for kept in (raw["pins"], raw["former"], raw.get("by_hand", {}))
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise StateError(
                "E-STATE-43",
                f"the pinned roster in {self.path} is damaged: restore it from a backup",
            ) from None
        return PinnedPeers(self.path, self.ca_pem, self.consortium, signed, pins, former, by_hand)

    def save(self) -> None:
        if self.signed is None:
            raise StateError("E-STATE-43", "there is no roster to pin")
        raw = {
            "document": base64.b64encode(self.signed.document).decode(),
            "signature": base64.b64encode(self.signed.signature).decode(),
            "pins": dict(self.pins),
            "former": dict(self.former),
            "by_hand": dict(self.by_hand),
        }
        private_files.write_public(self.path, json.dumps(raw, indent=1).encode())

    def _roster(self) -> Roster | None:
        return None if self.signed is None else self.signed.verify(self.ca_pem, self.consortium)


def _decide(pinned: PinnedPeers, roster: Roster, accept_additions: bool) -> tuple[dict[str, str], RosterChange]:
    names = {member.name for member in roster.members}
    kept = {name: fingerprint for name, fingerprint in pinned.pins.items() if name in names}
    added: list[str] = []
    rekeyed: list[str] = []
    not_accepted: dict[str, str] = {}
    for member in sorted(roster.members, key=lambda m: m.name):
        if pinned.pins.get(member.name) == member.fingerprint:
            continue
        why = _objection(member, pinned, accept_additions)
        if why is not None:
            not_accepted[member.name] = why
            continue
        kept[member.name] = member.fingerprint
        (rekeyed if member.name in pinned.pins else added).append(member.name)
    removed = tuple(sorted(set(pinned.pins) - names))
    return kept, RosterChange(roster.version, tuple(added), removed, tuple(rekeyed), not_accepted)


def _objection(member: RosterMember, pinned: PinnedPeers, accept_additions: bool) -> str | None:
    had = pinned.pins.get(member.name, pinned.former.get(member.name))
    if had not in (None, member.fingerprint) and not renewed_from(member, pinned.consortium, had):
        return "E-ID-16: another key under a known name, without a signature of the key that is pinned"
    if member.name not in pinned.pins and not accept_additions:
        return "E-ID-16: a new member, and the policy requires the operator's consent"
    return None
