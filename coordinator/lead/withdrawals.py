"""Withdrawals for a lead, as text and as JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping

from protos.consilium.v1 import federation_pb2 as pb

COPIES = "The coordinator cannot delete exported or copied models: ask their owners."


def withdrawal_json(withdrawal: pb.Withdrawal) -> Mapping[str, object]:
    """Convert the withdrawal of a hospital's updates from one run."""
    return {
        "silo": withdrawal.silo,
        "run": withdrawal.run_id,
        "at": withdrawal.at_unix or None,
        "updates": [{"run": g.run_id, "round": g.round + 1} for g in withdrawal.given],
        "exact": bool(withdrawal.by) or not withdrawal.reason,
        "taken_out_by": withdrawal.by or None,
        "taken_out": withdrawal.by_state == "finished",
        "state": withdrawal.by_state or None,
        "reason": withdrawal.reason or None,
        "left": list(withdrawal.left),
        "read_by": list(withdrawal.fetched),
        "statement": withdrawal.statement or None,
        "signature": base64.b64encode(withdrawal.signature).decode() or None,
        "certificate": withdrawal.certificate.decode("ascii", "replace") or None,
    }


def withdrawal_lines(withdrawal: pb.Withdrawal, anew: str) -> Iterable[str]:
    """Describe a withdrawal for people. anew: the command that trains the run without the hospital, if there is one."""
    rounds: dict[str, list[str]] = {}
    for update in withdrawal.given:
        rounds.setdefault(update.run_id, []).append(str(update.round + 1))
    listed = "; ".join(f"{run} in round {', '.join(of)}" for run, of in rounds.items()) or "none yet"
    yield f"{withdrawal.run_id} ({withdrawal.run_state}): updates of {withdrawal.silo}: {listed}"
    yield f"  {outcome(withdrawal)}"
    if withdrawal.reason and withdrawal.left:
        words = f"its configuration, with silos=[{','.join(withdrawal.left)}]"
        yield f"  to train it again: {anew or words}"
    yield f"  its model was read by: {'; '.join(withdrawal.fetched)}. {COPIES}" if withdrawal.fetched else f"  {COPIES}"


def outcome(withdrawal: pb.Withdrawal) -> str:
    """Describe whether a hospital's updates are out of a model."""
    if withdrawal.reason:
        gone = (
            ""
            if withdrawal.run_state in ("finished", "aborted")
            else f"; abort it, or exclude {withdrawal.silo} from it"
        )
        return f"cannot be taken out: {withdrawal.reason}. No run may continue from this model{gone}"
    if not withdrawal.by:
        return "can be taken out exactly: the hospital will be asked for its sums again"
    if withdrawal.by_state == "finished":
        return f"taken out exactly by {withdrawal.by}, whose model is that of a run which never had {withdrawal.silo}"
    halted = withdrawal.by_state in ("paused", "failed")
    again = f"; resume it, or abort it and run coordinator withdraw {withdrawal.silo} again" if halted else ""
    by = f"{withdrawal.by} ({withdrawal.by_state})"
    return f"being taken out by {by}: this model contains them until it finishes{again}"
