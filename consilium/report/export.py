"""Export a model: its tensors as safetensors, and its card, signed by the lead."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from safetensors.torch import save, save_file
from torch import Tensor

from consilium.model import model_file, portable
from consilium.model.model_file import LoadedModel, ModelFileFacts
from consilium.report import documents
from consilium.report.card import Card
from consilium.report.facts import Statement, card_of, suggested_temperature, why_basic
from consilium.report.signed_card import SignedCard, file_sha256
from coordinator.lead import accuracy
from coordinator.lead.client import LeadClient
from coordinator.lead.run_detail import check_detail
from fl_core.errors import ConfigError, StateError
from fl_core.rounds.manifest import RunManifest, Weights
from fl_core.types import tensor_maps
from fl_core.types.records import FEATURES
from fl_core.types.values import State
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import read_state, read_weights
from service_core.pki.identity import certificate_fingerprint, identity_of
from service_core.storage.private_files import Credentials, write_files_together

_STATE_COPIES, _STATE_EXTRA = 16, 64 << 20
NOTHING_SAID = Statement()


def state_limit(manifest: RunManifest) -> int:
    """Return an upper limit in bytes on a server state. Some methods keep several copies of the model in it."""
    tensors = CompiledRun(manifest).network.state_dict().values()
    size = sum(int(t.numel() * t.element_size()) for t in tensors)
    return _STATE_COPIES * size + _STATE_EXTRA


def frozen_weights(manifest: RunManifest) -> Weights | None:
    """Return the weights of a frozen body, which the run's stored model lacks; None without any."""
    frozen, start = manifest.train.freeze == FEATURES, manifest.start
    return start.weights if frozen and start is not None else None


class ExportedFiles(NamedTuple):
    """The files of an export. card: as Markdown   others: the model in other formats, in the requested order."""

    model: Path
    card: Path
    others: list[Path]
    signed_card: Path
    card_page: Path


def export_model(
    detail: pb.RunDetail,
    state_file: Path,
    out: Path,
    lead: Credentials,
    said: Statement = NOTHING_SAID,
    silos: Sequence[pb.SiloInfo] = (),
    formats: Sequence[str] = (),
    weights_file: Path | None = None,
    temperature: bool = False,
) -> ExportedFiles:
    """Write a run's newest model and its card into `out`, and return the files.

    The file contains all tensors that the method needs to classify, also those of a frozen body; its metadata contain
    the options of method and model. lead: signs the card   silos: the hospitals' current declarations
    weights_file: the object that `frozen_weights` names   temperature: write a temperature, estimated from the
    hospitals' counts, into the file for `consilium predict`.
    Raises StateError (E-STATE-22) if the stored state is not the one that the run recorded; ConfigError (E-CFG-08)
    if a temperature is requested and no hospital sent counts of confidence; as `check_detail`.
    Guarantees: all files appear together, or none.
    """
    info, manifest = detail.info, check_detail(detail)
    server, run, weights = _read(detail, manifest, state_file, weights_file)
    divisor = _temperature(manifest, detail.rounds) if temperature else None
    facts = replace(_file_facts(detail, manifest), temperature=divisor)
    endings = ("safetensors", *(portable.SUFFIX[kind][1:] for kind in formats), "md", "card.json", "card.html")
    names = [f"{info.run_id}.{ending}" for ending in endings]
    model, *others, card, signed_card, card_page = names
    with write_files_together(out, f"export-{info.run_id}", signed_card) as aside:
        save_file(weights, aside / model, metadata=facts.metadata())
        for kind, name in zip(formats, others, strict=True):
            named = portable.facts(manifest, info.run_id, info.model_digest, said.licence)
            portable.write(kind, run, server, named, aside / name)
        described = card_of(detail, manifest, silos, identity_of(lead.cert_pem).identity, said, _size(weights), divisor)
        described = replace(described, files={name: file_sha256(aside / name) for name in (model, *others)})
        (aside / card).write_text(documents.front_matter(described) + documents.markdown(described), encoding="utf-8")
        signed = SignedCard.sign(replace(described, files={**described.files, card: file_sha256(aside / card)}), lead)
        verified, _ = signed.verify(certificate_fingerprint(lead.ca_pem))
        (aside / card_page).write_text(documents.page(signed, verified), encoding="utf-8")
        (aside / signed_card).write_text(signed.to_json(), encoding="utf-8")
    return ExportedFiles(out / model, out / card, [out / name for name in others], out / signed_card, out / card_page)


def unsigned_card(stored: StoredModel, lead: Credentials, silos: Sequence[pb.SiloInfo]) -> Card:
    """Return the current card of a run's newest model, without files and signature."""
    detail, manifest = stored.detail, check_detail(stored.detail)
    _, _, weights = _read(detail, manifest, stored.state, stored.weights)
    return card_of(detail, manifest, silos, identity_of(lead.cert_pem).identity, NOTHING_SAID, _size(weights))


def loaded_model(stored: StoredModel) -> LoadedModel:
    """Build a run's newest model as `consilium predict` does from the exported file; raises as `export_model`."""
    manifest = check_detail(stored.detail)
    _, _, weights = _read(stored.detail, manifest, stored.state, stored.weights)
    facts = _file_facts(stored.detail, manifest)
    return model_file.assembled(facts, weights, sha256(save(weights, facts.metadata())).hexdigest())


class StoredModel(NamedTuple):
    """A run, and the files of its newest model. weights: the object that `frozen_weights` names."""

    detail: pb.RunDetail
    state: Path
    weights: Path | None


@contextmanager
def fetched(client: LeadClient, run: str) -> Iterator[StoredModel]:
    """Fetch a run's newest model into a temporary folder, which is removed after the block.

    Raises ConfigError (E-RUN-11) on a run without a model; ProtocolError as `check_detail` and `LeadClient.fetch`.
    """
    detail = client.show(run)
    if not detail.info.model_object:
        raise ConfigError(
            "E-RUN-11",
            f"expected a run with a closed round, found {run!r} in state {detail.info.state}: wait for the first round",
        )
    manifest, body = check_detail(detail), None
    with TemporaryDirectory() as scratch:
        state = Path(scratch) / "state"
        client.fetch(detail.info.model_object, state, state_limit(manifest))
        if (weights := frozen_weights(manifest)) is not None:
            body = Path(scratch) / "weights"
            client.fetch(weights.object, body, weights.size)
        yield StoredModel(detail, state, body)


def _read(
    detail: pb.RunDetail, manifest: RunManifest, state_file: Path, weights_file: Path | None
) -> tuple[State, CompiledRun, dict[str, Tensor]]:
    """Read a stored state; return it with its run and the tensors for classification."""
    server = read_state(state_file)
    if (digest := tensor_maps.digest(server["w"])) != detail.info.model_digest:
        raise StateError(
            "E-STATE-22", f"expected the model {detail.info.model_digest[:16]}, found {digest[:16]}: fetch it again"
        )
    run = CompiledRun(manifest)
    if weights_file is not None:
        run = run.with_weights(read_weights(weights_file))
    return server, run, dict(run.exported(server))


def _file_facts(detail: pb.RunDetail, manifest: RunManifest) -> ModelFileFacts:
    facts = ModelFileFacts.of(manifest, detail.info.model_digest, detail.info.run_id)
    return replace(facts, untaught=accuracy.coverage(detail.info).untaught)


def _size(weights: Mapping[str, Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in weights.values())


def _temperature(manifest: RunManifest, rounds: Sequence[pb.RoundInfo]) -> float:
    metrics = accuracy.clinical_of(rounds[-1]) if rounds else None
    suggested = None if metrics is None else suggested_temperature(metrics)
    if suggested is None:
        raise ConfigError(
            "E-CFG-08",
            f"--temperature: the last round has no counts of confidence: {why_basic(manifest)}. A hospital that has "
            "the file can calibrate it itself: consilium calibrate",
        )
    return suggested
