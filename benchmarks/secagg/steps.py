"""The steps of a masked round in one process, and the same in clear."""

from __future__ import annotations

import secrets
import tracemalloc
from functools import partial
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from benchmarks import timing
from benchmarks.timing import Timed, Value
from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.fixed_point import FixedPointFormat
from fl_core.aggregation.fixed_point_guard import FixedPoint
from fl_core.types.secagg import Secagg
from fl_core.types.values import Part, PartSpec
from privacy.secagg import silo_side
from privacy.secagg.coordinator_side import SealedRound, UploadSum
from privacy.secagg.keys import MemberKeys, OwnKeys, RunKeys, verify_keys
from privacy.secagg.masks import add_mask
from privacy.secagg.messages import MaskedUpload, Words
from privacy.secagg.terms import MODEL, Round, SecaggRun

CLASS_WORDS = 1_000
CHUNK = 256 * 1024


class Members(NamedTuple):
    """The members of a run, whose keys are agreed on, and its first round."""

    run: SecaggRun
    keys: list[RunKeys]
    sign: tuple[bytes, ...]
    round: Round


def members(n: int, ring: str) -> Members:
    """Agree on the keys of a run; identities, which sign entries once, are left out."""
    run = SecaggRun("bench", bytes(32), tuple(f"silo{k}" for k in range(n)), 1, ring, Secagg(1, collusion=0))
    own = [OwnKeys.new() for _ in range(n)]
    entries: list[MemberKeys] = [
        o.entry(run, name, b"", lambda _: b"") for o, name in zip(own, run.members, strict=True)
    ]
    keys = [RunKeys.agree(run, e.name, o, entries, lambda *_: True) for o, e in zip(own, entries, strict=True)]
    vouched = verify_keys(run, entries, lambda *_: True)
    return Members(run, keys, vouched.sign, run.round(vouched.digest, "train", 0, bytes(32)))


def blocks(round: Round, params: int) -> tuple[Words, Words]:
    return tuple(silo_side.blank(words, round.run.dtype) for words in (params, CLASS_WORDS))  # type: ignore[return-value]


def bare_cipher(size: int) -> None:
    """Run AES-256-CTR over so many bytes, as a mask does, and add nothing."""
    stream = Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16))).encryptor()
    zeros, out = bytes(CHUNK), bytearray(CHUNK + 15)
    for start in range(0, size, CHUNK):
        stream.update_into(memoryview(zeros)[: min(CHUNK, size - start)], out)


def measure(n: int, params: int, turns: int, ring: str) -> dict[str, Value]:
    made, absent = members(n, ring), n // 10
    round = made.round
    model, classes = blocks(round, params)
    values = {"update": Part({"x": torch.randn(params)}, torch.tensor(1.0))}
    plain_grid = FixedPointFormat("ring64", n)
    sums = Aggregator({"update": PartSpec({"x": (params,)}, ())}, plain_grid)
    uploads: dict[int, MaskedUpload] = {}

    def mask() -> None:
        uploads[0] = silo_side.mask(made.keys[0], round, None, model, classes)

    ways = {
        "cipher": lambda: bare_cipher(model.nbytes),
        "one_mask": lambda: add_mask(model, bytes(32), round.context, MODEL),
        "mask_all": mask,
        "encode_plain": lambda: FixedPoint(plain_grid).outgoing(values, 0, 0),
        "add_plain": lambda: sums.add(values),
    }
    timed = timing.interleaved(ways, turns)
    opening = {f"open_{away}": open_sum(made, params, away, turns) for away in sorted({0, absent})}
    file_bytes = sum(getattr(uploads[0], name).nbytes for name in MaskedUpload.tensors(round, params, CLASS_WORDS))
    return {
        "silos": n,
        "params": params,
        "ring": ring,
        **timing.milliseconds(timed | opening),
        "mask_to_cipher": timing.ratio(timed["cipher"], timed["one_mask"])["cpu_ratio"],
        "all_to_one": round_to(timing.ratio(timed["mask_all"], timed["one_mask"])["cpu_ratio"], n),
        "upload_ratio": round_to(file_bytes, 4.0 * (params + CLASS_WORDS), 5),
        **timing.machine(),
    }


def round_to(value: object, by: float, digits: int = 3) -> float:
    assert isinstance(value, int | float)
    return round(value / by, digits)


def open_sum(made: Members, params: int, away: int, turns: int) -> Timed:
    """Time what the coordinator does once t members have answered: secrets joined, masks taken off."""
    round, present = made.round, range(made.round.n - away)
    found = Timed()
    for _ in range(turns):
        total, rows = UploadSum(round, params, CLASS_WORDS), {}
        for u in present:
            digest = secrets.token_bytes(32)
            total.add(u, digest, silo_side.mask(made.keys[u], round, None, *blocks(round, params)))
            rows[u] = silo_side.uploaded(round, digest)
        seal = total.seal(lambda _: b"")
        state, confirmed = SealedRound(total, seal, made.sign), dict[int, silo_side.MaskedTaskRow]()
        for u in range(round.t):
            signed = silo_side.confirm(
                made.run,
                made.keys[u],
                seal,
                rows.get(u),
                cohort=round.cohort,
                signed=lambda *_: True,
                store=partial(confirmed.__setitem__, u),
            )
            state.confirm(u, signed)
        for u in range(round.t):
            state.answer(
                u, silo_side.answer(made.run, made.keys[u], state.opening(u), confirmed[u], cohort=round.cohort)
            )
        found.add(state.finish)
    return found


def peak_of_masking(n: int, params: int) -> float:
    """Return the MiB that masking asks for beside the vector, which is masked in place."""
    made = members(n, "ring32")
    vector = blocks(made.round, params)
    tracemalloc.start()
    silo_side.mask(made.keys[0], made.round, None, *vector)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20
