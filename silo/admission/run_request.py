"""Describes a compiled run to the person at the hospital who decides about it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from fl_core.errors import ConfigError
from fl_core.methods.shared.prototypes import features_of
from fl_core.rounds.manifest import RunManifest
from fl_core.types.records import FEATURES
from privacy.accounting.accountant import epsilon_spent
from privacy.accounting.release_plan import TEST
from privacy.compiled_run import CompiledRun
from service_core.console import pluralize
from silo.reports.disclosure import NO_PRIVACY, UpdateContents
from silo.reports.run_request import RunRequest, SurveyPreview
from silo.reports.spending import charges_of

log = logging.getLogger(__name__)


def update_contents(run: CompiledRun) -> UpdateContents:
    """Count the numbers in an update by part: sums and their weights; under masks, each is one word of the ring."""
    manifest, word = run.manifest, max(kind.itemsize for kind in run.dtypes)
    parts = {
        name: sum(math.prod(shape) for shape in spec.shapes.values()) + math.prod(spec.weight_shape)
        for name, spec in manifest.layout.items()
    }
    tensors = sum(1 + len(spec.shapes) for spec in manifest.layout.values())
    return UpdateContents(parts, tensors, word, run.updates.extra_bytes)


def privacy_of(run: CompiledRun) -> str:
    """Describe a run's privacy guarantee, its limits, and whether the coordinator reads only masked sums."""
    guarantee = _noise_of(run)
    return f"{guarantee}{'; ' if ': ' in guarantee else ': '}{run.updates.reading}"


def _noise_of(run: CompiledRun) -> str:
    profile, terms = run.profile, run.profile.terms
    if terms is None:
        return NO_PRIVACY
    guarantee = f"epsilon {terms.epsilon:g} at delta {terms.delta:g} for {profile.subject}"
    if not profile.protected:
        who = "that can be repeated" if terms.rng != "secure" else "of the coordinator alone"
        return f"{NO_PRIVACY}: {guarantee}, but with noise {who}"
    return guarantee if terms.test_data == "private" else f"{guarantee}; test images are counted exactly"


def request_of(
    run: CompiledRun,
    silo: str,
    submits: bool,
    survey: SurveyPreview | None = None,
    few: Sequence[str] = (),
) -> RunRequest:
    """Describe a run's request to this hospital.

    submits: whether the policy lets prototypes leave   survey: numbers that would leave in a survey
    few: classes whose results are not sent.

    The charges are upper bounds: class counts that were released before cost nothing again.
    """
    manifest, profile = run.manifest, run.profile
    contents, terms = update_contents(run), profile.terms
    spends = None
    try:
        index = manifest.index(silo)
    except ConfigError:
        member, charges, shared = None, None, None
    else:
        member = manifest.members[index]
        charged = profile.charges(index, submits and member.prototypes)
        charges = charges_of(charged)
        if terms is not None:
            spends = epsilon_spent(charged.get(profile.promised, ()), terms.delta)
        shared = profile.shared_figures(index)
    return RunRequest(
        method=manifest.method.name,
        model=manifest.model.name + (" with a frozen body" if manifest.train.freeze == FEATURES else ""),
        data=manifest.data,
        classes=tuple(manifest.schema.classes),
        rounds=manifest.rounds,
        hospitals=len(manifest.members),
        lead=manifest.lead,
        start="" if manifest.start is None else f"{manifest.start}{_compared_with(manifest)}",
        extensions=tuple(map(str, manifest.extensions)),
        profile=manifest.privacy.name,
        epsilon=None if terms is None else terms.epsilon,
        delta=None if terms is None else terms.delta,
        subject=profile.subject,
        rng="" if terms is None else terms.rng,
        test_data="" if terms is None else terms.test_data,
        prototypes=member is not None and member.prototypes and bool({"prototypes", "moments"} & {*manifest.layout}),
        parts=contents.parts,
        tensors=contents.tensors,
        word=contents.word,
        charges=charges,
        masked=(contents.word, contents.extra_bytes) if contents.extra_bytes else (),
        sums_of=run.updates.sums_of,
        others=tuple(m.name for m in manifest.members if m.name != silo and run.updates.sums_of),
        shared=shared,
        survey=survey,
        models=manifest.rounds + 1 if run.kind.measures and TEST not in profile.protected else 0,
        few=tuple(few),
        spends=spends,
    )


def _compared_with(manifest: RunManifest) -> str:
    terms = manifest.evaluation
    if not terms.beside:
        return ""
    whose = "this hospital's own of" if terms.other is None else f"the model ({terms.other}) of"
    return f", beside {whose} {terms.beside}"


NAMED = (
    "the coordinator learns which classes this hospital trains, except those that its policy hides and those below its "
    "smallest counts"
)
COUNTED = (
    "the number of hospitals per class is counted under masks; for a class that only this hospital has, the sums "
    "are its own contribution, without its name"
)
"""Descriptions of the class count before round 1: in a plain run, and in a masked one."""


def describe_request(run: CompiledRun) -> str:
    manifest, profile = run.manifest, run.profile
    kind = run.kind
    what = f"{manifest.method.name} on {manifest.data}, {kind.length(manifest.rounds)}"
    lead = f", asked for by {manifest.lead}" if manifest.lead else ""
    lead += f", {kind.goes_on} {manifest.start}" if manifest.start else ""
    lead += ", with the results of each hospital that allows it" if manifest.evaluation.by_hospital else ""
    lead += "".join(f", with the code {extension}" for extension in manifest.extensions)
    tail = f"; {run.updates.reading}"
    if kind.measures and TEST not in profile.protected:
        tail += f"; {pluralize(manifest.rounds + 1, 'model')} evaluated on test images here, counted exactly"
    if run.counts_classes:
        tail += f"; before round 1 {NAMED if run.updates.counts_in_preflight else COUNTED}"
    if profile.terms is None:
        return f"{what}{lead}, without differential privacy{tail}"
    terms = profile.terms
    return f"{what}{lead}, epsilon {terms.epsilon:g} at delta {terms.delta:g} for {profile.subject}{tail}"


def warn_of_few(run: CompiledRun, examples: int) -> None:
    """Warn if second moments leave that sum over fewer examples than a feature vector has numbers."""
    if run.method.exact and examples < (numbers := features_of(run.model).feature_dim):
        log.warning(
            "%s: second moments of %d numbers leave without noise, from fewer training examples than that: such sums "
            "limit which vectors the examples can have; %s. privacy=dp_record protects them; [privacy] require = "
            '"dp_record" in policy.toml refuses other runs',
            run.manifest.name,
            numbers,
            run.updates.reading,
        )
