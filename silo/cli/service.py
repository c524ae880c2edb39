"""The commands of `silo`. Each prints tables or lines, or with --json one JSON object (`serve`: one per event).

Commands that train or read images import torch themselves: the others answer at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fl_core.errors import ConfigError
from service_core import startup
from service_core.audit_log import commands as audit_log
from service_core.audit_log.local_commands import record_commands
from service_core.command_line import made_command, version_option
from service_core.console import print_json
from service_core.operations import logs
from service_core.operations.exit_status import status_of
from service_core.pki.identity import colons, identity_of
from silo.cli import audit, backup, console, doctor, ledger, page, peers, policy
from silo.cli.options import (
    AnswerAfterOption,
    DataRootOption,
    HomeOption,
    ImageCacheOption,
    JsonOption,
    LogFormatOption,
    MetricsBudgetsOption,
    MetricsOption,
    PageOption,
    PulseFloorOption,
    grey_window,
    label_space,
    metrics_address,
)
from silo.identity.identity import SiloIdentity
from silo.storage.home import Home
from silo.storage.store import Store

Classes = Annotated[
    str | None,
    typer.Option("--classes", help="The run's label space, in order, for instance nevus,melanoma.", metavar="A,B,..."),
]
Reference = Annotated[
    str, typer.Argument(help="digits/hospital2, isic2019/center3, folder:PATH or manifest:FILE.csv.", metavar="REF")
]


def _log_of(home: Path | None) -> audit_log.Side:
    place = Home.at(home).path
    identity = SiloIdentity(place)
    return audit_log.Side(place, lambda: identity.load().identity.uri, identity.authority_pem)


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="One hospital's part of a federation: join it, serve data that never leaves, see what came of it. "
    "`coordinator explain CODE` explains every error.",
)
app.callback()(version_option)
data = typer.Typer(no_args_is_help=True, help="Look at data before it is served.")
app.add_typer(data, name="data")
app.add_typer(ledger.app, name="ledger")
app.add_typer(policy.app, name="policy")
app.add_typer(peers.app, name="peers")
app.add_typer(
    audit_log.make_app(_log_of, help="The audit log: who called or ordered what, when, and with which outcome."),
    name="log",
)
app.command()(policy.approve)
app.command()(audit.audit)
app.command()(backup.backup)
app.command()(backup.restore)
app.command()(doctor.doctor)
app.command()(doctor.health)
app.command()(page.page)


@app.command()
def join(
    token: Annotated[
        str | None,
        typer.Argument(
            help="The invitation, one line that begins with consilium1. Who is on this machine can read it there: "
            "better --token-file, or - for standard input."
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file that holds the invitation; - reads standard input.")
    ] = None,
    signed: Annotated[
        Path | None, typer.Option("--signed", help="The answer to `silo request`, where no invitation is given out.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option("--authority", help="The authority's fingerprint, from the lead; another is refused.")
    ] = None,
    home: HomeOption = None,
    again: Annotated[
        bool, typer.Option("--again", help="Make a new key although this home has a certificate.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Become a member: make a key that never leaves this machine and have it certified by the coordinator.

    The invitation comes from the lead (coordinator invite NAME). An interrupted join can simply be repeated.
    """
    if [token, token_file, signed].count(None) != 2:
        raise ConfigError("E-CFG-02", "expected a TOKEN, --token-file FILE or --signed FILE: give one of them")
    from silo.service import enrolment

    silo_home = Home.at(home)
    if signed is not None:
        peer = enrolment.install_signed(_read_file(signed), silo_home, fingerprint)
    else:
        text = token if token not in (None, "-") else _read_file(token_file)
        peer = enrolment.join(text, silo_home, again, fingerprint)
    authority = SiloIdentity(silo_home.path).ca_fingerprint()
    console.answer(
        as_json,
        {
            "silo": peer.identity.name,
            "identity": peer.identity.uri,
            "fingerprint": peer.fingerprint,
            "authority_fingerprint": authority,
            "certificate_until": peer.not_after.timestamp(),
            "home": str(silo_home.path),
        },
        [
            ("joined", str(peer.identity)),
            ("home", str(silo_home.path)),
            ("fingerprint", colons(peer.fingerprint)),
            ("authority", colons(authority)),
            ("certificate", f"until {peer.not_after:%Y-%m-%d %H:%M} UTC, renewed by `silo serve`"),
            ("next", "compare the authority's fingerprint with the lead's, then: silo serve --data REF"),
        ],
    )


def _read_file(file: Path | None) -> str:
    if file is None or str(file) == "-":
        return sys.stdin.read()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "E-CFG-02", f"expected text in the file {file}, found none that can be read: {error}"
        ) from error


@app.command()
def request(
    out: Annotated[Path, typer.Option("--out", help="The file to write, for the lead.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key that never leaves this machine, and a request for its certificate that is carried by hand.

    For consortia whose authority is kept off the network: the lead answers with a file for `silo join --signed`.
    """
    from silo.service.enrolment import write_request

    digest = write_request(Home.at(home), out)
    console.answer(
        as_json,
        {"file": str(out), "fingerprint": digest},
        [("request", str(out)), ("fingerprint", colons(digest)), ("next", "give the file to the lead")],
    )


@app.command()
def serve(
    data: Annotated[str, typer.Option("--data", help="What to serve, for instance isic2019/center3.", metavar="REF")],
    data_root: DataRootOption = None,
    home: HomeOption = None,
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto: a GPU if there is one.")
    ] = "auto",
    nominal_size: Annotated[
        float | None,
        typer.Option("--nominal-size", help="Number of training examples or patients to declare. Default: rounded up."),
    ] = None,
    holds: Annotated[
        str | None,
        typer.Option(
            "--holds",
            help="Classes to declare as held here, A,B,..., to the coordinator: a round waits longer for the only "
            "hospital that has one, and a private run must be over all of them, unless [privacy] labels says more.",
        ),
    ] = None,
    no_prototypes: Annotated[
        bool, typer.Option("--no-prototypes", help="Never submit class prototypes, whatever a run asks for.")
    ] = False,
    answer_after: AnswerAfterOption = 0.0,
    pulse_floor: PulseFloorOption = 1.0,
    image_cache: ImageCacheOption = 4.0,
    metrics: MetricsOption = None,
    metrics_budgets: MetricsBudgetsOption = False,
    show_page: PageOption = False,
    log_format: LogFormatOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take part in runs until told to stop.

    Ctrl-C or SIGTERM ends in good order: an upload under way is finished, training is handed back, finished work stays
    on disk. A second one ends at once. Image size, label space and schedule come from each run's manifest.
    """
    startup.end_on_interrupt()
    from silo.cli import foreground
    from silo.service.service import SiloSettings

    silo_home = Home.at(home)
    settings = SiloSettings(
        silo_home,
        data,
        data_root,
        device,
        nominal_size,
        not no_prototypes,
        answer_after,
        pulse_floor,
        tuple(label_space(holds) or ()),
        metrics_address(metrics, metrics_budgets),
        metrics_budgets,
        image_cache,
    )
    foreground.serve(settings, as_json, log_format=logs.chosen(log_format), page=show_page)


@data.command()
def check(
    reference: Reference,
    data_root: DataRootOption = None,
    classes: Classes = None,
    window: Annotated[
        str | None, typer.Option("--window", help="CENTRE,WIDTH of DICOM's grey values, as the run declares them.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep/--no-deep", help="Decode every image to its end, and compare all of them.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Look for everything that would stop a run; exit status 2 when something would.

    Broken images, bad rows, unknown classes, the same pixels in train and test. Shown as well: what is not read,
    classes without images, images stored twice.
    """
    from fl_core import datasets
    from fl_core.extensions import loading

    reference = loading.load_of_reference(reference)
    report = datasets.check(
        reference,
        datasets.DataRequest(label_space(classes), window=grey_window(window)),
        data_root=data_root,
        deep=deep,
    )
    if as_json:
        print_json(console.report_json(report))
    else:
        console.show_report(report)
    report.require_sound()


@data.command()
def describe(
    reference: Reference, data_root: DataRootOption = None, classes: Classes = None, as_json: JsonOption = False
) -> None:
    """Show shape, classes and counts per split."""
    from fl_core import datasets
    from fl_core.extensions import loading

    reference = loading.load_of_reference(reference)
    loaded = datasets.load(reference, datasets.DataRequest(label_space(classes)), data_root=data_root)
    report = datasets.check(reference, datasets.DataRequest(label_space(classes)), data_root=data_root)
    if as_json:
        print_json(console.report_json(report, loaded.schema))
    else:
        console.show_report(report, loaded.schema)


@app.command()
def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show identity, connection, outbox, and what this hospital measured of each model it received.

    These measurements are in no message that names this hospital; they can be read here alone.
    """
    silo_home = Home.at(home)
    identity = SiloIdentity(silo_home.path)
    own = identity.load()
    addresses = [str(address) for address in silo_home.addresses()]
    store = Store(silo_home.database)
    try:
        if as_json:
            print_json(console.status_json(own, addresses, identity.renewal_due(), store))
        else:
            console.show_status(own, addresses, identity.renewal_due(), store)
    finally:
        store.close_database()


@app.command()
def fingerprint(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show the fingerprints that two hospitals read to each other: own, the authority's, and every peer's."""
    identity = SiloIdentity(Home.at(home).path)
    own, authority = identity.load(), identity.ca_fingerprint()
    accepted = {name: identity_of(pem).fingerprint for name, pem in sorted(identity.peers().items())}
    if as_json:
        print_json(
            {"silo": own.identity.name, "fingerprint": own.fingerprint, "authority": authority, "roster": accepted}
        )
        return
    console.show_facts([(own.identity.name, colons(own.fingerprint)), ("authority", colons(authority))])
    console.show_rows("Accepted peers", ("silo", "key"), [(name, colons(key)) for name, key in accepted.items()])


READING = frozenset(
    (
        "serve",
        "status",
        "doctor",
        "health",
        "page",
        "fingerprint",
        "audit",
        "data",
        "log",
        "ledger show",
        "ledger verify",
        "policy",
        "peers show",
    )
)
"""Commands without a line in the audit log: they change nothing here, or the service writes it."""
record_commands(app, READING, lambda home: Home.at(home).path)


def run(words: list[str]) -> int:
    """Run one command line and return its exit status."""
    return status_of(lambda: made_command(app)(words, prog_name="silo"))
