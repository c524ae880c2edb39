"""The hospital's page as a site: the data of its templates, and the actions of its buttons."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilium.pages.hospital.data import FILE as DATA_CHECK
from consilium.pages.hospital.data import DataCheck
from consilium.web.rendering import moment
from consilium.web.site import Action, ChangedError, Download, Parameters, Site, View
from fl_core.errors import FederationError
from service_core.audit_log.local_commands import recording
from service_core.audit_log.log import LOG_FILE, last_lines
from service_core.operations import checks
from service_core.operations.checks import Finding, FindingLevel
from service_core.pki.identity import format_fingerprint, identity_of
from silo.identity.identity import SiloIdentity
from silo.operations.doctor import Examination
from silo.operations.liveness import Health
from silo.reports.disclosure import disclosures_of
from silo.reports.questions import PendingDecision, PolicyAndLedger
from silo.reports.spending import Spending, spending
from silo.storage.approvals import Approval
from silo.storage.home import SERVED, Home
from silo.storage.store import Contact, SiloStore

if TYPE_CHECKING:
    from privacy.ledger.ledger import Ledger

TEMPLATES = Path(__file__).parent / "templates"
COMMAND = "silo page"
FILE = "page.html"
"""File in the home that opens the page of a running `silo serve --page`."""
LINES, RUNS = 15, 20
PAGE = "page"
_APPROVE = "approve"
_MAX_SHOWN = 25
"""Maximum number of pending runs, and of decided runs, to show."""
SUMMARY = "audit.json"
_MAX_BYTES = 16 << 20
_MAX_PICTURES = 24
FINDINGS_S = 60.0
"""How long the doctor's findings are reused."""
CHECK = "check"


@dataclass(slots=True)
class HospitalPage:
    """The page of one home. audit: a folder of `silo audit`. Close it after its server.

    Raises StateError if the home has not joined, or its database cannot be used.
    """

    home: Home
    audit: Path | None = None
    store: SiloStore = field(init=False)
    data: DataCheck = field(init=False)
    _ledger: Ledger | None = field(default=None, init=False)
    _findings: tuple[float, list[Finding]] = field(default=(0.0, []), init=False)

    def __post_init__(self) -> None:
        SiloIdentity(self.home.path).load()
        self.store = SiloStore(self.home.database)
        self.data = DataCheck(self.home)

    def close(self) -> None:
        self.data.close()
        self.store.close_database()

    def site(self) -> Site:
        identity = SiloIdentity(self.home.path).load().identity
        return Site(
            title=f"{identity.name} in {identity.consortium}",
            command=COMMAND,
            templates=TEMPLATES,
            views={"/": View("home.html", lambda _: self.facts())},
            version=self.version,
            actions={
                "/approve": self._decisions.action(approve=True),
                "/refuse": self._decisions.action(approve=False),
                "/data/check": Action(lambda _: CHECK, self._check_data),
            },
            download=lambda id: picture(self.audit, id),
        )

    # ---- facts --------------------------------------------------------------------------------------------------

    def facts(self) -> Mapping[str, object]:
        """Collect the page's current data."""
        identity = SiloIdentity(self.home.path)
        mine, pins = identity.load(), identity.pins()
        policy_and_ledger = self._policy_and_ledger()
        waiting, more = self._decisions.waiting(policy_and_ledger)
        left, health, contact = disclosures_of(self.store), Health.of(self.home), self.store.contact()
        served = self.home.served()
        return {
            "headline": left.verdict,
            "as_of": _as_of(health, contact),
            "connection": connection(health, contact),
            "left": left,
            "runs": left.runs[:RUNS],
            "more_runs": max(0, len(left.runs) - RUNS),
            "waiting": waiting,
            "more_waiting": more,
            "decided": self._decisions.decided(),
            "policy_error": policy_and_ledger.policy_error,
            "policy": policy_and_ledger.policy,
            "measured": policy_and_ledger.measured,
            "policy_file": self.home.policy,
            "spending": self._spending(policy_and_ledger),
            "shares_ledger": self._shares_ledger(),
            "ledger_error": policy_and_ledger.ledger_error,
            "mine": mine.identity,
            "fingerprint": format_fingerprint(mine.fingerprint),
            "authority": format_fingerprint(identity.ca_fingerprint()),
            "until": mine.not_after.timestamp(),
            "renewal_due": identity.renewal_due(),
            "accepted": {
                n: format_fingerprint(identity_of(pem).fingerprint) for n, pem in sorted(pins.accepted().items())
            },
            "held": {name: format_fingerprint(member.fingerprint) for name, member in sorted(pins.held().items())},
            "served": served,
            "report": self.data.report(),
            "checking": self.data.running,
            "check_digest": CHECK,
            "pictures": pictures(self.audit),
            "audit": self.audit,
            "lines": self._lines(),
            "findings": [f for f in self._doctor() if f.level is not FindingLevel.OK],
            "worker": [f.found for f in self._doctor() if f.check == "worker" and f.level is FindingLevel.OK],
        }

    def version(self) -> str:
        """Return a text that changes with every file that the page reads, the service's health and the findings."""
        home, health = self.home, Health.of(self.home)
        files = [
            home.database,
            home.database.with_name(f"{home.database.name}-wal"),
            home.policy,
            home.path / "identity",
            home.path / DATA_CHECK,
            home.path / SERVED,
            home.path / LOG_FILE,
            home.path / f"{LOG_FILE}-wal",
        ]
        with suppress(FederationError):
            files += [home.ledger, home.ledger.with_name(f"{home.ledger.name}-wal")]
        stats = [(s.st_mtime_ns, s.st_size) if (s := _stat(file)) is not None else None for file in files]
        self._doctor()  # refreshes the findings once a minute, while the page is open
        return repr((stats, self._findings[1], health.alive, health.connected, health.since, self.data.running))

    @property
    def _decisions(self) -> Decisions:
        return Decisions(self.home, self.store, self._policy_and_ledger)

    def _policy_and_ledger(self) -> PolicyAndLedger:
        report = self.data.report()
        state = PolicyAndLedger.of(
            self.home, report.fingerprint if report else "", self._ledger, self.store.answers.measured_today()
        )
        self._ledger = state.ledger
        return state

    def _spending(self, policy_and_ledger: PolicyAndLedger) -> list[Spending]:
        ledger = policy_and_ledger.ledger
        if ledger is None:
            return []
        updates = self.store.unprotected()
        return [spending(ledger, policy_and_ledger.policy, name, updates=updates) for name in ledger.collections()]

    def _shares_ledger(self) -> bool:
        with suppress(FederationError):  # shown as `ledger_error`
            return self.home.shares_ledger
        return False

    def _lines(self) -> list[Mapping[str, object]]:
        lines = last_lines(self.home.path, LINES)
        return [{"at": line.at, "number": line.number, "entry": line.entry} for line in reversed(lines)]

    def _doctor(self) -> list[Finding]:
        if time.monotonic() - self._findings[0] > FINDINGS_S or not self._findings[1]:
            patient = Examination(self.home, network=False)
            self._findings = (time.monotonic(), checks.run_checks(patient.checks()))
        return self._findings[1]

    # ---- buttons ------------------------------------------------------------------------------------------------

    def _check_data(self, _: Parameters) -> str:
        with recording(self.home.path, "data check", {"data": (self.home.served() or ("",))[0]}, via=PAGE):
            started = self.data.start()
        return "Checking the data." if started else "Nothing has been served from this home yet."


def connection(health: Health, contact: Contact | None) -> str:
    """Describe whether this hospital is connected, and since when."""
    if health.alive and health.connected:
        return f"Connected to the coordinator since {moment(health.since)}."
    last = "There has been no session with the coordinator yet."
    if contact is not None:
        ended = contact.until or contact.since
        last = f"The last session with the coordinator ended at {moment(ended)}."
    if health.alive:
        return f"The service is running and trying to connect ({health.why or 'no session yet'}). {last}"
    return f"The service cannot send: {health.why}. {last}"


def _as_of(health: Health, contact: Contact | None) -> float | None:
    """Return the time of the headline's data if there is no session now, otherwise None."""
    if (health.alive and health.connected) or contact is None:
        return None
    return contact.until or contact.since


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Decisions:
    """Runs that need this hospital's approval. Its buttons act like `silo approve`, and only on what was shown.

    current_policy: returns the policy and ledger to check them against.
    """

    home: Home
    store: SiloStore
    current_policy: Callable[[], PolicyAndLedger]

    def waiting(self, policy_and_ledger: PolicyAndLedger) -> tuple[dict[str, PendingDecision], int]:
        """Return the pending runs by an id for the page, oldest first, and the number of further ones."""
        undecided = [a for a in self.store.approvals.all() if a.decided is None]
        shown = {_id(a): PendingDecision.of(a, policy_and_ledger) for a in undecided[:_MAX_SHOWN]}
        return shown, len(undecided) - len(shown)

    def decided(self) -> list[Approval]:
        """Return the newest decisions, newest request first."""
        return [a for a in reversed(self.store.approvals.all()) if a.decided is not None][:_MAX_SHOWN]

    def action(self, approve: bool) -> Action:
        return Action(self._digest, lambda form: self._decide(form, approve))

    def _find(self, form: Mapping[str, str]) -> Approval | None:
        """Find a run by the id in its form, since a run's own id may be any text."""
        return next((a for a in self.store.approvals.all() if _id(a) == form.get("question")), None)

    def _digest(self, form: Mapping[str, str]) -> str | None:
        decision = self._find(form)
        return None if decision is None else PendingDecision.of(decision, self.current_policy()).digest

    def _decide(self, form: Mapping[str, str], approve: bool) -> str:
        """Decide, with a line in the audit log; raises ChangedError if the run was decided in the meantime."""
        decision = self._find(form)
        if decision is None:
            raise ChangedError("This run no longer needs a decision.")
        run, manifest = decision.run_id, decision.manifest_digest
        about = {"run": run, "deny": not approve, "reason": f"manifest {manifest[:16]}"}
        with recording(self.home.path, _APPROVE, about, via=PAGE):
            made = self.store.approvals.decide_waiting(run, manifest, approve)
            if made is None:
                raise ChangedError(f"Run {run} was decided in the meantime.")
        name = f"{made.name} ({run})"
        return (
            f"{name} is approved: it may train here."
            if approve
            else f"{name} is refused: this hospital sends it nothing."
        )


def _id(approval: Approval) -> str:
    return hashlib.sha256(f"{approval.run_id} {approval.manifest_digest}".encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class AuditPicture:
    """One audit: its name, its plot's id, and its verdicts in words."""

    audit: str
    id: str
    verdicts: tuple[str, ...]


def pictures(folder: Path | None) -> list[AuditPicture]:
    """Read the audits' verdicts and plots; empty without a folder, or if its summary cannot be read."""
    raw = None if folder is None else _read(folder / SUMMARY)
    try:
        results: Any = {} if raw is None else json.loads(raw)
        audits = {str(name): value for name, value in results.items() if isinstance(value, dict) and "picture" in value}
        made = [
            AuditPicture(name, str(value["picture"]), tuple(map(_verdict, value.get("verdicts", ()))))
            for name, value in audits.items()
        ]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return []
    return made[:_MAX_PICTURES]


def picture(folder: Path | None, id: str) -> Download | None:
    """Return a plot that the summary names. Never returns another file of the folder, or a link."""
    if folder is None or id not in {shown.id for shown in pictures(folder)} or Path(id).name != id:
        return None
    content = _read(folder / id)
    if content is None or not content.startswith(b"\x89PNG\r\n"):
        return None
    return Download(id, "image/png", content)


def _verdict(raw: Mapping[str, object]) -> str:
    audit, expected, measured = (str(raw[key]) for key in ("audit", "expected", "found"))
    if raw["holds"] is None:
        return f"{audit}: {measured} ({expected})"
    return f"{audit}: {'passed' if raw['holds'] else 'failed'} (expected {expected}, measured {measured})"


def _read(path: Path) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        content = file.read(_MAX_BYTES + 1)
    return content if len(content) <= _MAX_BYTES else None
