"""What the hospital allows and what it has spent: the policy file and the privacy ledger of one home, at work."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from fl_core.datasets import SiloDataset
from fl_core.errors import ConfigError, DataError, FederationError, RefusedError, SchemaError, StateError
from fl_core.extensions import loading, registry
from fl_core.methods.shared.prototypes import features_of
from fl_core.rounds.capabilities import check_supported
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.memory_need import require_memory
from fl_core.training.memory import CPU
from fl_core.types.enums import Capability
from fl_core.types.interfaces import DataFactory, RoundData
from fl_core.types.targets import classes_in
from fl_core.types.values import State, SurveySums, Tensors
from privacy.accounting.accountant import Filter
from privacy.accounting.release_plan import TEST
from privacy.compiled_run import CompiledRun
from privacy.policy import Policy, check_labels, validates_only
from privacy.policy_terms import BY_HAND
from privacy.profiles.record import RecordProfile
from privacy.release_log import InMemoryReleaseLog
from protos.wire.tasks import TaskKey
from service_core.console import counted
from service_core.storage import private_files
from service_core.storage.chain import ChainHead
from silo.admission import policy_in_force, private_readiness
from silo.admission.floors import ReleaseFloors
from silo.admission.run_request import request_of
from silo.admission.survey_history import Countable, SurveyedPatients, Told
from silo.admission.surveys import RememberedSurvey, remembered_answers, survey_preview
from silo.identity.identity import SiloIdentity
from silo.reports.run_request import RunRequest, SurveyPreview
from silo.storage.home import Home
from silo.storage.store import SiloStore
from silo.storage.tasks import Attestation, ledger_position

if TYPE_CHECKING:
    from privacy.ledger.ledger import Ledger
    from privacy.ledger.run_ledger import RunLedger

log = logging.getLogger(__name__)


class TaskQuestion(NamedTuple):
    """A task of a run, about a model. incarnation: of the coordinator, which has one model for each round of training.

    base_digest: of what was sent   model: that, as this hospital read it.
    """

    key: TaskKey
    base_digest: str
    model: State
    incarnation: str


class AdmissionRequest(NamedTuple):
    """What a coordinator asks of this hospital: to take part in a run, and with a task to answer about a model.

    device: where it would train   data_of: loads what the run would be about, for whoever decides about it.
    """

    run_id: str
    manifest: RunManifest
    device: torch.device = CPU
    data_of: Callable[[CompiledRun], SiloDataset] | None = None
    task: TaskQuestion | None = None


class Access(NamedTuple):
    """What a run that was admitted works with here. ledger: of a private one   submits: prototypes may leave."""

    factory: DataFactory
    ledger: RunLedger | None
    submits: bool
    floors: ReleaseFloors


class AdmissionDecision(NamedTuple):
    """What the hospital says to a question that it does not refuse. decided: else it waits for a person's decision."""

    run: CompiledRun
    decided: bool


@dataclass(slots=True)
class HospitalControls:
    """The hospital's side of every run. Nothing that comes over the network changes it.

    coordinator: whose runs these are, by its authority's certificate, beside other consortia on the same ledger.
    """

    home: Home
    store: SiloStore
    coordinator: str = ""
    _ledger: Ledger | None = field(default=None, init=False)
    _last: CompiledRun | None = field(default=None, init=False)

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            from privacy.ledger.ledger import Ledger

            self._ledger = Ledger(self.home.ledger, self.home.ledger_key)
        return self._ledger

    def existing_ledger(self) -> Ledger | None:
        """Return the ledger where there is one; none is made."""
        return self.ledger if self.home.ledger.exists() else None

    def as_registered(self, dataset: SiloDataset) -> SiloDataset:
        """Return data as the ledger knows them: `privacy.ledger.registration.as_registered`."""
        if dataset.earlier is None:
            return dataset
        from privacy.ledger.registration import as_registered

        return as_registered(self.existing_ledger(), dataset)

    def policy(self) -> Policy:
        """Read the policy as it is now; raises RefusedError (`policy_in_force.UNUSABLE`) on one that allows nothing."""
        return policy_in_force.in_force(self.home)

    def policy_digest(self) -> str:
        """Return the SHA-256 of the policy file, whatever it says; empty where there is none that can be read."""
        return policy_in_force.digest_of(self.home)

    def hides_size(self) -> bool:
        """Tell whether the hospital hides its size; a policy that cannot be read hides it."""
        try:
            return self.policy().runs.hide_size
        except RefusedError:
            return True

    def tells_data(self) -> bool:
        """Tell whether what was counted here, and the classes, may be declared; not where masks are required."""
        try:
            return not self.policy().secagg.require
        except RefusedError:
            return False

    def trains(self) -> bool:
        """Tell whether the hospital takes part in training at all; as `policy_in_force.trains`."""
        return policy_in_force.trains(self.home)

    def attestation(self) -> Attestation:
        if not self.home.ledger.exists():
            return Attestation(self.policy_digest())
        head, sealed, restored = self.ledger.statement()
        return Attestation(self.policy_digest(), head.seq, head.hash if head.seq else "", sealed.hex(), restored)

    def recover(self) -> list[str]:
        """Verify the ledger at the service's start, and count what was left open as spent; return that.

        Raises StateError: E-BUDGET-07 on a ledger that was edited, E-BUDGET-08 on one that lacks what others have seen.
        """
        seen = self.latest_attestation()
        if seen.seq or self.home.ledger.exists():
            self.ledger.verify(ChainHead(seen.seq, seen.head))
        return self.ledger.recover() if self.home.ledger.exists() else []

    def latest_attestation(self) -> Attestation:
        return max(self._attestation_reminded(), self.store.latest_attestation_sent(), key=ledger_position)

    def all_attestations(self) -> list[Attestation]:
        return [self._attestation_reminded(), *self.store.attested()]

    def _attestation_reminded(self) -> Attestation:
        try:
            found = Attestation(*json.loads(self.home.attested.read_text()))
            if not all(type(v) is type(known) for v, known in zip(found, Attestation(), strict=True)):
                raise TypeError("it is no attestation")
        except (OSError, ValueError, TypeError, RecursionError):
            return Attestation()  # the coordinator never reminded this home of anything
        return found

    def record_attestation(self, seen: Attestation) -> None:
        """Take what the coordinator remembers of this hospital's ledger; raises as `check`.

        Raises StateError (E-BUDGET-18) on what this hospital never stated: it would burn budget to restore that.
        """
        if ledger_position(seen) > ledger_position(self.latest_attestation()):
            self._require_own(seen)
            private_files.write_private(self.home.attested, json.dumps(seen).encode())
        self.check(seen)

    def _require_own(self, seen: Attestation) -> None:
        from privacy.ledger.sealed import unseal

        if not self.home.ledger.exists() and not self.home.ledger_key.exists():
            return  # all is lost: the coordinator's word is all there is
        sealed = bytes.fromhex(seen.sealed)
        known = unseal(self.ledger.chain.secret, ChainHead(seen.seq, seen.head), seen.restored, sealed) is not None
        if not known and (sealed or any(a.sealed for a in self.store.attested())):
            raise StateError(
                "E-BUDGET-18",
                f"expected what this hospital stated of its ledger, found event {seen.seq}, which is not under its key",
            )

    def check(self, seen: Attestation) -> None:
        """Raise StateError (E-BUDGET-07, E-BUDGET-08) where events were edited, or lack what others have seen."""
        if seen.seq or self.home.ledger.exists():
            self.ledger.require(ChainHead(seen.seq, seen.head))

    def admit(self, request: AdmissionRequest) -> AdmissionDecision:
        """Admit a question of any kind of run: the one door to what this hospital does.

        A run is held against the policy, the hospital's decision and the day's room for runs that measure models; a
        task beside that against what was answered before, which is noted before any record is read: one question has
        one answer. A private round of training is charged instead. What leaves, `ReleaseFloors` bound.
        Code of another distribution is imported here, and only here, once the policy has allowed it (E-POLICY-15).

        Raises RefusedError (E-POLICY-.., and E-RUN-38 before a model is built that cannot be trained there), which the
        ledger records, and as `CompiledRun.of`; as `AnswerMemory.claim` and `AnswerMemory.require_room`. No data is
        near but for a run that waits for a decision.
        """
        policy, run, decided = self._taking_part(request)
        if not decided:
            return AdmissionDecision(run, decided=False)
        memory, a_day = self.store.answers, ReleaseFloors.of(policy, run).a_day
        if (task := request.task) is None:
            memory.require_room(request.run_id, a_day)
        elif not (run.private and task.key.kind.trains):
            content = run.updates.one_set_content(task.model)
            memory.claim(task.key, task.base_digest, content, task.incarnation, a_day)
        return AdmissionDecision(run, decided=True)

    def _taking_part(self, request: AdmissionRequest) -> tuple[Policy, CompiledRun, bool]:
        """Return the policy, what a run is, and whether the hospital takes part in it; raises RefusedError else."""
        run_id, manifest = request.run_id, request.manifest
        try:
            policy = self.policy()
            if manifest.kind.trains and self.home.validation_only:
                raise validates_only(manifest.rounds, "it joined for validation alone")
            policy.check_request(manifest)
            if manifest.secagg is not None and policy.secagg.confirmed_peers:
                identity = SiloIdentity(self.home.path)
                others = {member.name for member in manifest.members} - {identity.load().identity.name}
                policy.secagg.check_peers(len(others & identity.pins().confirmed()), len(others))
            registry.require_named(manifest.method.name, manifest.model.name, manifest.extensions)
            for extension in manifest.extensions:
                loading.load_allowed(extension, policy.runs.extensions)
            require_memory(manifest.method, manifest.model, manifest.schema, manifest.train, request.device)
            run = self._compiled(manifest)
            policy.check(run)
            if policy.budgets and run.private:
                policy.require_collections(self.ledger.collections())
            if policy.runs.approve != BY_HAND:
                return policy, run, True
            decided = self._decision(run_id, run, policy, request.data_of)
            if decided is False:
                raise RefusedError("E-POLICY-07", f"the hospital decided against run {run_id}")
        except RefusedError as error:
            self.record_refusal(run_id, error)
            raise
        return policy, run, bool(decided)

    def _decision(
        self, run_id: str, run: CompiledRun, policy: Policy, data_of: Callable[[CompiledRun], SiloDataset] | None
    ) -> bool | None:
        """Return what the hospital decided about a run; None while it has not. A new one is written down and waits."""
        digest = run.manifest.digest()
        if known := self.store.approvals.find(run_id, digest):
            return known.decided
        silo = SiloIdentity(self.home.path).load().identity.name
        survey, few = None, tuple[str, ...]()
        if data_of is not None and run.question is not None:
            survey = self._survey_preview(run, data_of(run), policy)
        elif data_of is not None and (floors := ReleaseFloors.of(policy, run)).tested:
            few = floors.too_few(data_of(run).test, run.manifest.schema.classes)
        request = request_of(run, silo, policy.prototypes.submit, survey, few).to_json()
        return self.store.approvals.ask(run_id, digest, run.manifest.name, describe_request(run), request)

    def _compiled(self, manifest: RunManifest) -> CompiledRun:
        if self._last is None or self._last.manifest != manifest:
            self._last = CompiledRun.of(manifest)
        return self._last

    def access(
        self, run: CompiledRun, index: int, dataset: SiloDataset, size: float = 0.0, typed: bool = True
    ) -> Access:
        """Open the examples to a run that was admitted, within the floors.

        size: of this hospital, `typed` or counted. Raises RefusedError: E-POLICY-05 on a part that the policy does
        not allow, E-BUDGET-04 on data that is not registered; as the profile's `data_factory`.
        """
        policy, profile = self.policy(), run.profile
        floors = ReleaseFloors.of(policy, run, dataset)
        withheld = floors.counted
        if not run.private:
            factory = profile.data_factory(index, InMemoryReleaseLog(), withheld)
            if run.question is not None:
                factory = self._remembered(run, floors, factory, policy)
            else:
                _warn_of_few(run, len(dataset.train))
            return Access(factory, None, policy.prototypes.submit, floors)
        from privacy.ledger.registration import unit_of
        from privacy.ledger.run_ledger import RunLedger

        limit = Filter.of(policy.privacy.epsilon, policy.privacy.delta)
        ledger = RunLedger(self.ledger, run, dataset, policy.caps(), limit, self.coordinator)
        if isinstance(profile, RecordProfile):
            ledger.once = profile.survey_release(index, withheld) or ""
        try:
            if hidden_size := policy.runs.hide_size and not typed:
                policy.check_hidden_size(size)
            profile.check_part(index, policy.privacy, unit_of(dataset.train), 0.0 if hidden_size else size)
            factory = profile.data_factory(index, ledger, withheld)
        except RefusedError as error:
            self.record_refusal(run.manifest.name, error)
            raise
        return Access(factory, ledger, policy.prototypes.submit, floors)

    def _remembered(self, run: CompiledRun, floors: ReleaseFloors, factory: DataFactory, policy: Policy) -> DataFactory:
        """Hold a survey without noise to what was answered before, and to what was approved."""
        name, digest, withheld = run.manifest.name, run.manifest.digest(), floors.counted
        classes = run.manifest.schema.classes

        def claim(patients: SurveyedPatients, asked: Sequence[Countable]) -> Told:
            return self.store.answers.claim_cells(name, patients, asked, withheld.least_patients)

        def approved() -> frozenset[str] | None:
            if policy.runs.approve != BY_HAND:
                return None
            found = [RunRequest.from_json(approval.request) for approval in self.store.approvals.approved(digest)]
            return frozenset(r.survey.digest for r in found if r is not None and r.survey is not None)

        def opened(data: RoundData) -> RememberedSurvey:
            def answers(query: SurveySums) -> Tensors:
                return remembered_answers(withheld.of(query), data.train, data.test, classes, claim, data.progress)

            return RememberedSurvey(factory(data), answers, approved)

        return opened

    def _survey_preview(self, run: CompiledRun, dataset: SiloDataset, policy: Policy) -> SurveyPreview:
        """Compute what would leave of a survey; nothing is noted as answered."""
        withheld = ReleaseFloors.of(policy, run, dataset).counted

        def decide(patients: SurveyedPatients, asked: Sequence[Countable]) -> Told:
            return self.store.answers.answerable(patients, asked, withheld.least_patients)

        return survey_preview(run, dataset, withheld, decide)

    def require_labels(self, run: CompiledRun, declared: Iterable[str]) -> None:
        """Hold a private run's label space against the declared one, and never against records.

        declared: what holds where the policy names none. Raises RefusedError (E-POLICY-16), which the ledger records.
        """
        try:
            check_labels(self.policy().privacy.labels or declared, run.manifest.schema.classes)
        except RefusedError as error:
            self.record_refusal(run.manifest.name, error)
            raise

    def with_all_lacking(self, error: RefusedError, declared: Collection[str]) -> RefusedError:
        """Return a refusal of a private run that names all that is missing here, not the first thing alone."""
        if error.code not in private_readiness.NOT_READY:
            return error
        ledger = self.existing_ledger()
        return private_readiness.with_all(
            error, private_readiness.missing_requirements(self.policy(), ledger, declared)
        )

    def require_declared(self, dataset: SiloDataset, declared: Iterable[str]) -> None:
        """Raise DataError (E-DATA-05) on a record of a class that is not declared, whatever a run's label space is."""
        allowed, names = {*(self.policy().privacy.labels or declared)}, dataset.schema.classes
        splits = dataset.train, dataset.test
        found = {names[k] for split in splits for k in classes_in(split.labels, len(names))}
        if undeclared := sorted(found - allowed):
            raise DataError(
                "E-DATA-05",
                f"expected records of the declared classes {sorted(allowed)} in {dataset.origin}, found {undeclared}: "
                "declare these as well in policy.toml ([privacy] labels), or take them out",
            )

    def record_refusal(self, run: str, error: FederationError) -> None:
        if error.code not in policy_in_force.UNUSABLE:  # of a file that says nothing there is nothing to record
            self.ledger.note_refusal(run, error.code, self.coordinator)


def check_dictionary(run: CompiledRun, index: int, dataset: SiloDataset) -> None:
    """Refuse a run of another label dictionary, or of a method without coarse labels: by declarations alone.

    Raises SchemaError: E-DATA-05, E-CFG-08.
    """
    named, own = run.manifest.members[index].labels, dataset.dictionary.digest
    if named and named != own:
        raise SchemaError(
            "E-DATA-05",
            f"expected the label dictionary {named[:16]}, which run {run.manifest.name!r} names for this hospital, "
            f"found {own[:16] or 'none'}: put labels.toml back, or restart the service and ask for a new run",
        )
    if not dataset.coarse:
        return
    try:
        check_supported(run.method, {Capability.COARSE_LABELS})
    except ConfigError as error:
        raise SchemaError(error.code, error.message) from error
    if run.method.exact:
        log.warning(
            "%s: method %s sums records by class, and leaves those of coarse labels out",
            run.manifest.name,
            run.method.name,
        )


NAMED = (
    "the coordinator hears which classes this hospital trains, except those that its policy hides and those below its "
    "smallest counts"
)
COUNTED = (
    "it is counted under masks at how many hospitals each class is trained; of a class that this hospital alone has, "
    "the sums are its own, without its name"
)
"""What a question says of classes: before a plain run, and before a masked one."""


def describe_request(run: CompiledRun) -> str:
    manifest, profile = run.manifest, run.profile
    kind = run.kind
    what = f"{manifest.method.name} on {manifest.data}, {kind.length(manifest.rounds)}"
    lead = f", asked for by {manifest.lead}" if manifest.lead else ""
    lead += f", {kind.goes_on} {manifest.start}" if manifest.start else ""
    lead += ", with the results of each hospital that lets them be shown" if manifest.evaluation.by_hospital else ""
    lead += "".join(f", with the code {extension}" for extension in manifest.extensions)
    tail = f"; {run.updates.reading}"
    if kind.measures and TEST not in profile.protected:
        tail += f"; {counted(manifest.rounds + 1, 'model')} measured on test images here, counted exactly"
    if run.counts_classes:
        tail += f"; before round 1 {NAMED if run.updates.counts_in_preflight else COUNTED}"
    if profile.terms is None:
        return f"{what}{lead}, without differential privacy{tail}"
    terms = profile.terms
    return f"{what}{lead}, epsilon {terms.epsilon:g} at delta {terms.delta:g} for {profile.subject}{tail}"


def _warn_of_few(run: CompiledRun, examples: int) -> None:
    """Warn where sums of second moments leave of fewer examples than a feature has numbers."""
    if run.method.exact and examples < (numbers := features_of(run.model).feature_dim):
        log.warning(
            "%s: second moments of %d numbers leave without noise, of fewer training examples than that: sums of few "
            "examples show which vectors these can be; %s. privacy=dp_record protects them; [privacy] require = "
            '"dp_record" in policy.toml refuses other runs',
            run.manifest.name,
            numbers,
            run.updates.reading,
        )
