"""The coordinator's part of a masked round: add uploads, seal one aggregation set, open the sum over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Self

import numpy as np

from fl_core.errors import UnavailableError
from fl_core.types.secagg import SECRET, SHARE
from privacy.secagg import packages
from privacy.secagg.keys import confirmed_by
from privacy.secagg.masks import add_mask, check_words, subtracted
from privacy.secagg.messages import (
    CHECK_WORDS,
    Bytes,
    Confirmation,
    MaskedUpload,
    Opening,
    RevealedShares,
    Seal,
    Words,
    check_about,
)
from privacy.secagg.shamir import PRIME, combine, join, weights
from privacy.secagg.terms import CLASSES, MODEL, Round, SecaggError

Slot = tuple[int, int, int]
"""(block, dealer, slot)."""
_Answers = Mapping[int, Mapping[Slot, bytes]]
_TRIES = 2_000
"""Limit of choices of t answers that are tried for one secret."""


@dataclass(frozen=True, slots=True)
class _Envelope:
    """The stored part of an upload without its words; it reveals no number of the update."""

    digest: bytes
    salt: Bytes
    commitments: Bytes
    packages: Bytes


class UploadSum:
    """Two flat sums of masked words; uploads are added in any order and not kept."""

    def __init__(self, round: Round, model: int, classes: int) -> None:
        """model, classes: words of the blocks, without check words."""
        self.round = round
        self._lengths = model, classes
        self._sums: list[Words] = [np.zeros(k + CHECK_WORDS, round.run.dtype) for k in self._lengths]
        self.envelopes: dict[int, _Envelope] = {}

    @classmethod
    def elsewhere(cls, round: Round, kept: Mapping[int, tuple[bytes, Bytes, Bytes, Bytes]]) -> Self:
        """Represent sums that are in another process, which removes their masks (`OpenedSeeds.unmask`).

        kept: by member whose upload is in the sums: digest, salt, commitments and packages.
        """
        total = cls(round, 0, 0)
        total.envelopes = {member: _Envelope(*parts) for member, parts in kept.items()}
        return total

    def add(self, member: int, object_digest: bytes, upload: MaskedUpload) -> None:
        """Add an upload.

        Raises ProtocolError (E-WIRE-06) on its tensors; SecaggError: E-RUN-51 on its sender, E-RUN-06 once the sum is
        taken.
        Guarantees: a refused upload changes nothing.
        """
        self.round.place(member)
        if not self._sums:
            raise SecaggError("E-RUN-06", f"round {self.round.number} is sealed: this update is too late", member)
        if member in self.envelopes or len(object_digest) != SECRET:
            raise SecaggError("E-RUN-51", f"member {member} sent a second update, one with its digest is expected")
        upload.check(self.round, *self._lengths)
        kept = (upload.salt, upload.commitments, upload.packages)
        self.envelopes[member] = _Envelope(object_digest, *(array.copy() for array in kept))
        for total, words in zip(self._sums, (upload.model, upload.classes), strict=True):
            np.add(total, words, out=total)

    def seal(self, sign: Callable[[bytes], bytes]) -> Seal:
        """Fix the added uploads as the round's set; raises SecaggError (E-RUN-51) if it is too small.

        sign: signs with the coordinator's key, under `Seal.CONTEXT`. Store the seal before it is sent: a round has one.
        """
        round = self.round
        uploads = tuple((u, self.envelopes[u].digest) for u in sorted(self.envelopes))
        round.check_set(uploads)
        unsigned = Seal(round.run.run_id, round.kind, round.number, round.base_digest, round.keys_digest, uploads)
        return replace(unsigned, signature=sign(unsigned.message(round)))

    def take(self) -> list[Words]:
        """Return the sums, once, to be unmasked in place; no more uploads can be added."""
        sums, self._sums = self._sums, []
        return sums


@dataclass(frozen=True, slots=True)
class OpenedSum:
    """Unmasked sums over a set, in words of the ring, without check words; classes: None if they stay masked.

    wrong: as `OpenedSeeds`   own_seeds: only of a census, (block, member) -> seed, for its proof.
    """

    inside: tuple[int, ...]
    model: Words
    classes: Words | None
    wrong: tuple[tuple[int, int], ...]
    own_seeds: Mapping[tuple[int, int], bytes]


@dataclass(frozen=True, slots=True)
class OpenedSeeds:
    """The seeds of the masks that are in the sum of a set.

    task: its description for errors   context: of its round   inside: the members of the set
    wrong: (member, dealer): the member's share of a secret of the dealer did not fit. One of the two sent wrong data,
    provided that no more answers for this secret are wrong than are named here.
    """

    task: str
    context: bytes
    inside: tuple[int, ...]
    seeds: Mapping[Slot, bytes]
    wrong: tuple[tuple[int, int], ...] = ()

    @property
    def blocks(self) -> set[int]:
        """The blocks that are opened."""
        return {block for block, _, _ in self.seeds}

    @property
    def by_member(self) -> Mapping[tuple[int, int], bytes]:
        """The seeds of a census, which has one of each block and member: (block, member) -> seed."""
        return {(block, member): seed for (block, member, _), seed in self.seeds.items()}

    def unmask(self, sums: Sequence[Words]) -> None:
        """Remove the masks from the sums of both blocks (check words first), in place and once.

        Raises SecaggError (E-RUN-48) if the check words show that masks did not cancel: discard the sums then.
        """
        for (block, dealer, other), seed in self.seeds.items():
            add_mask(sums[block], seed, self.context, block, subtract=not subtracted(dealer, other))
        for block in self.blocks:
            check_words(sums[block], len(self.inside), self.task)


class SealedRound:
    """A sealed set: collects confirmations, then shares, then unmasks the sum."""

    def __init__(self, total: UploadSum, seal: Seal, sign_keys: Sequence[bytes]) -> None:
        """total: of exactly the sealed uploads, also after a restart. sign_keys: of all members, `VerifiedKeys.sign`.

        Raises SecaggError (E-RUN-51) if the sum is not that of the sealed set.
        """
        self.round, self.seal = total.round, seal
        self.inside = self.round.check_set(seal.uploads)
        if {u: envelope.digest for u, envelope in total.envelopes.items()} != dict(seal.uploads):
            raise SecaggError("E-RUN-51", f"the updates differ from those of the sealed set, {self.inside}")
        self.hash = self.round.seal_hash(seal.uploads)
        self._sums, self._envelopes, self._sign_keys = total.take(), total.envelopes, sign_keys
        self._confirmed: dict[int, bytes] = {}
        self._slots = self.round.opened(self.inside)
        self._answers: dict[int, dict[Slot, bytes]] = {}

    def confirm(self, member: int, confirmation: Confirmation) -> None:
        """Accept a confirmation. member: the owner of the session through which it came.

        Raises SecaggError: E-RUN-50 about another set, E-RUN-51 from outside the cohort, E-ID-33 without the signature.
        """
        self.round.place(member)
        check_about(confirmation, self.round, self.hash, member)
        if not confirmed_by(self._sign_keys[member], self.hash, confirmation.signature):
            name = self.round.run.members[member]
            raise SecaggError("E-ID-33", f"the signature of {name} over the sealed set is invalid", member)
        self._confirmed[member] = confirmation.signature

    @property
    def unconfirmed(self) -> tuple[int, ...]:
        return tuple(u for u in self.round.cohort if u not in self._confirmed)

    @property
    def confirmations(self) -> tuple[tuple[int, bytes], ...]:
        """Return the confirmations so far, ascending; raises UnavailableError (E-RUN-45) while there are too few."""
        if len(self._confirmed) < self.round.t:
            raise self._too_few("confirm", self.unconfirmed)
        return tuple(sorted(self._confirmed.items()))

    def opening(self, member: int) -> Opening:
        """Create a cohort member's request for an answer; raises UnavailableError (E-RUN-45) as `confirmations`."""
        row, round, envelopes = self.round.place(member), self.round, self._envelopes
        packages = tuple((u, envelopes[u].salt.tobytes(), envelopes[u].packages[row].tobytes()) for u in self.inside)
        return Opening(round.run.run_id, round.kind, round.number, self.hash, self.confirmations, packages)

    def answer(self, member: int, shares: RevealedShares) -> None:
        """Accept an answer; a later one replaces it. member: the owner of the session through which it came.

        Raises SecaggError: E-RUN-50 about another set, E-RUN-51 from outside the cohort, E-RUN-48 on shares of other
        seeds than the set needs.
        """
        self.round.place(member)
        check_about(shares, self.round, self.hash, member)
        slots = tuple((b, u, v) for b, u, v, _ in shares.shares)
        sound = all(len(s) == SHARE and int.from_bytes(s, "little") < PRIME for *_, s in shares.shares)
        if slots != self._slots or not sound:
            name = self.round.run.members[member]
            raise SecaggError(
                "E-RUN-48",
                f"expected one share of each of {len(self._slots)} seeds from {name}, found other shares",
                member,
            )
        self._answers[member] = {(b, u, v): share for b, u, v, share in shares.shares}

    @property
    def unanswered(self) -> tuple[int, ...]:
        return tuple(u for u in self.round.cohort if u not in self._answers)

    def join(self) -> OpenedSeeds:
        """Reconstruct the seeds, also if some answers are wrong but t are correct.

        With up to 14 answers, t correct ones always suffice. Of 20 answers three may be wrong, of 50 two, of more one:
        2,000 choices of t answers are tried.
        Raises UnavailableError (E-RUN-45) with fewer than t answers; SecaggError (E-RUN-48) if no t answers give a
        committed seed (it blames the dealer once every choice was tried).
        Guarantees: every seed is compared with its commitment before one is returned.
        """
        if len(self._answers) < self.round.t:
            raise self._too_few("answer", self.unanswered)
        joiner = _Joiner(self.round, self._envelopes, self._answers)
        seeds = {slot: joiner.join(slot) for slot in self._slots}
        return OpenedSeeds(self.round.title, self.round.context, self.inside, seeds, tuple(joiner.wrong))

    def finish(self) -> OpenedSum:
        """Open the sum over the set, once; raises as `join` and as `OpenedSeeds.unmask`."""
        opened = self.join()
        if not self._sums:
            raise SecaggError("E-RUN-48", "the masked sum was already opened: add the round's updates again")
        sums, self._sums = self._sums, []
        opened.unmask(sums)
        classes = sums[CLASSES][CHECK_WORDS:] if CLASSES in opened.blocks else None
        own_seeds = opened.by_member if self.round.kind == "census" else {}
        return OpenedSum(opened.inside, sums[MODEL][CHECK_WORDS:], classes, opened.wrong, own_seeds)

    def _too_few(self, what: str, silent: Sequence[int]) -> UnavailableError:
        names = [self.round.run.members[u] for u in silent]
        answers = self.round.n - len(silent)
        return UnavailableError(
            "E-RUN-45",
            f"expected {self.round.t} of {self.round.n} hospitals to {what} the set of round {self.round.number}, "
            f"found {answers}; missing: {', '.join(names)}. Start their services; then the same set is requested "
            "again",
        )


class _Joiner:
    """Reconstructs seeds from any t answers, checks them against commitments, and remembers wrong answers."""

    def __init__(self, round: Round, envelopes: Mapping[int, _Envelope], answers: _Answers) -> None:
        self._round, self._envelopes, self._answers = round, envelopes, answers
        self._order = sorted(answers)
        self._weights: dict[tuple[int, ...], list[int]] = {}
        self.wrong: list[tuple[int, int]] = []

    def join(self, slot: Slot) -> bytes:
        block, dealer, other = slot
        bound = self._envelopes[dealer].commitments[block, self._round.place(other)].tobytes()
        seed, tried, certain, outside = b"", 0, False, set[frozenset[int]]()
        for helpers in islice(self._choices(), _TRIES):
            tried += 1
            secret = join([self._answers[w][slot] for w in helpers], self._by(helpers))
            if secret is None or packages.commitment(self._round, dealer, other, block, secret) != bound:
                continue
            seed = secret
            if tried == 1:
                return seed
            outside.add(off := self._off(slot, helpers))
            if certain := 2 * len(off) < len(self._answers) - self._round.t + 2:
                break
        if not outside:
            raise self._unjoined(dealer, tried)
        fewest = min(map(len, outside))
        likely = [off for off in outside if len(off) == fewest]
        if len(likely) == 1 and (certain or tried < _TRIES):  # otherwise several wrong shares fit each other
            self._name(likely[0], dealer)
        return seed

    def _choices(self) -> Iterator[tuple[int, ...]]:
        """Yield every choice of t answers once: the first t, then those without one of them, and so on."""
        t = self._round.t
        for last in range(t - 1, len(self._order)):
            for others in combinations(self._order[:last], t - 1):
                yield (*others, self._order[last])

    def _by(self, helpers: tuple[int, ...]) -> list[int]:
        if helpers not in self._weights:
            self._weights[helpers] = weights([w + 1 for w in helpers])
        return self._weights[helpers]

    def _off(self, slot: Slot, helpers: tuple[int, ...]) -> frozenset[int]:
        """Return the members whose shares are not on the polynomial through the helpers' shares."""
        points, shares = [w + 1 for w in helpers], [self._answers[w][slot] for w in helpers]
        others = set(self._answers) - set(helpers)
        return frozenset(
            w
            for w in others
            if combine(shares, weights(points, w + 1)) != int.from_bytes(self._answers[w][slot], "little")
        )

    def _name(self, wrong: frozenset[int], dealer: int) -> None:
        """Record the members whose shares do not fit, and try them last from now on."""
        self.wrong += [(w, dealer) for w in sorted(wrong)]
        self._order = sorted(self._order, key=lambda w: w in wrong)

    def _unjoined(self, dealer: int, tried: int) -> SecaggError:
        name, t = self._round.run.members[dealer], self._round.t
        if (spare := len(self._order) - t) == 0:
            who, blamed = f"{name} or one of {t} answers; one more answer shows which", None
        elif tried < _TRIES:
            who, blamed = (
                f"{name}, whose share does not fit any {t} of the answers, unless more than {spare} answers are false",
                dealer,
            )
        else:
            who, blamed = f"{name}, or several of the answers", None
        return SecaggError(
            "E-RUN-48", f"shares do not match the seed that the hospital committed to; responsible: {who}", blamed
        )
