"""Checks shared by `coordinator doctor` and `silo doctor`. None of them changes anything."""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import socket
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path

from fl_core.errors import ConfigError, FederationError
from service_core.console import OUT, CommandResult, printable, wrap_parts
from service_core.operations.health import HealthAnswer
from service_core.pki.certificates import utc_now
from service_core.pki.identity import Address, identity_of
from service_core.storage.disk import RESERVE_BYTES, available
from service_core.storage.generation import GenerationFile, open_untouched
from service_core.storage.private_files import OTHERS, Credentials
from service_core.storage.unfinished import marker_of
from service_core.tls import causes
from service_core.tls.causes import ConnectionFailedError
from service_core.tls.connect import diagnose
from service_core.tls.proxy import open_connection, proxy_for
from service_core.version import PROTOCOL, software

TIMEOUT_S = 10.0
_FEW_INODES = 10_000
_EXPIRES_SOON = timedelta(days=14)
_OFFSET_WARNING_S, _OFFSET_PROBLEM_S = 30.0, 300.0
_CHARACTERS = 1000
_PORTS = 65536


class FindingLevel(Enum):
    """Severity: a problem stops the service from working, a warning may do so later."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and what to do; remedy is empty if nothing is to be done."""

    check: str
    level: FindingLevel
    found: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(check: str, text: str) -> Finding:
    return Finding(check, FindingLevel.OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, FindingLevel.WARNING, text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, FindingLevel.PROBLEM, text, remedy)


def run_checks(checks: Mapping[str, Check]) -> list[Finding]:
    """Run all checks; an error in one becomes its finding."""
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except FederationError as error:
            findings.append(problem(name, str(error), f"coordinator explain {error.code}"))
        except Exception as error:  # one failing check must not hide the others
            remedy = "check the file or machine named here, then run this again"
            findings.append(problem(name, f"{type(error).__name__}: {error}", remedy))
    return findings


def report(findings: Iterable[Finding]) -> CommandResult:
    """Make the reply of `doctor`; exit status 1 if there is a problem."""
    shown = [_printable(finding) for finding in findings]
    sick = any(finding.level is FindingLevel.PROBLEM for finding in shown)
    rows = [asdict(finding) | {"level": finding.level.value} for finding in shown]
    texts = [f"{f.level.value:<8} {f.check:<12} {f.found}" + (f"; {f.remedy}" if f.remedy else "") for f in shown]
    lines = [line for text in texts for line in (wrap_parts([text], OUT.width) if OUT.is_terminal else [text])]
    return CommandResult({"healthy": not sick, "findings": rows}, lines, status=int(sick))


def _printable(finding: Finding) -> Finding:
    def clean(text: str) -> str:
        return printable(text)[:_CHARACTERS]

    return Finding(finding.check, finding.level, clean(finding.found), clean(finding.remedy))


# ---- this machine --------------------------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    yield ok("version", f"{software()}, protocol {PROTOCOL}, Python {platform.python_version()}")


def clock(made: Mapping[str, datetime], now: datetime | None = None) -> Iterator[Finding]:
    """Compare the clock with things created earlier. made: what was created, and when."""
    time = now or utc_now()
    later = {what: when for what, when in made.items() if when > time + timedelta(minutes=5)}
    if later:
        what, when = max(later.items(), key=lambda item: item[1])
        yield problem(
            "clock",
            f"this machine's clock says {time:%Y-%m-%d %H:%M} UTC, but {what} was made on {when:%Y-%m-%d %H:%M} UTC",
            "set the clock (timedatectl set-ntp true)",
        )
    else:
        yield ok("clock", f"{time:%Y-%m-%d %H:%M:%S} UTC")


def disk(folder: Path) -> Iterator[Finding]:
    """Check free space and inodes on the disk of a folder, which need not exist yet."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    room, facts = available(place), os.statvfs(place)
    free = f"{facts.f_bavail * facts.f_frsize >> 20} MiB free on the disk of {place}"
    remedy = "free some space: old backups, logs or exported models, but nothing inside the home"
    if room <= 0:
        yield problem("disk", f"{free}, less than the reserve", remedy)
    elif room < RESERVE_BYTES:
        yield warning("disk", f"{free}, little more than the reserve", remedy)
    else:
        yield ok("disk", free)
    if facts.f_files and facts.f_favail < _FEW_INODES:  # some file systems count none
        level = problem if facts.f_favail == 0 else warning
        yield level("inodes", f"room for {facts.f_favail} more files on the disk of {place}", "delete small files")


def file_modes(home: Path, files: Iterable[Path], keys: Iterable[Path]) -> Iterator[Finding]:
    """Check that other users can read neither the keys nor the home's files, and that this user owns them all."""
    enters = home.exists() and _is_open(home)
    open_ones = [path for path in files if enters and path.exists() and _is_open(path)]
    open_ones += [path for path in keys if path.exists() and _is_open(path)]
    foreign = [path for path in (home, *files, *keys) if path.exists() and path.stat().st_uid != os.geteuid()]
    if open_ones:
        names = " ".join(shlex.quote(str(path)) for path in (home, *open_ones))
        yield problem("modes", f"other users of this machine can open {names}", f"chmod go-rwx {names}")
    if foreign:
        text = f"{foreign[0]} belongs to user {foreign[0].stat().st_uid}, but this is user {os.geteuid()}"
        yield warning("owner", text, "run this as the service's user")
    if not open_ones and not foreign:
        yield ok("modes", f"only the owner can open the private files in {home}")


def _is_open(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & OTHERS)


def database(path: Path, rehearse: Callable[[], object]) -> Iterator[Finding]:
    """Check a database with SQLite, also while a service uses it.

    rehearse: opens and reads a copy as the service does, and raises the same errors.
    """
    if not path.exists() and GenerationFile(path).read() is None:
        rehearse()
        yield warning("database", f"no database yet at {path}", "the service creates it; if there was one, restore it")
        return
    try:
        GenerationFile(path).require_file()
        with closing(open_untouched(path)) as db:
            wrong = [str(row[0]) for row in db.execute("PRAGMA quick_check(3)") if row[0] != "ok"]
    except sqlite3.Error as error:
        wrong = [str(error)]
    if wrong:
        yield problem("database", f"{path} is damaged: {'; '.join(wrong)}", "restore it from a backup")
    else:
        rehearse()
        yield ok("database", f"{path} is sound")


def interrupted_command(home: Path) -> Iterator[Finding]:
    """Report a command that was interrupted while it filled the home; nothing otherwise."""
    if (left := marker_of(home)) is not None:
        yield problem("home", f"a command was interrupted while it filled {home}", f"run it again: {left.again}")


# ---- certificates --------------------------------------------------------------------------------------------------


def certificate(what: str, credentials: Credentials, renewed: str, now: datetime | None = None) -> Iterator[Finding]:
    """Check that a certificate is valid, issued by this authority and matches its key. renewed: how to renew it."""
    time = now or utc_now()
    if (
        wrong := causes.own_certificate(credentials.cert_pem, credentials.key_pem, credentials.ca_pem, time)
    ) is not None:
        yield problem("certificate", f"{what}: {wrong.code}: {wrong.explanation}", wrong.remedy)
        return
    peer = identity_of(credentials.cert_pem)
    left = peer.not_after - time
    text = f"{what}: {peer.identity}, {left.days} days left"
    if left < _EXPIRES_SOON:
        yield warning("certificate", text, renewed)
    else:
        yield ok("certificate", text)


# ---- network -------------------------------------------------------------------------------------------------------


def host_and_port(bind: str) -> tuple[str, int]:
    """Parse `--bind`; raises ConfigError (E-CFG-02) on anything but HOST:PORT and [V6]:PORT."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:/\[\]\s]+)):([0-9]{1,5})", bind)
    if match is None or int(match[3]) >= _PORTS:
        raise ConfigError(
            "E-CFG-02", f"--bind: expected HOST:PORT such as 0.0.0.0:8443 or [::]:8443, found {bind[:80]!r}: correct it"
        )
    return match[1] or match[2], int(match[3])


def try_to_bind(bind: str) -> None:
    """Bind an address and release it at once; raises OSError if that fails, and as `host_and_port`."""
    host, number = host_and_port(bind)
    family, kind, proto, _, where = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)


def port(bind: str) -> Iterator[Finding]:
    """Check that an address can be bound; it is released at once."""
    try:
        try_to_bind(bind)
    except (OSError, ConfigError) as error:
        text = f"{bind} cannot be bound ({error})"
        yield problem("port", text, "stop the other program, or choose another address with --bind")
    else:
        yield ok("port", f"{bind} is free")


def proxy(addresses: Iterable[Address]) -> Iterator[Finding]:
    """Check that the proxy that the environment names, if any, opens a tunnel."""
    for address in addresses:
        through = proxy_for(address.host)
        if through is None:
            yield ok("proxy", f"none on the way to {address}")
            continue
        host, number, variable = through  # never the whole value: it may contain a password
        try:
            open_connection(address.host, address.port, TIMEOUT_S).close()
        except ConnectionFailedError as error:
            diagnosis = error.diagnosis
            yield problem("proxy", f"{diagnosis.code}: {diagnosis.explanation}", diagnosis.remedy)
        else:
            yield ok("proxy", f"{host}:{number} ({variable}) opens a tunnel to {address}")


def reachable(address: Address, credentials: Credentials) -> Iterator[Finding]:
    """Connect by TLS as the service does, and report why that fails."""
    diagnosis = diagnose(
        address.host, address.port, credentials.ca_pem, credentials.cert_pem, credentials.key_pem, timeout=TIMEOUT_S
    )
    if diagnosis.ok:
        yield ok("reachability", diagnosis.explanation)
    else:
        yield problem("reachability", f"{diagnosis.code}: {diagnosis.explanation}", diagnosis.remedy)


def other_side(answer: HealthAnswer, place: str) -> Iterator[Finding]:
    """Check a coordinator's health answer, clock and version."""
    if answer.serving:
        yield ok("coordinator", f"{place} accepts calls")
    else:
        why = ", ".join(answer.problems) or "no reason given"
        yield problem("coordinator", f"{place} answers but is not ready ({why})", "its operator: coordinator doctor")
    if answer.offset_s is None or not math.isfinite(answer.offset_s):
        yield warning(
            "offset", f"{place} does not report its time", "it has an older version: compare the clocks by hand"
        )
    else:
        level = abs(answer.offset_s)
        text = f"the clock of {place} is {level:.1f} s {'ahead' if answer.offset_s > 0 else 'behind'}"
        make = problem if level > _OFFSET_PROBLEM_S else warning
        yield make("offset", text, "set the wrong one") if level > _OFFSET_WARNING_S else ok("offset", text)
    if answer.protocol is None:
        yield warning("versions", f"{place} does not report its version", "ask its operator to upgrade")
    elif answer.protocol != PROTOCOL:
        older = "this side" if answer.protocol > PROTOCOL else "that side"
        text = f"protocol {PROTOCOL} here, {answer.protocol} at {place} ({answer.software})"
        yield problem("versions", text, f"upgrade {older}")
    elif answer.software != software():
        text = f"protocol {PROTOCOL} on both sides, {software()} here, {answer.software or 'no version given'} there"
        yield warning("versions", text, "both work together; install the same commit on both sides")
    else:
        yield ok("versions", f"protocol {PROTOCOL} and {software()} on both sides")
