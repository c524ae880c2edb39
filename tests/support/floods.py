"""A coordinator that asks a hospital without end, over the wire, and what that leaves in the hospital's home.

python -m tests.support.floods [N]            N preflights of each kind, as fast as they go (10,000)
python -m tests.support.floods --patient N    the same by a liar who waits long enough for each to be looked at
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from fl_core.methods import build_method
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from silo.storage.store import Store
from tests.support import until
from tests.support.fake_coordinator import Hospital
from tests.support.privacy import SEEDED_POLICY, budgeted, private

BY_HAND = SEEDED_POLICY + '[runs]\napprove = "by hand"\n'
SESSION, PATIENT = 4000, 500
"""Messages of one session: more are read at a pace, which a liar evades by another session; and of a patient liar."""
REAL = "the-real-one"


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked, of a hospital with what policy and budget, and the codes that are answered.

    merged: a later question takes the place of an earlier one that waits, so only the last is answered for certain.
    """

    run: Callable[[int], RunManifest | None]
    codes: frozenset[str]
    policy: str = SEEDED_POLICY
    budget: float = 1000.0
    ids: Callable[[int], str] = "run-{}".format
    merged: bool = False


def named(number: int, **terms: object) -> RunManifest:
    return replace(private(**terms), name=f"run {number}")


KINDS: Mapping[str, Kind] = {
    "refused by the policy": Kind(lambda n: named(n, epsilon=9.0), frozenset({"E-POLICY-05"})),
    "refused by the budget": Kind(named, frozenset({"E-BUDGET-01"}), budget=0.5),
    "ready": Kind(named, frozenset({""})),
    "asked by hand": Kind(named, frozenset({"E-WIRE-17"}), policy=BY_HAND),
    "of one run under other manifests": Kind(named, frozenset({"", "E-RUN-33"}), ids=lambda _: "run-1", merged=True),
    "of no manifest": Kind(lambda _: None, frozenset({"E-WIRE-06"})),
}


@dataclass(frozen=True, slots=True)
class Left:
    """What a flood left: bytes of the home's growth, by file; answers by code; rows and events that were added."""

    bytes: int
    largest: str
    answers: Counter[str]
    runs: int
    waiting: int
    events: int
    seconds: float
    sessions: int


class Flooded:
    """A hospital that one real question waits at, or that takes part in a real run, while others pour in."""

    def __init__(self, folder: Path, kind: Kind, patient: bool = False) -> None:
        self.kind, self._session = kind, PATIENT if patient else SESSION
        hour = count(0.0, 3600.0)
        clock: Callable[[], float] = (lambda: next(hour)) if patient else time.monotonic
        self.ledger = budgeted(folder, kind.budget, kind.budget, kind.policy)
        self.hospital = Hospital(folder, replace(private(), name="real"), clock=clock)
        self.hospital.run_id = REAL
        self.hospital.start()
        assert self.hospital.service is not None
        self.store: Store = self.hospital.service.store

    def answers(self) -> list[pb.PreflightAnswer]:
        return [a for s in self.hospital.control.sessions for a in s.got("preflight")]

    def ask(self, run_id: str, digest: str) -> None:
        self.hospital.control.last.send(preflight=pb.Preflight(run_id=run_id, manifest_digest=digest))

    def ask_real(self) -> None:
        """Ask about the real run; where a person decides, wait until it waits."""
        self.ask(REAL, self.hospital.digest)
        if self.kind.policy == BY_HAND:
            until(lambda: self.store.approvals.waits(REAL), seconds=60)
        else:
            until(lambda: any(a.run_id == REAL for a in self.answers()), seconds=60)

    def pour(self, number: int, first: int = 0) -> Left:
        """Ask `number` times, wait until all is answered that is going to be, and measure what is left."""
        before, seen, began = self._files(), len(self.answers()), time.monotonic()
        events = len(self.ledger.events())
        waiting = len(self._waiting())
        for k in range(first, first + number):
            run = self.kind.run(k)
            digest = "no digest" if run is None else self.hospital.transfer.offer(run.to_json().encode())
            self.ask(self.kind.ids(k), digest)
            if k % self._session == self._session - 1 or k == first + number - 1:
                wanted = 1 if self.kind.merged else k - first + 1
                self._wait(seen, wanted + waiting, digest, 60 + number / 2)
                self._another_session()
        took = time.monotonic() - began
        until(self._at_rest, seconds=60)
        after = self._files()
        growth = Counter({name: size - before.get(name, 0) for name, size in after.items()})
        found = Counter(a.code for a in self.answers()[seen:])
        largest = ", ".join(f"{name} {size:,}" for name, size in growth.most_common(2))
        return Left(
            sum(growth.values()),
            largest,
            found,
            len(self.store.history()),
            len(self._waiting()),
            len(self.ledger.events()) - events,
            took,
            len(self.hospital.control.sessions),
        )

    def _wait(self, seen: int, answers: int, last: str, seconds: float) -> None:
        """Wait until so many were answered or wait for a person, and the last one is among them."""

        def told() -> bool:
            heard = [*self.answers()[seen:], *self.store.approvals.all()]
            return len(self.answers()) - seen + len(self._waiting()) >= answers and last in {
                a.manifest_digest for a in heard
            }

        until(told, f"{answers} answers", seconds)

    def _another_session(self) -> None:
        known = len(self.hospital.control.sessions)
        self.hospital.control.last.end()
        until(lambda: len(self.hospital.control.sessions) > known, seconds=60)

    def _waiting(self) -> list[str]:
        return [a.run_id for a in self.store.approvals.all() if a.decided is None]

    def _at_rest(self) -> bool:
        assert self.hospital.service is not None
        return self.hospital.service.pulse().activity in (pb.IDLE, pb.AWAITING_APPROVAL)

    def _files(self) -> dict[str, int]:
        folder = self.hospital.folder
        return {str(f.relative_to(folder)): f.stat().st_size for f in folder.rglob("*") if f.is_file()}

    def do_real(self) -> None:
        """Approve the real question, which is on top, where a person decides; then do the run's first round."""
        if self.kind.policy == BY_HAND:
            top = self.store.approvals.all()[0]
            assert (top.run_id, top.name) == (REAL, "real")
            self.store.approvals.decide(REAL, True)
            until(lambda: any(a.run_id == REAL and a.ready for a in self.answers()), seconds=60)
        method = build_method("fedavg", {})
        offer = self.hospital.offer_of(state=method.broadcast(self.hospital.server))
        self.hospital.control.greet = lambda session: session.send(offer=offer)  # a session that was lost meanwhile
        self.hospital.control.last.send(offer=offer)
        self.hospital.sent()


@contextmanager
def flooded(folder: Path, kind: str, patient: bool = False) -> Iterator[Flooded]:
    made = Flooded(folder, KINDS[kind], patient)
    try:
        yield made
    finally:
        made.hospital.stop()
        made.hospital.host.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, nargs="?", default=10_000)
    parser.add_argument("--patient", action="store_true")
    parser.add_argument("--kind", choices=KINDS)
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    for kind in [given.kind] if given.kind else KINDS:
        with tempfile.TemporaryDirectory() as folder, flooded(Path(folder) / "home", kind, given.patient) as made:
            able = made.kind.budget > 1
            if able:
                made.ask_real()
            left = made.pour(given.number)
            if able:
                made.do_real()
        heard = ", ".join(f"{n} {code or 'ready'}" for code, n in left.answers.most_common())
        print(
            f"{kind}: {given.number} in {left.seconds:.0f} s over {left.sessions} sessions; answered {heard}; home "
            f"+{left.bytes:,} bytes ({left.largest}); ledger +{left.events} events; {left.runs} runs, {left.waiting} "
            f"questions{'; the real run was done' if able else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main()
