"""Validates the detail of a run that the service sent, before it is used."""

from __future__ import annotations

import re

from fl_core.errors import ProtocolError
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MANIFEST_CHARS = 16 << 20
_MAX_ROUNDS = 200_000


def check_detail(detail: pb.RunDetail) -> RunManifest:
    """Return the run's manifest; raises ProtocolError (E-WIRE-06) on an invalid detail.

    Its id becomes the name of a file; its digests are fetched and go into the card.
    """
    info = detail.info
    if not _RUN_ID.fullmatch(info.run_id):
        raise _unsound("a run's id of letters, digits and hyphens", repr(info.run_id[:80]))
    if not _DIGEST.fullmatch(info.model_object):
        raise _unsound("the digest of a state", repr(info.model_object[:80]))
    if len(detail.manifest_json) > _MANIFEST_CHARS or len(detail.rounds) > _MAX_ROUNDS:
        raise _unsound("a manifest and its rounds", f"{len(detail.manifest_json)} and {len(detail.rounds)} of them")
    manifest = RunManifest.from_json(detail.manifest_json)
    if manifest.digest() != info.manifest_digest:
        raise _unsound(f"the manifest {info.manifest_digest[:16]}", manifest.digest()[:16])
    return manifest


def _unsound(expected: str, found: str) -> ProtocolError:
    return ProtocolError(
        "E-WIRE-06", f"expected {expected}, found {found}: this is not a valid answer of the coordinator"
    )
