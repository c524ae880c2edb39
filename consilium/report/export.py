"""Export of a model: the tensors as safetensors, and the card of the model, signed by the lead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file

from consilium.model import portable
from consilium.model.model_file import ModelFileFacts
from consilium.report import documents
from consilium.report.facts import Statement, card_of, suggested_temperature, why_basic
from consilium.report.signed_card import SignedCard, file_sha256
from coordinator.lead import accuracy
from coordinator.lead.run_detail import check_detail
from fl_core.errors import ConfigError, StateError
from fl_core.rounds.manifest import RunManifest, Weights
from fl_core.types import tensor_maps
from fl_core.types.records import FEATURES
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import read_state, read_weights
from service_core.pki.identity import certificate_fingerprint, identity_of
from service_core.storage.private_files import Credentials, write_files_together

_STATE_COPIES, _STATE_EXTRA = 16, 64 << 20
NOTHING_SAID = Statement()


def state_limit(manifest: RunManifest) -> int:
    """Return more bytes than any method's server state has: some of them keep several copies of the model."""
    tensors = CompiledRun(manifest).network.state_dict().values()
    size = sum(int(t.numel() * t.element_size()) for t in tensors)
    return _STATE_COPIES * size + _STATE_EXTRA


def frozen_weights(manifest: RunManifest) -> Weights | None:
    """Name the weights of a body that the run never sent, and so did not store with its model; None without any."""
    frozen, start = manifest.train.freeze == FEATURES, manifest.start
    return start.weights if frozen and start is not None else None


class ExportedFiles(NamedTuple):
    """The files of an export. card: as Markdown   others: the model in other formats, in the order asked for."""

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

    The tensors are all that the method needs to classify, and the metadata names its options and the model's: a whole
    model also where the run trained a part of it. lead: signs the card   silos: what hospitals declare at this moment
    weights_file: the object that `frozen_weights` names   temperature: write the one that hospitals' counts suggest
    into the file, for `consilium predict` to use.
    Raises StateError (E-STATE-22) when the stored state is not the one that the run recorded; ConfigError (E-CFG-08)
    where a temperature is asked for and no hospital sent counts of confidence; as `check_detail`.
    Guarantees: the files appear together, or none does.
    """
    info, manifest = detail.info, check_detail(detail)
    server = read_state(state_file)
    if (digest := tensor_maps.digest(server["w"])) != info.model_digest:
        raise StateError(
            "E-STATE-22", f"expected the model {info.model_digest[:16]}, found {digest[:16]}: fetch it again"
        )
    run = CompiledRun(manifest)
    if weights_file is not None:
        run = run.with_weights(read_weights(weights_file))
    weights = dict(run.exported(server))
    divisor = _temperature(manifest, detail.rounds) if temperature else None
    facts = ModelFileFacts.of(manifest, info.model_digest, info.run_id)
    facts = replace(facts, untaught=accuracy.coverage(info).untaught, temperature=divisor)
    endings = ("safetensors", *(portable.SUFFIX[kind][1:] for kind in formats), "md", "card.json", "card.html")
    names = [f"{info.run_id}.{ending}" for ending in endings]
    model, *others, card, signed_card, card_page = names
    with write_files_together(out, f"export-{info.run_id}", signed_card) as aside:
        save_file(weights, aside / model, metadata=facts.metadata())
        for kind, name in zip(formats, others, strict=True):
            named = portable.facts(manifest, info.run_id, info.model_digest, said.licence)
            portable.write(kind, run, server, named, aside / name)
        parameters = sum(math.prod(tensor.shape) for tensor in weights.values())
        described = card_of(detail, manifest, silos, identity_of(lead.cert_pem).identity, said, parameters, divisor)
        described = replace(described, files={name: file_sha256(aside / name) for name in (model, *others)})
        (aside / card).write_text(documents.markdown(described), encoding="utf-8")
        signed = SignedCard.sign(replace(described, files={**described.files, card: file_sha256(aside / card)}), lead)
        verified, _ = signed.verify(certificate_fingerprint(lead.ca_pem))
        (aside / card_page).write_text(documents.page(signed, verified), encoding="utf-8")
        (aside / signed_card).write_text(signed.to_json(), encoding="utf-8")
    return ExportedFiles(out / model, out / card, [out / name for name in others], out / signed_card, out / card_page)


def _temperature(manifest: RunManifest, rounds: Sequence[pb.RoundInfo]) -> float:
    metrics = accuracy.clinical_of(rounds[-1]) if rounds else None
    suggested = None if metrics is None else suggested_temperature(metrics)
    if suggested is None:
        raise ConfigError(
            "E-CFG-08",
            "--temperature: expected counts of confidence in the last round, found none: "
            f"{why_basic(manifest)}. A hospital that has the file can make its own: consilium calibrate",
        )
    return suggested
