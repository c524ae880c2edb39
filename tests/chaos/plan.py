"""What is run and what happens to it, all of it drawn from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SILOS = ("hospital0", "hospital1", "hospital2")
COORDINATOR = "coordinator"
FEDERATION, DATA = "p3c5", "digits"
ROUNDS = 8
FAULTS_PER_RUN = 8
_COMMON = (
    f"data={DATA}",
    f"federation={FEDERATION}",
    f"rounds={ROUNDS}",
    f"quorum={len(SILOS)}",
)  # of everybody: the sum is that of all
_RUNS = (
    ("fedavg", ("method=fedavg", "model=digits_cnn", "train.epochs=4", "secagg=off")),
    ("fedmr", ("method=fedmr", "model=digits_cnn", "train.epochs=4")),
    (
        "dp_record",
        (
            "method=fedavg",
            "model=digits_mlp",
            "train.epochs=1",
            "privacy=dp_record",
            "privacy.rng=test",
            "privacy.epsilon=8",
            "privacy.reserve_rounds=9",
        ),
    ),
    ("scaffold", ("method=scaffold", "model=digits_cnn", "train.epochs=4")),
)
"""All but the first have masks, which three hospitals have where no word says otherwise."""
RESTORES = ("restore", "half restore")
"""Of a run without masks and noise: a masked one ends at a restore, and a private round that is repeated is charged."""
PROCESS_FAULTS = ("kill", "stop", "full disk", "clock", "renewal", *RESTORES)
LINE_FAULTS = ("cut", "truncate", "flip", "delay", "throttle", "black hole")
CHARGING = ("kill", "full disk", "clock", "renewal")
"""May interrupt a private round between reservation and result, which charges it again."""
_REPEATS = 2
"""A ledger charges one round at most three times."""
LATENCY_S, THROTTLED_BYTES_S = 0.2, 125_000.0
_HOURS = (-72.0, -1.0, 1.0, 72.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """Done to a process, or to the line between a hospital and the coordinator.

    round, after: when so many rounds are closed, so many seconds later   seconds: how long it lasts; until the next
    start of a killed process   bytes: what still passes before a cut, a flipped byte; on a full disk the largest file
    upward: which direction of the line   hours: by which the clock is wrong
    A renewal is a start with a certificate that is due. A restore is of a backup that was taken so many seconds before;
    a half one is killed when it has begun, and said again.
    """

    round: int
    after: float
    kind: str
    target: str
    seconds: float = 0.0
    bytes: int = 0
    upward: bool = True
    hours: float = 0.0

    def __str__(self) -> str:
        facts = [f"{self.seconds:.1f} s"] if self.seconds else []
        if self.kind in ("truncate", "flip"):
            facts.append(f"after {self.bytes} bytes {'up' if self.upward else 'down'}")
        if self.kind == "full disk":
            facts.append(f"files of at most {self.bytes} bytes")
        if self.hours:
            facts.append(f"{self.hours:+.0f} h")
        return f"{self.kind} {self.target}" + (f" ({', '.join(facts)})" if facts else "")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run and its faults, in order."""

    number: int
    name: str
    overrides: tuple[str, ...]
    faults: tuple[Fault, ...] = field(default=())

    @property
    def private(self) -> bool:
        return self.name == "dp_record"


def draw(seed: int, number: int) -> RunPlan:
    """Draw a run of a seed; the same for the same two numbers."""
    source = random.Random(f"{seed}/{number}")
    name, overrides = _RUNS[number % len(_RUNS)]
    found: list[Fault] = []
    for round in sorted(source.randrange(ROUNDS) for _ in range(FAULTS_PER_RUN)):
        fault = _fault(source, round)
        while not _fits(fault, name, found):
            fault = _fault(source, round)
        found.append(fault)
    return RunPlan(number, name, (*overrides, *_COMMON, f"seed={source.randrange(1000)}"), tuple(found))


def _fits(fault: Fault, name: str, before: list[Fault]) -> bool:
    if fault.kind in RESTORES:
        return name == _RUNS[0][0]
    return name != "dp_record" or not _charges(fault) or sum(map(_charges, before)) < _REPEATS


def _charges(fault: Fault) -> bool:
    return fault.kind in CHARGING and fault.target != COORDINATOR


def _fault(source: random.Random, round: int) -> Fault:
    kind = source.choice((*PROCESS_FAULTS, *LINE_FAULTS))
    after = source.uniform(0.0, 1.0)
    target = source.choice(SILOS if kind in (*LINE_FAULTS, "renewal") else (COORDINATOR, *SILOS))
    match kind:
        case "truncate" | "flip":
            return Fault(
                round, after, kind, target, bytes=int(10 ** source.uniform(0, 4.5)), upward=source.random() < 0.5
            )
        case "full disk":
            room = source.choice((0, 4096, 65536))
            return Fault(round, after, kind, target, source.uniform(0.5, 4.0), bytes=room)
        case "clock":
            return Fault(round, after, kind, target, source.uniform(2.0, 5.0), hours=source.choice(_HOURS))
        case "cut" | "renewal":
            return Fault(round, after, kind, target)
        case _:
            return Fault(round, after, kind, target, source.uniform(0.5, 4.0))
