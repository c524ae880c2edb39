"""What a lead reads of withdrawals, as text and as JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping

from protos.consilium.v1 import federation_pb2 as pb

COPIES = "What was exported or copied is outside of the coordinator's hands: ask those who have it."


def withdrawal_json(found: pb.Withdrawal) -> Mapping[str, object]:
    """Write what became of a hospital's updates in one run."""
    return {
        "silo": found.silo,
        "run": found.run_id,
        "at": found.at_unix or None,
        "updates": [{"run": g.run_id, "round": g.round + 1} for g in found.given],
        "exact": bool(found.by) or not found.reason,
        "taken_out_by": found.by or None,
        "taken_out": found.by_state == "finished",
        "state": found.by_state or None,
        "reason": found.reason or None,
        "left": list(found.left),
        "read_by": list(found.fetched),
        "statement": found.statement or None,
        "signature": base64.b64encode(found.signature).decode() or None,
        "certificate": found.certificate.decode("ascii", "replace") or None,
    }


def withdrawal_lines(found: pb.Withdrawal, anew: str) -> Iterable[str]:
    """Say it for people. anew: the command that trains the run anew without the hospital, if there is one."""
    rounds: dict[str, list[str]] = {}
    for given in found.given:
        rounds.setdefault(given.run_id, []).append(str(given.round + 1))
    listed = "; ".join(f"{run} in round {', '.join(of)}" for run, of in rounds.items()) or "none yet"
    yield f"{found.run_id} ({found.run_state}): updates of {found.silo}: {listed}"
    yield f"  {outcome(found)}"
    if found.reason and found.left:
        words = f"its configuration, with silos=[{','.join(found.left)}]"
        yield f"  to train it anew: {anew or words}"
    yield f"  its model was read by: {'; '.join(found.fetched)}. {COPIES}" if found.fetched else f"  {COPIES}"


def outcome(found: pb.Withdrawal) -> str:
    """Say whether a hospital's updates are out of a model."""
    if found.reason:
        gone = "" if found.run_state in ("finished", "aborted") else f"; abort it, or exclude {found.silo} from it"
        return f"cannot be taken out: {found.reason}. Nobody goes on from this model{gone}"
    if not found.by:
        return "can be taken out exactly: the hospital is asked for its sums once more"
    if found.by_state == "finished":
        return f"taken out exactly by {found.by}, whose model is that of a run which never had {found.silo}"
    halted = found.by_state in ("paused", "failed")
    again = f"; resume it, or abort it and say coordinator withdraw {found.silo} again" if halted else ""
    return f"being taken out by {found.by} ({found.by_state}): this model has them until that has finished{again}"
