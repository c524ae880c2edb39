"""The lead's page as a site: the data of its templates, and the actions of its buttons."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from consilium.pages.lead import exports, new_run, overview
from consilium.pages.lead.overview import OwnCertificates
from consilium.pages.lead.run_facts import run_facts
from consilium.pages.lead.run_record import chart_of
from consilium.pages.lead.service_watch import FollowedRun, ServiceSnapshot, ServiceWatch
from consilium.report.comparison import ComparedRun, RunComparison, compare, score_rows
from consilium.web.chart import Chart
from consilium.web.site import Action, ChangedError, Download, MissingError, Parameters, Site, View
from coordinator.lead import accuracy, hospital_results, tables
from coordinator.lead.client import LeadClient
from fl_core.errors import ConfigError
from fl_core.kinds import kind_of
from privacy.accounting import measures
from privacy.accounting.uncertainty import NOTHING
from protos.consilium.v1 import federation_pb2 as pb
from service_core.pki import certificates
from service_core.pki.identity import identity_of
from service_core.storage.private_files import Credentials

TEMPLATES = Path(__file__).parent / "templates"
COMMAND = "coordinator page"
PLACES = ("a", "b", "c", "d")
"""Query parameters that name the runs to compare."""
_MAX_HOURS, _MAX_STARTED = 24 * 365, 64
Order = Callable[[LeadClient, Parameters], str]


@dataclass(frozen=True)
class LeadPage:
    """The page of one lead.

    watch: the service's facts   connect: creates a client for an order   certificates: expiry of the lead's.
    """

    watch: ServiceWatch
    connect: Callable[[], LeadClient]
    exporter: exports.Exporter
    certificates: OwnCertificates
    consortium: str
    clock: Callable[[], float] = time.time
    _started: dict[str, str] = field(default_factory=dict)
    """The newest runs that forms started, by the form's request id."""

    def site(self) -> Site:
        orders = {"/resume": _resume, "/abort": _abort, "/exclude": _exclude, "/extend": _extend}
        return Site(
            title=f"{self.consortium}, {self.certificates.lead}",
            command=COMMAND,
            templates=TEMPLATES,
            views={
                "/": View("home.html", self._home),
                "/runs/{run}": View("run.html", self._run),
                "/compare": View("compare.html", self._compare),
                "/new": View("new.html", self._new),
            },
            actions={
                **{path: Action(self._digest, self._order(order), _page_of) for path, order in orders.items()},
                "/new": Action(self._audience, self._start, self._after_start),
            },
            download=self._download,
            version=lambda: f"{self.watch.version()} {self.exporter.surveys_read}",
        )

    # ---- views -----------------------------------------------------------------------------------------------------

    def _home(self, _: Parameters) -> Mapping[str, object]:
        snapshot, now = self.watch.current(), self.clock()
        head, below = overview.headline(snapshot, now)
        hospitals = sorted(snapshot.silos, key=lambda s: (s.state == "revoked" and not s.alarm, s.name))
        return {
            **self._about(snapshot),
            "headline": head,
            "text": below,
            "hospitals": hospitals[: overview.MAX_ROWS],
            "hospitals_left_out": max(0, len(hospitals) - overview.MAX_ROWS),
            "invitations": [i for i in snapshot.invitations if i.expires_unix > now][: overview.MAX_ROWS],
            "runs": snapshot.runs[: overview.MAX_ROWS],
            "runs_left_out": max(0, len(snapshot.runs) - overview.MAX_ROWS),
            "certificates": overview.certificates(snapshot.silos, self.certificates, now)[: overview.MAX_ROWS],
        }

    def _run(self, parameters: Parameters) -> Mapping[str, object]:
        snapshot, info, followed = self._followed(parameters["run"])
        facts = run_facts(info, followed, self.clock())
        halted = info.state in ("paused", "failed")
        kind = kind_of(info.method, info.rounds)
        found_out = self.exporter.answers(info) if not kind.measures and info.state == "finished" else None
        return {
            **self._about(snapshot),
            "headline": facts.headline,
            "run": facts,
            "measures": kind.measures,
            "how_to_read": kind.how_to_read(info.run_id),
            "answers": [found_out] if isinstance(found_out, str) else [*found_out.parts()] if found_out else [],
            "digest": state_digest(info),
            "can_resume": halted,
            "can_abort": halted or info.state in ("waiting", "running"),
            "can_exclude": halted or info.state == "running",
            "can_extend": info.HasField("waiting"),
        }

    def _compare(self, parameters: Parameters) -> Mapping[str, object]:
        chosen = list(dict.fromkeys(parameters[name] for name in PLACES if parameters.get(name)))
        chosen_runs = [self._followed(run_id)[2].record.compared for run_id in chosen]
        snapshot = self.watch.current()
        offered = [run.run_id for run in snapshot.runs[: overview.MAX_ROWS]]
        preset = dict(zip(PLACES, offered[1::-1], strict=False)) if len(chosen) < 2 else {}
        choice = {name: parameters.get(name) or preset.get(name, "") for name in PLACES}
        about = {**self._about(snapshot), "runs": offered, "choice": choice}
        if len(chosen) < 2:
            return {**about, "headline": "Choose runs to compare", "comparison": None}
        compared = comparison_facts(compare(chosen_runs))
        return {**about, "headline": compared.headline, "comparison": compared}

    def _new(self, parameters: Parameters) -> Mapping[str, object]:
        snapshot = self.watch.current()
        return {**self._about(snapshot), "headline": "Start a run", **new_run.form_facts(snapshot, parameters)}

    def _about(self, found: ServiceSnapshot) -> Mapping[str, object]:
        words = {"accuracy": accuracy, "hospital_head": hospital_results.head(), "overview": overview, "tables": tables}
        return {"at": found.at, "away": found.away, "lead": self.certificates.lead, **words}

    def _followed(self, run_id: str) -> tuple[ServiceSnapshot, pb.RunInfo, FollowedRun]:
        snapshot, followed = self.watch.follow(run_id)
        info = snapshot.run(run_id)
        if info is None:
            raise MissingError("There is no such run, or the coordinator has not answered yet.")
        if followed is None:
            raise MissingError("The coordinator does not answer, and this page has not loaded this run before.")
        return snapshot, info, followed

    # ---- orders ----------------------------------------------------------------------------------------------------

    def _digest(self, form: Parameters) -> str | None:
        """Return the current digest of a form's run, fetched from the service; None if there is no such run."""
        info = self._answering().run(form.get("run", ""))
        return None if info is None else state_digest(info)

    def _order(self, order: Order) -> Callable[[Parameters], str]:
        def give(form: Parameters) -> str:
            with closing(self.connect()) as client:
                text = order(client, form)
            self.watch.forget(form["run"])
            self.watch.current(fresh=True)
            return text

        return give

    def _audience(self, _: Parameters) -> str:
        """Return the current digest of the online hospitals, fetched from the service."""
        return new_run.audience_digest(self._answering())

    def _answering(self) -> ServiceSnapshot:
        snapshot = self.watch.current(fresh=True)
        if snapshot.away is not None:
            raise ChangedError("The coordinator does not answer, so nothing was done. Try again later.")
        return snapshot

    def _start(self, form: Parameters) -> str:
        """Start a form's run. On a ConfigError returns its text; the form is shown again with its input."""
        snapshot = self.watch.current()
        try:
            with closing(self.connect()) as client:
                info = new_run.start(client, form, snapshot)
        except ConfigError as error:
            return f"Nothing was started. {error}"
        self._started[form["request"]] = info.run_id
        for old in list(self._started)[:-_MAX_STARTED]:
            del self._started[old]
        self.watch.current(fresh=True)
        command = new_run.command_of(form, new_run.served_data(snapshot))
        return f"{info.run_id} was submitted. The same as a command: {command}"

    def _after_start(self, form: Parameters) -> str:
        run = self._started.get(form.get("request", ""))
        return new_run.again(form) if run is None else _page_of({"run": run})

    def _download(self, id: str) -> Download | None:
        run_id = id.partition("/")[0]
        snapshot, followed = self.watch.follow(run_id)
        detail = None if followed is None else followed.record.detail
        return exports.download(id, self.exporter, snapshot.run(run_id), detail)


def _page_of(form: Parameters) -> str:
    return f"/runs/{quote(form['run'])}"


def state_digest(info: pb.RunInfo) -> str:
    """Return a digest of the facts that an order about a run depends on: its state and reason, and excluded hospitals.

    It leaves out the number of closed rounds. Otherwise the forms of a running run would soon be out of date.
    """
    facts = [info.run_id, info.state, info.reason, sorted(info.excluded), info.manifest_digest]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def own_certificates(credentials: Credentials) -> tuple[OwnCertificates, str]:
    """Return the expiry of the lead's and the authority's certificates, and the consortium's name."""
    peer = identity_of(credentials.cert_pem)
    authority = certificates.load_certificate(credentials.ca_pem, "the authority's certificate")
    ends = peer.not_after.timestamp(), authority.not_valid_after_utc.timestamp()
    return OwnCertificates(peer.identity.name, *ends), peer.identity.consortium


def _resume(client: LeadClient, form: Parameters) -> str:
    info = client.resume(form["run"])
    return f"{info.run_id} continues after {info.closed} of {info.rounds} rounds."


def _abort(client: LeadClient, form: Parameters) -> str:
    return f"{client.abort(form['run']).run_id} is aborted. Its model so far is kept."


def _exclude(client: LeadClient, form: Parameters) -> str:
    silo, readmit = form.get("silo", ""), form.get("readmit") == "yes"
    info = client.exclude(form["run"], silo, readmit)
    return f"{silo} is {'included again' if readmit else 'excluded'} in {info.run_id}, from the next round on."


def _extend(client: LeadClient, form: Parameters) -> str:
    text = form.get("hours", "")
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 < hours <= _MAX_HOURS:
        raise ConfigError("E-CFG-02", f"expected hours above 0, at most {_MAX_HOURS}, found {text[:20]!r}: correct it")
    info = client.extend(form["run"], hours)
    return f"All pending hospitals in the open round of {info.run_id} have {hours:g} hours more."


# ---- the comparison of runs ------------------------------------------------------------------------------------------

LETTERS = "ABCD"


@dataclass(frozen=True, slots=True)
class ComparisonFacts:
    """Runs side by side.

    columns: runs, each with its letter in charts and tables   scores: (measure, a text for each run).
    """

    headline: str
    columns: tuple[tuple[str, ComparedRun], ...]
    differences: Mapping[str, tuple[str | None, ...]]
    scores: tuple[tuple[str, tuple[str, ...]], ...]
    charts: tuple[Chart, ...]
    classes: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]


def comparison_facts(found: RunComparison) -> ComparisonFacts:
    labels = {measure.name: measure.label for measure in measures.MEASURES}
    return ComparisonFacts(
        headline=found.standing.headline(dict(zip((run.id for run in found.runs), LETTERS, strict=False))),
        columns=tuple(zip(LETTERS, found.runs, strict=False)),
        differences=found.differences,
        scores=tuple((labels.get(name, name), texts) for name, texts in score_rows(found)),
        charts=tuple(_charts(found)),
        classes=tuple(
            (name, tuple(run.by_class.get(name, NOTHING).text() for run in found.runs)) for name in found.classes
        ),
        notes=tuple(f"{note[:1].upper()}{note[1:]}." for note in found.notes),
    )


def _charts(found: RunComparison) -> list[Chart]:
    charts = []
    for measure in found.measures[:3]:
        of_runs = zip(LETTERS, found.runs, strict=False)
        curves = {letter: run.curves[measure] for letter, run in of_runs if measure in run.curves}
        name = measures.named(measure).label
        if (drawn := chart_of(f"{name[:1].upper()}{name[1:]}", curves, LETTERS)) is not None:
            charts.append(drawn)
    return charts
