"""Export of a finished model: the tensors as safetensors and a model card that says where they come from."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from safetensors.torch import save_file

from consilium.model import conformal, portable
from consilium.model.model_file import ModelFacts
from consilium.report.board_card import share_of, training_text
from consilium.report.signed_card import file_sha256
from coordinator.lead import accuracy
from coordinator.lead.tables import aggregator_text, private_form, software_text, started_from
from coordinator.lead.withdrawals import card_lines
from fl_core.datasets.preprocessing import Preprocessing
from fl_core.errors import ConfigError, ProtocolError, StateError
from fl_core.methods.fedavg import Traits
from fl_core.rounds.manifest import Member, RunManifest, Weights
from fl_core.types import tensor_maps
from fl_core.types.clinical import CLINICAL, ClinicalMetrics
from fl_core.types.records import FEATURES, judgements
from privacy import profiles
from privacy.accounting import uncertainty
from privacy.accounting.uncertainty import NOTHING, Estimate, EvaluationNoise
from privacy.compiled_run import CompiledRun
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import read_state, read_weights
from service_core import clinical_report
from service_core.console import printable
from service_core.storage.private_files import written_together

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MANIFEST_CHARS = 16 << 20
_MAX_ROUNDS = 200_000
_EXPLAINED = 0.1
"""Of an expected calibration error, above which the card says what it means."""
_STATE_COPIES, _STATE_EXTRA = 16, 64 << 20


def check_detail(detail: pb.RunDetail) -> RunManifest:
    """Return the run's manifest; raises ProtocolError (E-WIRE-06) on a detail that no sound service sends.

    Its id becomes the name of a file, and its digests what is fetched and what the card claims.
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
    return ProtocolError("E-WIRE-06", f"expected {expected}, found {found}: this is no answer of our service")


def state_limit(manifest: RunManifest) -> int:
    """Return more bytes than any method's server state has: some of them keep several copies of the model."""
    tensors = CompiledRun(manifest).network.state_dict().values()
    size = sum(int(t.numel() * t.element_size()) for t in tensors)
    return _STATE_COPIES * size + _STATE_EXTRA


def frozen_weights(manifest: RunManifest) -> Weights | None:
    """Name the weights of a body that the run never sent, and so did not store with its model; None without any."""
    frozen, start = manifest.train.freeze == FEATURES, manifest.start
    return start.weights if frozen and start is not None else None


def export_model(
    detail: pb.RunDetail,
    state_file: Path,
    out: Path,
    formats: Sequence[str] = (),
    licence: str = "",
    weights_file: Path | None = None,
    intended_use: str = "",
    temperature: bool = False,
) -> tuple[Path, Path, list[Path]]:
    """Write `<out>/<run>.safetensors`, the card `<out>/<run>.md` and a file for each other format; return the paths.

    The tensors are all that the method needs to classify, and the metadata names its options and the model's: a whole
    model also where the run trained a part of it. weights_file: the object that `frozen_weights` names. licence,
    intended_use: as the lead states them. temperature: write the one that hospitals' counts suggest into the file, for
    `consilium predict` to use.
    Raises StateError (E-STATE-22) when the stored state is not the one that the run recorded; ConfigError (E-CFG-08)
    where a temperature is asked for and no hospital sent counts of confidence; as `check_detail`.
    """
    info, manifest = detail.info, check_detail(detail)
    server = read_state(state_file)
    if (found := tensor_maps.digest(server["w"])) != info.model_digest:
        raise StateError(
            "E-STATE-22", f"expected the model {info.model_digest[:16]}, found {found[:16]}: fetch it again"
        )
    run = CompiledRun(manifest)
    if weights_file is not None:
        run = run.with_weights(read_weights(weights_file))
    weights = dict(run.exported(server))
    facts = replace(ModelFacts.of(manifest, info.model_digest, info.run_id), untaught=accuracy.coverage(info).untaught)
    if temperature:
        facts = replace(facts, temperature=_suggested(manifest, detail.rounds))
    tensors, card = f"{info.run_id}.safetensors", f"{info.run_id}.md"
    others = {kind: f"{info.run_id}{portable.SUFFIX[kind]}" for kind in formats}
    with written_together(out, f"export-{info.run_id}", card) as aside:
        save_file(weights, aside / tensors, metadata=facts.metadata())
        sha256 = file_sha256(aside / tensors)
        text = model_card(info, manifest, detail.rounds, software_text(detail.software), intended_use, licence, sha256)
        if facts.temperature is not None:
            text += (
                f"\n`consilium predict` divides logits by the temperature {facts.temperature:.4g}, which the file "
                "holds.\n"
            )
        text += "\n".join(map(_inert, card_lines(detail.withdrawals, info.run_id)))
        for kind, name in others.items():
            said = portable.facts(manifest, info.run_id, info.model_digest, licence)
            portable.write(kind, run, server, said, aside / name)
            text += "\n".join(map(printable, portable.lines(kind, name, manifest)))
        (aside / card).write_text(text)
    return out / tensors, out / card, [out / name for name in others.values()]


def _suggested(manifest: RunManifest, rounds: Sequence[pb.RoundInfo]) -> float:
    found = accuracy.clinical_of(rounds[-1]) if rounds else None
    suggested = None if found is None else conformal.estimate_temperature(found.bins, found.alternatives)
    if suggested is None:
        raise ConfigError(
            "E-CFG-08",
            "--temperature: expected counts of confidence in the last round, found none: "
            f"{_why_basic(manifest)} A hospital that has the file can make its own: consilium calibrate",
        )
    return suggested


def model_card(
    info: pb.RunInfo,
    manifest: RunManifest,
    rounds: Sequence[pb.RoundInfo],
    software: str = "",
    intended_use: str = "",
    licence: str = "",
    sha256: str = "",
) -> str:
    """Write the card. sha256: of the model's file, which `consilium predict` holds the file against."""
    trained = [r for r in rounds if r.kind == pb.TRAIN]
    run = CompiledRun(manifest)
    method = run.method
    asks = not isinstance(method, Traits) or "prototypes" in method.sends
    took_part = Counter(name for r in trained for name in r.included)
    last = rounds[-1] if rounds else pb.RoundInfo()
    noisy = profiles.result_noise(manifest)
    noise, told = noisy.of(last.included), any(member.labels for member in manifest.members)
    best = (
        accuracy.best(info)
        if noise is None
        else accuracy.best_of([(r.correct, r.examples, noisy.of(r.included)) for r in rounds])
    )
    facts = [
        ("intended use", intended_use or "not stated"),
        ("licence", licence or "not stated: this card grants nothing"),
        ("method", f"{manifest.method.name} {_options(manifest.method.options)}"),
        ("private form", private_form(manifest.to_json())),
        ("start", started_from(manifest.to_json())),
        ("model", f"{manifest.model.name} {_options(manifest.model.options)}"),
        ("trained", f"projection and head, on {_body(manifest)}" if run.frozen else ""),
        ("data", f"{manifest.data}, examples of shape {tuple(manifest.schema.shape)}"),
        ("preprocessing", Preprocessing(manifest.data, manifest.schema).sentence()),
        ("local training", training_text(run)),
        ("seed", str(manifest.seed)),
        ("configuration digest", f"`{info.manifest_digest}`"),
        ("model digest", f"`{info.model_digest}`"),
        ("file", f"`{info.run_id}.safetensors`, SHA-256 `{sha256}`" if sha256 else ""),
        ("software", software or manifest.software),
        ("privacy", _privacy(manifest)),
        ("aggregation grid", f"{manifest.grid.ring}; values clipped over the run: {sum(r.clipped for r in rounds)}"),
        ("aggregation", aggregator_text(run.aggregator.name, judgements(rounds))),
        ("traffic", f"{info.bytes_up} bytes up, {info.bytes_down} bytes down"),
    ]
    lines = [
        f"# {info.name} ({info.run_id})",
        "",
        f"Exported {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. State of the run: {info.state}, "
        f"{len(trained)} of {info.rounds} rounds.",
        "",
        *_table(("", ""), [(name, text) for name, text in facts if text]),
        "",
        "## Accuracy on the union of the hospitals' test sets",
        "",
        f"Global: {_with_luck(last, noise)} (best over rounds: {_share(best)}; the best is a selection on test data).",
        "",
        *(f"{line}  " for line in accuracy.coverage(info).lines()),
        "",
        *_by_class(manifest, last, noise),
        "",
        *_clinical(manifest, last),
        "## Who took part",
        "",
        *_table(
            ("hospital", "rounds", "submits prototypes", "missed rounds", *["label dictionary"] * told),
            [
                (
                    m.name,
                    str(took_part[m.name]),
                    "-" if not asks else "yes" if m.prototypes else "no",
                    ", ".join(f"{r.round + 1} ({r.missing[m.name]})" for r in trained if m.name in r.missing) or "-",
                    *[_dictionary(m)] * told,
                )
                for m in manifest.members
            ],
        ),
        *(_DICTIONARIES if told else ()),
        "",
    ]
    return "\n".join(map(_inert, lines))


def _inert(line: str) -> str:
    """Write a line of Markdown in which nobody's name or reason becomes HTML, a link or a picture."""
    return printable(line).replace("<", "&lt;").replace("[", "&#91;")


def _body(manifest: RunManifest) -> str:
    weights = frozen_weights(manifest)
    return f"a frozen body of {weights}" if weights else "a frozen body of random weights, drawn from the seed"


_DICTIONARIES = (
    "",
    "A label dictionary is a hospital's own table from its names and codes to the classes. Its digest is in the run's "
    "manifest; the table stays there, and who is shown it can compute the digest again (`silo data check`).",
)


def _dictionary(member: Member) -> str:
    if not member.labels:
        return "none told"
    return f"`{member.labels}`{', with coarse labels' if member.coarse else ''}"


def _options(options: object) -> str:
    return json.dumps(options, sort_keys=True) if options else ""


def _privacy(manifest: RunManifest) -> str:
    if manifest.privacy.name == "none":
        if manifest.secagg is not None:
            return "none: updates were sent without noise, under masks; the coordinator read sums over hospitals"
        return "none: updates were sent without noise or mask; the coordinator could read each one"
    return f"{manifest.privacy.name} {_options(manifest.privacy.options)}"


def _by_class(manifest: RunManifest, last: pb.RoundInfo, noise: EvaluationNoise | None) -> list[str]:
    """Return the table by class; of noisy sums without counts, and with a line on the noise."""
    estimates = uncertainty.by_class(last.correct, last.examples, noise)
    found = zip(manifest.schema.classes, last.examples, estimates, strict=False)
    if noise is None:
        shares = [share_of(right, of) for right, of in zip(last.correct, last.examples, strict=False)]
        rows = [
            (name, f"{n:.0f}", share.text() if e.exact else _share(e))
            for (name, n, e), share in zip(found, shares, strict=False)
        ]
        note = "Intervals are exact, at 95 %, for independent examples: several of one patient make them too narrow."
        return [*_table(("class", "test examples", "accuracy"), rows), "", note]
    return [
        *_table(("class", "accuracy"), [(name, _share(e)) for name, _, e in found]),
        "",
        "These numbers were measured under differential privacy: the intervals are those of its noise, at 95 %, and "
        "say nothing of how large the test sets are.",
    ]


def _clinical(manifest: RunManifest, last: pb.RoundInfo) -> list[str]:
    """Return the section on the last model's errors, or why there is none."""
    found, classes = accuracy.clinical_of(last), manifest.schema.classes
    if found is None:
        above = "" if manifest.schema.multi_label else "Sensitivity is a class's accuracy above. "
        return [above + _why_basic(manifest), ""]
    shown, confidence = "Confusion matrix (rows: diagnosis; columns: what the model says)", "the largest probability"
    if found.labels:
        shown, confidence = "Test examples by label and answer", "the probability of an answer about a label"
    return [
        "## Sensitivity, specificity, AUC and calibration",
        "",
        f"Taken together {clinical_report.sentence(found, sum(last.examples))}. AUC is {_against(found)}.",
        "",
        *_calibration(found),
        *_table(clinical_report.class_head(found), clinical_report.class_rows(found, classes)),
        "",
        f"{shown}:",
        "",
        *_table(clinical_report.confusion_head(found, classes), clinical_report.confusion_rows(found, classes)),
        "",
        f"Reliability (confidence: {confidence}):",
        "",
        *_table(("confidence", "test examples", "mean confidence", "right"), clinical_report.reliability_rows(found)),
        "",
    ]


def _against(found: ClinicalMetrics) -> str:
    return "where a label was found against where it was not" if found.labels else "one class against the rest"


def _calibration(found: ClinicalMetrics) -> list[str]:
    """Explain an expected calibration error that looks like a model that is mostly wrong."""
    error, n = found.calibration_error, sum(b.examples for b in found.bins)
    suggested = conformal.estimate_temperature(found.bins, found.alternatives)
    if error is None or error <= _EXPLAINED or suggested is None:
        return []
    right, sure = (sum(getattr(b, name) for b in found.bins) / n for name in ("correct", "confidence"))
    return [
        f"An expected calibration error of {100 * error:.0f} % does not say that so many answers are wrong: "
        f"{100 * right:.0f} % are right, at a mean confidence of {100 * sure:.0f} %. It says that the logits are on "
        f"another scale than probabilities need. Divided by a temperature of about {suggested:.2g}, estimated from the "
        "counts below, the answers stay as they are and their probabilities come closer to how often they are right: "
        "`coordinator export --temperature`; with images of its own a hospital does better: `consilium calibrate`.",
        "",
    ]


def _why_basic(manifest: RunManifest) -> str:
    if manifest.metrics == CLINICAL:
        return "No hospital sent specificity, AUC or calibration."
    if profiles.hides_evaluations(manifest.privacy):
        return "Specificity, AUC and calibration are withheld: they are not measured under differential privacy."
    return "Specificity, AUC and calibration were not measured (metrics=basic)."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    safe = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells] for cells in (head, *rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in safe]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def _with_luck(last: pb.RoundInfo, noise: EvaluationNoise | None) -> str:
    """Write the accuracy over all classes, of counts with the interval of their luck."""
    found = uncertainty.accuracy(last.correct, last.examples, noise)
    if noise is not None or not found.exact:
        return _share(found)
    return share_of(math.fsum(last.correct), math.fsum(last.examples)).text()


def _share(found: Estimate) -> str:
    return "no test examples" if found == NOTHING else found.text()
