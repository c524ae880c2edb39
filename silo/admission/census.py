"""The census of a masked run counts the hospitals that train each class. This hospital verifies the counts itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.message import DecodeError

from fl_core.aggregation.flat_blocks import WORDS
from fl_core.aggregation.masked_sum import unsigned
from fl_core.errors import ProtocolError
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.secagg import CLASSES, MASKS, MODEL
from privacy.compiled_run import CompiledRun
from privacy.secagg import silo_side
from privacy.secagg.messages import MaskedUpload, Seal
from privacy.secagg.terms import CLASSES as BLOCK_OF_CLASSES
from privacy.secagg.terms import SecaggError
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import BundleFile
from protos.wire.tasks import TaskKey, digest_of
from service_core.storage import digests
from silo.storage.store import SiloStore


def prove(
    store: SiloStore, key: TaskKey, run: CompiledRun, proof: Callable[[], Path] | None
) -> tuple[ClassCoverage, bool]:
    """Return the census of a run, and whether it is new; the caller stores a new one.

    proof: fetches the file that proves a new census; None if the coordinator sent none.

    Raises SecaggError: E-RUN-48 if the proof is missing or malformed, and as `silo_side.verify_census`.
    """
    if kept := store.secagg.coverages(key.run_id):
        return kept[key.run_id], False
    masked = store.secagg.masked_run(key.run_id)
    if proof is None:
        raise SecaggError("E-RUN-48", f"the first round of run {key.run_id} came without its census")
    row = store.secagg.row(TaskKey.census(key.run_id))
    classes = len(run.manifest.schema.classes)
    counts = silo_side.verify_census(masked.terms.run, masked.keys, classes, read_proof(proof()), row)
    coverage = run.coverage([int(n) for n in counts])
    if (start := run.manifest.start) is not None and start.run:
        coverage = coverage.after(None, trains=True)  # classes of the earlier run are not counted here
    return coverage, True


def read_proof(file: Path) -> silo_side.CensusProof:
    """Read the messages that a census was computed from; raises SecaggError (E-RUN-48) if the file is malformed."""
    try:
        message = pb.SecaggCensus.FromString(file.read_bytes())
        uploads = tuple((u.index, digest_of(u.object_digest)) for u in message.seal.updates)
        seal = Seal(
            message.seal.run_id,
            TaskKey.census(message.seal.run_id).kind.value,
            message.seal.round,
            digest_of(message.seal.base_digest),
            message.seal.keys_digest,
            uploads,
            message.seal.signature,
        )
        read: dict[int, tuple[bytes, MaskedUpload]] = {}
        with TemporaryDirectory(dir=file.parent) as folder:
            for (index, _), raw in zip(uploads, message.uploads, strict=True):
                path = Path(folder) / str(index)
                path.write_bytes(raw)
                read[index] = bytes.fromhex(digests.digest(raw)), _upload(BundleFile(path))
    except (DecodeError, ValueError, LookupError, ProtocolError) as error:
        raise SecaggError("E-RUN-48", f"the received bytes are not the messages that open a census: {error}") from error
    seeds = {seed.member: seed.seed for seed in message.seeds if seed.block == BLOCK_OF_CLASSES}
    return silo_side.CensusProof(seal, {c.index: c.signature for c in message.confirmations}, read, seeds)


def _upload(update: BundleFile) -> MaskedUpload:
    extra = update[MASKS].total
    blocks = (unsigned(update[block].total[WORDS]) for block in (MODEL, CLASSES))
    return MaskedUpload(*(extra[name].numpy() for name in ("salt", "commitments", "packages")), *blocks)
