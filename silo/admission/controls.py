"""The hospital's rules: one home's policy file and privacy ledger, applied to every request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fl_core.aggregation import adaptive_guards
from fl_core.aggregation.contributor_floor import HOSPITALS
from fl_core.datasets import SiloDataset
from fl_core.errors import (
    ConfigError,
    DataError,
    ProtocolError,
    RefusedError,
    SchemaError,
)
from fl_core.extensions import loading, registry
from fl_core.rounds import sampling
from fl_core.rounds.capabilities import check_supported
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.memory_need import require_memory
from fl_core.rounds.torch_need import require_torch
from fl_core.tensors import torch
from fl_core.training.local_data import PlainLocalData
from fl_core.training.memory import CPU
from fl_core.types.class_coverage import ClassCoverage
from fl_core.types.enums import Capability
from fl_core.types.interfaces import DataFactory, LocalData, RoundData
from fl_core.types.targets import classes_in
from fl_core.types.values import State, SurveySums, Tensors
from privacy.accounting.accountant import PrivacyFilter
from privacy.compiled_run import CompiledRun
from privacy.policy import Policy, check_labels, training_refused
from privacy.policy_terms import BY_HAND
from privacy.profiles.record import RecordProfile
from privacy.release_log import InMemoryReleaseLog
from privacy.secagg.terms import SecaggError
from protos.wire.tasks import TaskKey
from silo.admission import census, private_readiness
from silo.admission.floors import ReleaseFloors
from silo.admission.rules import HospitalRules
from silo.admission.run_request import describe_request, request_of, warn_of_few
from silo.admission.survey_history import Countable, SurveyedPatients, Told
from silo.admission.surveys import RememberedSurvey, remembered_answers, survey_preview
from silo.identity.identity import SiloIdentity
from silo.reports.run_request import RunRequest, SurveyPreview
from silo.storage.approvals import AwaitingDecisionError
from silo.storage.run_data import RunData

if TYPE_CHECKING:
    from privacy.ledger.run_ledger import RunLedger

log = logging.getLogger(__name__)


class DataChangedError(DataError):
    """The data differ from those that the run began with (E-DATA-10); the message reveals nothing about any record."""


@dataclass(frozen=True, eq=False)
class DataQuestion:
    """Asks to use the hospital's data in a run, as its member `index`.

    version: of the data, as in `RunData`   began: the version that the run began with; "" if it has not begun
    size: the hospital's nominal size; `typed`: the operator gave it, otherwise it was counted
    prototypes: False if this hospital submits none to any run.
    """

    index: int
    dataset: SiloDataset
    version: str
    began: str = ""
    size: float = 0.0
    typed: bool = True
    prototypes: bool = True


class TaskQuestion(NamedTuple):
    """One task of a run, with the access that the run was admitted with.

    cohort: size of the round's cohort, as offered   base_digest: of the message   message: fetches and checks the
    message; empty for a census   incarnation: of the coordinator, which sends one model per round of training
    proof: fetches the proof of the run's census, if the coordinator sent one   begins: the data, if this is the first
    task of a run.
    """

    access: RunAccess
    key: TaskKey
    cohort: int
    base_digest: str = ""
    message: Callable[[], State] = dict
    incarnation: str = ""
    proof: Callable[[], Path] | None = None
    begins: RunData | None = None


class AdmissionRequest(NamedTuple):
    """A coordinator's request to take part in a run, with at most one of: `data`, `whole_run`, `task`.

    declared: the classes that this hospital declares, used if the policy names none   device: for training
    data_of: loads the run's data, to describe the run to the person who decides   data: asks to use the hospital's data
    whole_run: asks whether the budget covers all rounds   task: asks to do a task.
    """

    run_id: str
    manifest: RunManifest
    declared: Callable[[], Collection[str]] = tuple
    device: torch.device = CPU
    data_of: Callable[[CompiledRun], SiloDataset] | None = None
    data: DataQuestion | None = None
    whole_run: RunAccess | None = None
    task: TaskQuestion | None = None


@dataclass(frozen=True, eq=False)
class RunAccess:
    """Permission of a run at this hospital. It opens no record: each task needs its own `TaskAccess`.

    data: the data question that was admitted   submits: whether prototypes may leave.
    """

    data: DataQuestion
    submits: bool
    floors: ReleaseFloors
    _factory: DataFactory
    _ledger: RunLedger | None = None


@dataclass(frozen=True, eq=False)
class TaskAccess:
    """Permission of one admitted task; records can be opened only with it.

    message: the coordinator's message   times_charged: how often its round was charged before   census: of the run,
    if this task proved it.
    """

    key: TaskKey
    cohort: int
    message: State
    times_charged: int
    census: ClassCoverage | None
    _access: RunAccess
    _refused: Callable[[RefusedError], None]

    def open(self, data: RoundData) -> LocalData:
        """Open a round's examples within the floors; a private round is charged first.

        Raises RefusedError (E-BUDGET-..), which the ledger records.
        """
        try:
            return self._access._factory(data)
        except RefusedError as error:
            self._refused(error)
            raise

    def open_for_hospital(self, data: RoundData) -> LocalData:
        """Open examples without floors and without a charge, for numbers that never leave this hospital."""
        return PlainLocalData(data)

    def commit(self, output: str) -> None:
        """Note in the ledger that the task's output is on disk. output: its digest."""
        if self._access._ledger is not None:
            self._access._ledger.commit(output)


class AdmissionDecision(NamedTuple):
    """The request is admitted. access: the answer to a data question   task: the answer to a task question."""

    run: CompiledRun
    access: RunAccess | None = None
    task: TaskAccess | None = None


@dataclass(slots=True)
class HospitalControls(HospitalRules):
    """The hospital's rules for all runs. Messages from the network cannot change them."""

    _last: CompiledRun | None = field(default=None, init=False)

    def as_registered(self, dataset: SiloDataset) -> SiloDataset:
        """Return data with the ledger's identification of them: `privacy.ledger.registration.as_registered`."""
        if dataset.earlier is None:
            return dataset
        from privacy.ledger.registration import as_registered

        return as_registered(self.existing_ledger(), dataset)

    def admit(self, request: AdmissionRequest) -> AdmissionDecision:
        """Admit a run's request, or raise: the single entry point to this hospital's data, budget and memory.

        A run is checked against the policy, the declared classes, the hospital's decision and the daily limit of runs
        that measure models. Data are checked against the policy, the ledger's registrations and the data that the run
        began with. A task is checked against the run's plan, its census and earlier answers. It is recorded before any
        record is read, so that one question has one answer; a refused task is not recorded. A private round of training
        is not recorded but charged, when its data are opened. Code of another distribution is imported only here, after
        the policy has allowed it (E-POLICY-15).

        Raises AwaitingDecisionError; RefusedError, which the ledger records: E-POLICY-.., E-BUDGET-.., E-RUN-14 as
        `require_torch`, E-RUN-38 before building a model that cannot be trained here; as `CompiledRun.of`,
        `AnswerMemory.claim`, `AnswerMemory.require_room` and `census.prove`; DataError: E-DATA-05 on records of other
        classes, E-DATA-10 on other data than the run began with; ProtocolError (E-RUN-33) on a task that does not
        follow from the manifest.
        """
        policy, run = self._admitted_run(request)
        memory, runs_a_day = self.store.answers, ReleaseFloors.of(policy, run).runs_a_day
        if (task := request.task) is not None:
            return AdmissionDecision(run, task=self._admitted_task(run, task, runs_a_day))
        memory.require_room(request.run_id, runs_a_day)
        access = None
        with self._recording(request, run.private):
            if request.data is not None:
                access = self._access(run, policy, request.data, request.declared)
            if request.whole_run is not None:
                _require_budget(run, request.whole_run)
        return AdmissionDecision(run, access)

    def _admitted_run(self, request: AdmissionRequest) -> tuple[Policy, CompiledRun]:
        """Return the policy and the admitted, compiled run; raises as `admit`."""
        run_id, manifest = request.run_id, request.manifest
        with self._recording(request, private=False):
            policy = self.policy()
            if manifest.kind.trains and self.home.validation_only:
                raise training_refused(manifest.rounds, "this hospital joined for validation only")
            policy.check_request(manifest)
            require_torch(manifest)
            if manifest.secagg is not None and policy.secagg.confirmed_peers:
                identity = SiloIdentity(self.home.path)
                others = {member.name for member in manifest.members} - {identity.load().identity.name}
                policy.secagg.check_peers(len(others & identity.pins().confirmed()), len(others))
            registry.require_named(manifest.method.name, manifest.model.name, manifest.extensions)
            for extension in manifest.extensions:
                loading.load_allowed(extension, policy.runs.extensions)
            if not manifest.kind.program:
                require_memory(manifest.method, manifest.model, manifest.schema, manifest.train, request.device)
            run = self._compiled(manifest)
            policy.check(run)
            if policy.budgets and run.private:
                policy.require_collections(self.ledger.collections())
            decided = policy.runs.approve != BY_HAND or self._decision(run_id, run, policy, request.data_of)
            if decided is None:
                raise AwaitingDecisionError(run_id)
            if not decided:
                raise RefusedError("E-POLICY-07", f"the hospital decided against run {run_id}")
        if run.private:
            with self._recording(request, private=True):
                check_labels(policy.privacy.labels or request.declared(), manifest.schema.classes)
        return policy, run

    @contextmanager
    def _recording(self, request: AdmissionRequest, private: bool) -> Iterator[None]:
        """Record a refusal in the ledger. If a private run is refused as not ready, list everything that it needs."""
        try:
            yield
        except RefusedError as error:
            self.record_refusal(request.run_id, error)
            if private and error.code in private_readiness.NOT_READY:
                ledger = self.existing_ledger()
                missing = private_readiness.missing_requirements(self.policy(), ledger, request.declared())
                raise private_readiness.with_all(error, missing) from error
            raise

    def _admitted_task(self, run: CompiledRun, task: TaskQuestion, runs_a_day: int) -> TaskAccess:
        key, access = task.key, task.access
        refused = partial(self.record_refusal, key.run_id)
        try:
            _require_planned(run, task)
        except ProtocolError as error:
            if run.private:  # a round that is not in the plan would be an additional release
                refused(error)
            raise
        message = task.message()
        proved = None if key.kind.census else self._proved_census(run, task, message)
        if not (key.kind.census or (run.private and key.kind.trains)):
            model = adaptive_guards.method_state(message, adaptive_guards.groups(run.guards.silo))
            content = run.updates.one_set_content(model)
            self.store.answers.claim(key, task.base_digest, content, task.incarnation, runs_a_day)
        if proved is not None:
            self.store.secagg.keep_coverage(key.run_id, proved)
        if task.begins is not None:
            self.store.run_data.begin(key.run_id, task.begins)
        times = 0
        if access._ledger is not None:
            times = access._ledger.charged(key.run_id, key.round, key.kind.trains)
            access._ledger.begin(key.run_id)
        return TaskAccess(key, task.cohort, message, times, proved, access, refused)

    def _proved_census(self, run: CompiledRun, task: TaskQuestion, message: State) -> ClassCoverage | None:
        """Compare the coordinator's class counts with the proof; return the census if it is new.

        Raises SecaggError: E-RUN-48 on other numbers, and as `census.prove`.
        """
        floor = run.updates.floor
        if floor is None and task.proof is None:
            return None
        coverage, new = census.prove(self.store, task.key, run, task.proof)
        sent = message.get(HOSPITALS, {}).get(HOSPITALS)
        if floor is not None and (sent is None or sent.tolist() != list(coverage.hospitals)):
            raise SecaggError(
                "E-RUN-48",
                "the coordinator's number of hospitals of each class differs from what the census proves: nothing "
                "is sent",
            )
        return coverage if new else None

    def _decision(
        self, run_id: str, run: CompiledRun, policy: Policy, data_of: Callable[[CompiledRun], SiloDataset] | None
    ) -> bool | None:
        """Return the hospital's decision about a run; None if it is pending. A new run is stored for a decision."""
        digest = run.manifest.digest()
        if earlier := self.store.approvals.find(run_id, digest):
            return earlier.decided
        silo = SiloIdentity(self.home.path).load().identity.name
        survey, few = None, tuple[str, ...]()
        if data_of is not None and run.question is not None:
            survey = self._survey_preview(run, data_of(run), policy)
        elif data_of is not None and (floors := ReleaseFloors.of(policy, run)).min_test_images:
            few = floors.too_few(data_of(run).test, run.manifest.schema.classes)
        request = request_of(run, silo, policy.prototypes.submit, survey, few).to_json()
        return self.store.approvals.ask(run_id, digest, run.manifest.name, describe_request(run), request)

    def _compiled(self, manifest: RunManifest) -> CompiledRun:
        if self._last is None or self._last.manifest != manifest:
            self._last = CompiledRun.of(manifest)
        return self._last

    def _access(
        self, run: CompiledRun, policy: Policy, question: DataQuestion, declared: Callable[[], Collection[str]]
    ) -> RunAccess:
        """Return what a run's tasks may open, within the floors.

        Raises RefusedError: E-POLICY-05 on a part that the policy does not allow, E-BUDGET-04 on data that are not
        registered; as the profile's `data_factory`; DataError (E-DATA-05), SchemaError as `_check_dictionary`;
        DataChangedError.
        """
        profile, index, dataset = run.profile, question.index, question.dataset
        if run.private:
            _require_declared(dataset, policy.privacy.labels or declared())
        _check_dictionary(run, index, dataset)
        floors = ReleaseFloors.of(policy, run, dataset)
        submits = question.prototypes and policy.prototypes.submit and run.manifest.members[index].prototypes
        ledger = None
        if run.private:
            from privacy.ledger.registration import unit_of
            from privacy.ledger.run_ledger import RunLedger

            limit = PrivacyFilter.of(policy.privacy.epsilon, policy.privacy.delta)
            ledger = RunLedger(self.ledger, run, dataset, policy.caps(), limit, self.coordinator)
            if isinstance(profile, RecordProfile):
                ledger.once = profile.survey_release(index, floors.counted) or ""
            if hidden_size := policy.runs.hide_size and not question.typed:
                policy.check_hidden_size(question.size)
            profile.check_part(index, policy.privacy, unit_of(dataset.train), 0.0 if hidden_size else question.size)
        factory = profile.data_factory(index, InMemoryReleaseLog() if ledger is None else ledger, floors.counted)
        if run.question is not None and not run.private:
            factory = self._remembered(run, floors, factory, policy)
        elif not run.private:
            warn_of_few(run, len(dataset.train))
        profile.require_submission(submits)
        if question.began not in ("", question.version):
            raise DataChangedError(
                "E-DATA-10",
                f"{dataset.origin} has changed since run {run.manifest.name!r} began",
            )
        return RunAccess(question, submits, floors, factory, ledger)

    def _remembered(self, run: CompiledRun, floors: ReleaseFloors, factory: DataFactory, policy: Policy) -> DataFactory:
        """Limit a survey without noise to what earlier answers allow and to what was approved."""
        name, digest, withheld = run.manifest.name, run.manifest.digest(), floors.counted
        classes = run.manifest.schema.classes

        def claim(patients: SurveyedPatients, questions: Sequence[Countable]) -> Told:
            return self.store.answers.claim_cells(name, patients, questions, withheld.least_patients)

        def approved() -> frozenset[str] | None:
            if policy.runs.approve != BY_HAND:
                return None
            requests = [RunRequest.from_json(approval.request) for approval in self.store.approvals.approved(digest)]
            return frozenset(r.survey.digest for r in requests if r is not None and r.survey is not None)

        def opened(data: RoundData) -> RememberedSurvey:
            def answers(query: SurveySums) -> Tensors:
                return remembered_answers(withheld.of(query), data.train, data.test, classes, claim, data.progress)

            return RememberedSurvey(factory(data), answers, approved)

        return opened

    def _survey_preview(self, run: CompiledRun, dataset: SiloDataset, policy: Policy) -> SurveyPreview:
        """Compute what would leave in a survey; records no answer."""
        withheld = ReleaseFloors.of(policy, run, dataset).counted

        def decide(patients: SurveyedPatients, questions: Sequence[Countable]) -> Told:
            return self.store.answers.answerable(patients, questions, withheld.least_patients)

        return survey_preview(run, dataset, withheld, decide)


def _require_budget(run: CompiledRun, access: RunAccess) -> None:
    """Raise as `RunLedger.require` unless the budget covers all rounds; reserves, charges and reads nothing."""
    ledger = access._ledger
    if ledger is not None and not ledger.paid:
        first = ledger.cached("class counts") is None
        ledger.require(run.profile.charges(access.data.index, access.submits, first))


def _require_planned(run: CompiledRun, task: TaskQuestion) -> None:
    """Raise ProtocolError (E-RUN-33) on a round or a cohort that does not follow from the manifest."""
    manifest, key, index = run.manifest, task.key, task.access.data.index
    cohort = sampling.sample_cohort(manifest.seed, key.round, len(manifest.members), key.kind.drawn(manifest.cohort))
    planned = key.round in key.kind.rounds(manifest.rounds) and (run.counts_classes or not key.kind.census)
    if not planned or task.cohort != len(cohort) or index not in cohort:
        raise ProtocolError(
            "E-RUN-33",
            f"expected a {key.kind.value} task for silos {cohort} in round {key.round + 1} of {manifest.rounds}, "
            f"found one for silo {index} in a cohort of {task.cohort}: the offer contradicts the manifest",
        )


def _require_declared(dataset: SiloDataset, declared: Collection[str]) -> None:
    """Raise DataError (E-DATA-05) if a record has a class that is not declared, for any label space of the run."""
    names, splits = dataset.schema.classes, (dataset.train, dataset.test)
    present = {names[k] for split in splits for k in classes_in(split.labels, len(names))}
    if undeclared := sorted(present - set(declared)):
        raise DataError(
            "E-DATA-05",
            f"expected records of the declared classes {sorted(declared)} in {dataset.origin}, found {undeclared}: "
            "add them to policy.toml ([privacy] labels), or remove the records",
        )


def _check_dictionary(run: CompiledRun, index: int, dataset: SiloDataset) -> None:
    """Refuse a run with another label dictionary, or with a method that cannot use coarse labels.

    The answer follows from declarations alone. Raises SchemaError: E-DATA-05, E-CFG-08.
    """
    named, local_digest = run.manifest.members[index].labels, dataset.dictionary.digest
    if named and named != local_digest:
        raise SchemaError(
            "E-DATA-05",
            f"expected the label dictionary {named[:16]}, which run {run.manifest.name!r} names for this hospital, "
            f"found {local_digest[:16] or 'none'}: put labels.toml back, or restart the service and ask for a new run",
        )
    if not dataset.coarse:
        return
    try:
        check_supported(run.method, {Capability.COARSE_LABELS})
    except ConfigError as error:
        raise SchemaError(error.code, error.message) from error
    if run.method.exact:
        log.warning(
            "%s: method %s sums records by class and skips those with coarse labels",
            run.manifest.name,
            run.method.name,
        )
