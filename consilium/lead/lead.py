"""A lead's connection to the coordinator of a consortium."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from consilium.lead import listing
from consilium.lead.connection import LeadConnection
from consilium.lead.listing import Listing
from consilium.lead.run import Run
from coordinator.cli.options import home_of
from coordinator.cli.runs import print_submitted, withdrawn
from coordinator.lead import tables
from coordinator.lead.as_json import run_json, silo_json
from coordinator.lead.client import LeadClient
from coordinator.lead.survey_answers import SurveyAnswers
from coordinator.lead.watcher import show_events
from fl_core.types.survey import SurveyAnswer
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki.identity import Identity, identity_of

if TYPE_CHECKING:
    import pandas as pd

    from coordinator.lead.submission import RunSubmission


def connect(home: str | Path | None = None, lead: str | None = None) -> Lead:
    """Connect to the coordinator that runs on a home, as the lead whose certificate is in it.

        with consilium.connect("~/.consilium/coordinator") as lead:
            print(lead.hospitals())
            run = lead.run(method="analytic", data="digits").watch()

    home: of the coordinator, or the folder with a lead's key; by default that of the commands
    (CONSILIUM_COORDINATOR_HOME, or ~/.consilium/coordinator)   lead: the lead's name, if there are several certificates

    Raises StateError (E-STATE-43) if there is no consortium; ConfigError (E-ID-11) without a lead's certificate;
    UnavailableError (E-NET-01) if no service runs there; TLS errors (E-TLS-...) if the service is of another
    consortium.
    """
    place = home_of(None if home is None else Path(home).expanduser())
    return Lead(LeadConnection(place, lead))


class Lead:
    """A lead's connection to a federation: hospitals, runs, surveys, evaluations.

        lead = consilium.connect()
        lead.hospitals()                                   # a table, also in a notebook
        lead.survey("classes", "patients", data="folder")  # counts, before anything is trained
        run = lead.run(method="fedmr", data="folder", rounds=20, train__lr=0.01)
        lead.runs(), lead["latest"], lead.get(run.id)
        lead.evaluate(run, on=["north", "south"])
        lead.close()                                       # or `with consilium.connect() as lead:`

    The service authenticates and records each call like those of the commands. Errors are the same as for the commands,
    as exceptions with a `code`.
    """

    def __init__(self, connection: LeadConnection) -> None:
        self._connection = connection

    @property
    def home(self) -> Path:
        return self._connection.home

    @property
    def identity(self) -> Identity:
        return identity_of(self._connection.credentials.cert_pem).identity

    @property
    def _client(self) -> LeadClient:
        return self._connection.client

    def hospitals(self) -> Listing[HospitalStatus]:
        """Return the enrolled hospitals, as in `coordinator silos`."""
        silos = self._client.silos().silos
        return Listing(map(HospitalStatus.of, silos), [tables.silos_table(silos)], list(map(silo_json, silos)))

    def runs(self) -> Listing[Run]:
        """Return all runs, newest first, as in `coordinator runs`."""
        infos = self._client.runs()
        runs = (Run(self._connection, info) for info in infos)
        return Listing(runs, [tables.runs_table(infos)], list(map(run_json, infos)))

    def get(self, run: str = "latest") -> Run:
        """Return a run by its id or name; "latest" is the newest. Raises ConfigError (E-RUN-10) if there is none."""
        return Run(self._connection, self._client.show(run).info)

    def __getitem__(self, run: str) -> Run:
        return self.get(run)

    def run(self, method: str | None = None, *, start_from: Run | str | None = None, **keys: object) -> Run:
        """Submit a run to the hospitals that are online, as `coordinator run` does; follow it with `.watch()`.

            lead.run(method="analytic", data="digits")
            lead.run("fedmr", data="folder", data__classes=["nevus", "melanoma"], rounds=20, train={"lr": 0.01})
            lead.run(start_from=lead["latest"], rounds=10)

        keys: all settings of the command line, with `__` for the dot   start_from: a run whose last model and
        configuration to start from. Raises ConfigError: E-CFG-01 on an unknown key, with the nearest one; E-CFG-02 on a
        value out of range; and the service's errors on an impossible run.
        """
        from coordinator.config.keywords import Keywords
        from coordinator.lead.submission import RunSubmission, spec_of

        client = self._client
        keywords = Keywords({"method": method, **keys})
        parent = None if start_from is None else client.show(_id_of(start_from))
        return self._submitted(RunSubmission.of(spec_of(keywords.words, parent, keywords.values), parent))

    def evaluate(
        self,
        model: Run | str | Path = "latest",
        *,
        on: str | Sequence[str] = "all",
        by_hospital: bool = False,
        beside: Run | str | None = None,
        **keys: object,
    ) -> Run:
        """Measure a run's model, or an exported file, at the hospitals, as `coordinator evaluate` does. Nothing trains.

            lead.evaluate(run).watch().frame
            lead.evaluate("models/first-1a2b.safetensors", on=["north"], by_hospital=True)

        on: names of hospitals   by_hospital: also show each hospital's result, if its policy allows it
        beside: another run to measure on the same images   keys: for a file, settings that its metadata lack
        """
        from coordinator.cli.evaluation import evaluation_request, named_hospitals
        from coordinator.config.hydra_config import written

        names = named_hospitals(on if isinstance(on, str) else ",".join(on))
        words = [f"{key.replace('__', '.')}={written(value)}" for key, value in keys.items()]
        place = f"{model.parent}/{model.name}" if isinstance(model, Path) else _id_of(model)
        other = None if beside is None else _id_of(beside)
        request = evaluation_request(self._client, place, words, names, by_hospital, other)
        return self._submitted(request)

    def survey(
        self, *questions: str, of: Run | str | None = None, by_hospital: bool = False, **keys: object
    ) -> SurveyResult:
        """Ask hospitals for counts of their records, wait, and return the answers, as `coordinator survey` does.

            lead.survey("classes", "ages:5", data="folder", data__classes=["nevus", "melanoma"])
            lead.survey(of="survey-1a2b")   # the answers of an earlier one

        by_hospital: keep each hospital's answers separate, if policies allow it. Raises ConfigError (E-CFG-02) on an
        unknown question; StateError (E-RUN-11) if the survey ends without answers.
        """
        from coordinator.cli.survey import require_finished, survey_request
        from coordinator.config.hydra_config import written
        from coordinator.lead.surveys import fetched

        client = self._client
        if of is None:
            words = [f"{key.replace('__', '.')}={written(value)}" for key, value in keys.items()]
            info = survey_request([*questions, *words], by_hospital).submit(client)
            show_events(client.watch(info.run_id), quiet=True)
            detail = client.show(info.run_id)
            require_finished(detail.info)
        else:
            detail = client.show(_id_of(of))
        return SurveyResult(Run(self._connection, detail.info), fetched(client, detail))

    def withdraw(self, silo: str, preview: bool = False) -> Listing[Mapping[str, object]]:
        """Remove a hospital's data from the models, as `coordinator withdraw` does; return the outcome for each model.

            lead.withdraw("south", preview=True)   # describes the effect and changes nothing

        Call it again to see progress. Each item has the fields of `--json`. Raises ConfigError (E-RUN-05) on a hospital
        without an update in any model.
        """
        replies, lines = withdrawn(self._client, silo, preview)
        return Listing(replies, lines, replies)

    def _submitted(self, request: RunSubmission) -> Run:
        info = request.submit(self._client)
        print_submitted(self._client, info, request.parent_manifest)
        return Run(self._connection, info)

    def close(self) -> None:
        """Close the connection; runs continue."""
        self._connection.close()

    def __enter__(self) -> Lead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.identity.name}, a lead of {self.identity.consortium}, {self._connection}>"


def _id_of(run: Run | str) -> str:
    return run.id if isinstance(run, Run) else run


@dataclass(frozen=True, slots=True)
class HospitalStatus:
    """An enrolled hospital.

    state: "online", "offline" or "revoked"   data: the data set that it serves, None: nothing yet   classes: declared
    classes   size: training examples, rounded up, 0: not declared   activity: its current activity   alarm: a problem
    that the lead must investigate, or ""   last_seen: Unix time, None: never.
    """

    name: str
    state: str
    data: str | None
    classes: tuple[str, ...]
    size: float
    activity: str
    validation_only: bool
    software: str
    fingerprint: str
    last_seen: float | None
    alarm: str

    @classmethod
    def of(cls, silo: pb.SiloInfo) -> HospitalStatus:
        return cls(
            silo.name,
            silo.state,
            silo.data.name or None,
            tuple(silo.data.holds),
            silo.data.nominal_size,
            tables.doing(silo),
            silo.data.validation_only,
            silo.software,
            silo.fingerprint,
            silo.last_seen_unix or None,
            silo.alarm,
        )

    @property
    def online(self) -> bool:
        return self.state == "online"


@dataclass(frozen=True, slots=True, repr=False)
class SurveyResult:
    """The answers to a survey, shown as tables. run: the survey's run   answers: of all hospitals together."""

    run: Run
    answers: SurveyAnswers

    def to_frame(self) -> pd.DataFrame:
        """Return one row per number: question, hospital ("" for all together), cell, images, patients, suppressed_by.

        A number that no hospital released is missing, never 0.
        """
        groups: Mapping[str, Sequence[SurveyAnswer]] = {"": self.answers.answers, **self.answers.by_hospital}
        return listing.frame(
            [
                {
                    "question": answer.question,
                    "hospital": hospital,
                    "cell": cell.name,
                    "images": cell.images,
                    "patients": cell.patients,
                    "half_width": cell.half_width,
                    "suppressed_by": cell.held,
                }
                for hospital, answers in groups.items()
                for answer in answers
                for cell in answer.cells
            ]
        )

    def __repr__(self) -> str:
        return listing.text(self.answers.lines())

    def _repr_html_(self) -> str:
        return listing.html(self.answers.lines())
