"""Collect the facts of a run's model from the coordinator's record of the run.

Counts are those that the run released: sums over hospitals. If they are noisy, a number has the interval of that noise
or is withheld. Facts on a single hospital are those that it declares to every lead.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from consilium.report.card import (
    Card,
    CardShare,
    ClassFacts,
    Figure,
    Hospital,
    Masks,
    Model,
    Privacy,
    Results,
    RunFacts,
    Survey,
    TrainingDescription,
    Updates,
    Withdrawal,
)
from consilium.report.papers import paper_of
from consilium.report.signed_card import utc
from coordinator.lead import accuracy
from coordinator.lead.as_json import software_json
from coordinator.lead.survey_answers import SurveyAnswers
from coordinator.lead.tables import private_form, started_from
from coordinator.lead.withdrawals import outcome
from fl_core.datasets.preprocessing import Preprocessing
from fl_core.errors import ConfigError
from fl_core.methods.fedavg import FedAvg, Traits
from fl_core.rounds.manifest import RunManifest
from fl_core.types import intervals
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.clinical import CLINICAL, ClinicalMetrics
from fl_core.types.records import update_outcomes
from fl_core.types.secagg import tolerated_colluders
from privacy import profiles
from privacy.accounting import measures, uncertainty
from privacy.accounting.measures import ACCURACY, BALANCED, MACRO_AUC, EvaluationResult, Measure
from privacy.accounting.projection import preview
from privacy.accounting.shared_noise import SharedNoise
from privacy.accounting.uncertainty import NOTHING, Estimate
from privacy.compiled_run import CompiledRun
from privacy.profiles.base import PLACEMENTS
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import Identity

SAMPLING, NOISE = "sampling of test images", "noise of differential privacy"
_EXPLAINED = 0.1
"""Expected calibration error above which the card explains it."""


@dataclass(frozen=True, slots=True)
class Statement:
    """Facts that only the lead knows. survey: of the hospitals' records, if the lead names one."""

    intended_use: str = ""
    licence: str = ""
    survey: Survey | None = None


def card_of(
    detail: pb.RunDetail,
    manifest: RunManifest,
    silos: Sequence[pb.SiloInfo],
    lead: Identity,
    said: Statement,
    parameters: int,
    temperature: float | None = None,
) -> Card:
    """Collect the facts of a run's newest model; the card names no files yet.

    silos: the hospitals' current declarations   parameters: numbers in the exported model   temperature: in its file.
    """
    run, info = CompiledRun(manifest), detail.info
    rounds = detail.rounds
    counts = update_outcomes(rounds)
    return Card(
        consortium=lead.consortium,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        written_by=lead.name,
        intended_use=said.intended_use,
        licence=said.licence,
        run=RunFacts(
            id=info.run_id,
            name=info.name,
            state=info.state,
            rounds=sum(r.kind == pb.TRAIN for r in rounds),
            planned_rounds=info.rounds,
            created=utc(info.created_unix),
            ended=utc(info.ended_unix),
            data=manifest.data,
            manifest_digest=info.manifest_digest,
            model_digest=info.model_digest,
        ),
        model=_model(run, manifest, parameters, temperature),
        method=_method(run, manifest),
        classes=_classes(manifest, rounds, silos, accuracy.coverage(info)),
        hospitals=_hospitals(run, manifest, detail, silos),
        results=_results(manifest, rounds),
        privacy=_privacy(run, manifest),
        masks=_masks(manifest),
        updates=Updates(
            aggregator=run.aggregator.name,
            refused=counts["updates_refused"],
            cut=counts["updates_cut"],
            rows_cut=counts["cut_rows"],
            unbounded_rounds=counts["unbounded_rounds"],
            bytes_up=info.bytes_up,
            bytes_down=info.bytes_down,
            clipped=sum(r.clipped for r in rounds),
        ),
        withdrawals=tuple(
            Withdrawal(
                w.silo,
                w.run_id,
                utc(w.at_unix),
                outcome(w),
                depends=w.run_id == info.run_id or bool(w.reason),
                statement=w.statement,
                signature=base64.b64encode(w.signature).decode(),
            )
            for w in detail.withdrawals
        ),
        software=_software(detail, manifest),
        files={},
        survey=said.survey,
    )


def survey_of(manifest: RunManifest, survey: RunManifest, detail: pb.RunDetail, found: SurveyAnswers) -> Survey:
    """Prepare the answers to a survey for a run's card. survey, detail, found: of the survey.

    Raises ConfigError (E-CFG-08) on a survey about other data or classes than the run's, and on impossible numbers.
    """
    if (survey.data, survey.schema.classes) != (manifest.data, manifest.schema.classes):
        raise ConfigError(
            "E-CFG-08",
            f"expected a survey about the run's data ({manifest.data}) and {len(manifest.schema.classes)} classes, "
            f"found {detail.info.run_id} about {survey.data} and {len(survey.schema.classes)}: name a survey about the "
            "same data and classes",
        )
    answered = {name for r in detail.rounds for name in r.included}
    made = Survey(
        run=detail.info.run_id,
        document=found.document,
        hospitals=found.hospitals,
        members=tuple(member.name for member in manifest.members if member.name in answered),
        epsilon=found.epsilon,
        delta=found.delta,
        answers=found.answers,
    )
    if found.implausible or not made.possible:
        raise ConfigError(
            "E-CFG-08",
            f"expected a survey with possible counts, found {detail.info.run_id} with others "
            f"({'; '.join(found.implausible[:3]) or 'counts of no hospitals'}): find out which hospital sent them, "
            "and repeat the survey",
        )
    return made


def _software(detail: pb.RunDetail, manifest: RunManifest) -> Mapping[str, str]:
    packages = software_json(detail.software)
    ours = packages["coordinator"] or manifest.software
    return {"coordinator": str(ours), **{name: text for name, text in sorted(detail.software.items()) if name}}


def _model(run: CompiledRun, manifest: RunManifest, parameters: int, temperature: float | None) -> Model:
    weights = manifest.start.weights if manifest.start is not None else None
    body = "" if not run.frozen else str(weights) if weights else "random weights, drawn from the run's seed"
    return Model(
        name=manifest.model.name,
        options=manifest.model.options,
        parameters=parameters,
        input=tuple(manifest.schema.shape),
        preprocessing=Preprocessing(manifest.data, manifest.schema).sentence(),
        start=started_from(manifest.to_json()),
        frozen_body=body,
        several_labels=manifest.schema.multi_label,
        temperature=temperature,
    )


def _method(run: CompiledRun, manifest: RunManifest) -> TrainingDescription:
    kind = type(run.method)
    paper = paper_of(kind) if issubclass(kind, FedAvg) else None
    return TrainingDescription(
        name=manifest.method.name,
        options=manifest.method.options,
        about=(kind.__doc__ or "").strip().partition("\n")[0],
        paper="" if paper is None else f"{paper.authors}, {paper.title!r}, {paper.venue}",
        training=training_text(run),
        seed=manifest.seed,
        private_form=private_form(manifest.to_json()),
    )


def training_text(run: CompiledRun) -> str:
    """Describe the hospitals' training. A closed form takes no training steps, whatever the schedule."""
    if run.method.exact:
        return "none: the model is solved in closed form from sums over examples"
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(run.manifest.train).items())


def _hospitals(
    run: CompiledRun, manifest: RunManifest, detail: pb.RunDetail, silos: Sequence[pb.SiloInfo]
) -> tuple[Hospital, ...]:
    trained = [r for r in detail.rounds if r.kind == pb.TRAIN]
    took_part = Counter(name for r in trained for name in r.included)
    asks = not isinstance(run.method, Traits) or "prototypes" in run.method.sends
    declared = {silo.name: silo for silo in silos}
    policies = {d.silo: d.stated.policy_digest for d in detail.declarations}
    nobody = pb.SiloInfo()
    return tuple(
        Hospital(
            name=member.name,
            rounds=took_part[member.name],
            missed=tuple(f"{r.round + 1}: {r.missing[member.name]}" for r in trained if member.name in r.missing),
            prototypes=("yes" if member.prototypes else "no") if asks else "-",
            size=float(member.units or declared.get(member.name, nobody).data.nominal_size),
            policy=policies.get(member.name, ""),
            fingerprint=declared.get(member.name, nobody).fingerprint,
            software=detail.software.get(member.name, ""),
            labels=member.labels,
            coarse=member.coarse,
        )
        for member in manifest.members
    )


# ---- results ---------------------------------------------------------------------------------------------------------


def share_of(right: float, of: float) -> CardShare:
    """Return a share of counted examples with its exact interval."""
    k, n = round(right), round(of)
    if not 0 <= k <= n or abs(right - k) > 1e-3 or abs(of - n) > 1e-3:
        return CardShare(withheld=uncertainty.IMPOSSIBLE)
    interval = intervals.share(k, n)
    return CardShare() if interval is None else CardShare(k / n, interval.low, interval.high, of=SAMPLING)


def _noisy(found: Estimate) -> CardShare:
    if found.withheld or found == NOTHING:
        return CardShare(withheld=found.withheld)
    return CardShare(found.point, found.low, found.high, of=NOISE)


def _last(rounds: Sequence[pb.RoundInfo]) -> pb.RoundInfo:
    return rounds[-1] if rounds else pb.RoundInfo()


def _clinical(rounds: Sequence[pb.RoundInfo]) -> ClinicalMetrics | None:
    return accuracy.clinical_of(_last(rounds))


def _classes(
    manifest: RunManifest, rounds: Sequence[pb.RoundInfo], silos: Sequence[pb.SiloInfo], coverage: ClassCoverage
) -> tuple[ClassFacts, ...]:
    last, clinical = _last(rounds), _clinical(rounds)
    noise = profiles.result_noise(manifest).of(last.included)
    members = {member.name for member in manifest.members}
    noisy = uncertainty.by_class(last.correct, last.examples, noise) if noise else []
    made = []
    for k, name in enumerate(manifest.schema.classes):
        auc = clinical.auc[k] if clinical else None
        counts = list(zip(last.correct[k : k + 1], last.examples[k : k + 1], strict=False))
        if manifest.schema.multi_label:  # most labels are absent; only clinical metrics count those that are present
            counts = [(clinical.labels[k].tp, clinical.labels[k].present)] if clinical and clinical.labels else []
        made.append(
            ClassFacts(
                name=name,
                test_examples=round(counts[0][1]) if counts and not noise and _counts(last) else None,
                recognised=_noisy(noisy[k]) if noise and counts else share_of(*counts[0]) if counts else CardShare(),
                declared_by=tuple(sorted(s.name for s in silos if s.name in members and name in s.data.holds)),
                trained_at=coverage.hospitals_of(name),
                taught=name not in coverage.untaught,
                specificity=clinical.specificity[k] if clinical else None,
                auc_low=auc.low if auc else None,
                auc_high=auc.high if auc else None,
            )
        )
    return tuple(made)


def _counts(last: pb.RoundInfo) -> bool:
    """Return whether all sums of an evaluation can be counts, since a hospital may have sent any numbers."""
    return all(share_of(right, of).withheld == "" for right, of in zip(last.correct, last.examples, strict=False))


def _results(manifest: RunManifest, rounds: Sequence[pb.RoundInfo]) -> Results:
    last = _last(rounds)
    noise = profiles.result_noise(manifest).of(last.included)
    result = replace(accuracy.result_of(last), noise=noise)
    clinical, counts = result.clinical, _counts(last)
    auc = clinical.macro_auc if clinical else None
    exact = noise is None and counts
    several = manifest.schema.multi_label
    tested = clinical.classes_present if clinical and several else sum(n > 0 for n in last.examples) if exact else 0
    return Results(
        accuracy=_share(ACCURACY, result, counts=counts),
        balanced=_share(BALANCED, result, counts=counts),
        best=_best(rounds, manifest),
        test_examples=round(sum(last.examples)) if exact and rounds else None,
        level_of_chance=1 / 2 if several else 1 / (tested or len(manifest.schema.classes)),
        of_exported_model=last.kind == pb.EVALUATE,
        classes_tested=tested if exact and rounds else None,
        calibration_error=clinical.calibration_error if clinical else None,
        macro_auc_low=auc.low if auc else None,
        macro_auc_high=auc.high if auc else None,
        confusion=clinical.confusion if clinical else (),
        why_no_more="" if clinical else why_basic(manifest),
        labels=clinical.labels if clinical else (),
        reliability=tuple((float(b.examples), float(b.correct), b.confidence) for b in clinical.bins)
        if clinical
        else (),
        temperature=suggested_temperature(clinical)
        if clinical and (clinical.calibration_error or 0) > _EXPLAINED
        else None,
        others=tuple(
            Figure(measure.name, measure.label, share, measure.percent)
            for measure in measures.of_model()
            if measure not in (ACCURACY, BALANCED, MACRO_AUC)
            and (share := _share(measure, result, counts=counts)) != CardShare()
        ),
    )


def suggested_temperature(found: ClinicalMetrics) -> float | None:
    """Estimate the temperature that calibrates the logits; None without counts."""
    from consilium.model import conformal

    return conformal.estimate_temperature(found.bins, found.alternatives)


def _share(measure: Measure, result: EvaluationResult, *, counts: bool) -> CardShare:
    """Return a measure with the interval of its noise, or of sampling. counts: whether its sums can be counts."""
    value, interval = measure.estimate(result), measure.interval(result)
    if result.noise is not None or value == NOTHING:
        return _noisy(value)
    if not counts or value.point is None:
        return _impossible()
    ends = (value.low, value.high) if interval is None else interval
    return CardShare(value.point, *ends, of="" if interval is None else SAMPLING)


def _best(rounds: Sequence[pb.RoundInfo], manifest: RunManifest) -> CardShare:
    noise = profiles.result_noise(manifest)
    best = accuracy.best_of([(r.correct, r.examples, noise.of(r.included)) for r in rounds])
    return CardShare(best.point) if best.exact else _noisy(best)


def _impossible() -> CardShare:
    return CardShare(withheld=uncertainty.IMPOSSIBLE)


def why_basic(manifest: RunManifest) -> str:
    if manifest.evaluation.metrics == CLINICAL:
        return "no hospital sent specificity, AUC or calibration"
    if profiles.hides_evaluations(manifest.privacy):
        return "specificity, AUC and calibration are not measured under differential privacy"
    return "specificity, AUC and calibration were not measured (metrics=basic)"


# ---- privacy ---------------------------------------------------------------------------------------------------------


def _privacy(run: CompiledRun, manifest: RunManifest) -> Privacy:
    terms = run.profile.terms
    if terms is None:
        return Privacy("none")
    planned = preview(run)
    shared = terms.placement == "distributed"
    return Privacy(
        profile=manifest.privacy.name,
        subject=run.profile.subject,
        epsilon=terms.epsilon,
        delta=terms.delta,
        planned=max((s["epsilon_tight"] for s in planned["silos"]), default=None),
        alone=max((s["epsilon_alone"] for s in planned["silos"]), default=None) if shared else None,
        collusion=SharedNoise.of(manifest).colluding if shared else 0,
        test_data=terms.test_data,
        noise_from=terms.rng,
        placement=PLACEMENTS[terms.placement],
        options=json.loads(json.dumps(dict(manifest.privacy.options))),
    )


def _masks(manifest: RunManifest) -> Masks | None:
    terms = manifest.secagg
    return None if terms is None else Masks(tolerated_colluders(manifest.cohort_size), terms.min_contributors)
