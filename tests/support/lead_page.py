"""The lead's page in front of a service, or of answers that a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from coordinator.lead.client import LeadClient, credentials_of
from coordinator.lead.page.exports import Exporter
from coordinator.lead.page.overview import OwnCertificates
from coordinator.lead.page.service_watch import ServiceWatch
from coordinator.lead.page.site import LeadPage, own_certificates
from protos.consilium.v1 import federation_pb2 as pb
from service_core.web.serve import PageServer
from tests.support.web import Browser


@dataclass
class MadeUpService:
    """Answers of a service, as a lead's client gives them. error: raised instead, while it is set."""

    silo_list: pb.SiloList = field(default_factory=pb.SiloList)
    details: list[pb.RunDetail] = field(default_factory=list)
    happened: Sequence[pb.Event] = ()
    error: Exception | None = None
    asked: int = 0

    def __call__(self) -> MadeUpService:
        return self

    def silos(self) -> pb.SiloList:
        self.asked += 1
        self._fail()
        return self.silo_list

    def runs(self) -> list[pb.RunInfo]:
        self._fail()
        return [detail.info for detail in self.details]

    def show(self, run: str) -> pb.RunDetail:
        self._fail()
        return next(detail for detail in self.details if detail.info.run_id == run)

    def events(self, run: str, after: int = 0) -> list[pb.Event]:
        self._fail()
        return [event for event in self.happened if event.number > after]

    def close(self) -> None:
        pass

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


@contextmanager
def shown(
    connect: Callable[[], LeadClient | MadeUpService],
    folder: Path,
    own: OwnCertificates | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[tuple[PageServer, ServiceWatch]]:
    """Serve the page of a lead. connect: makes the client that it asks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    watch = ServiceWatch(connect)  # type: ignore[arg-type]
    exporter = Exporter(arguments)
    own = own or OwnCertificates("anna", 2e9, 3e9)
    page = LeadPage(watch, connect, exporter, own, "skin-study")  # type: ignore[arg-type]
    watch.start()
    try:
        with PageServer(page.site(), folder) as server:
            yield server, watch
    finally:
        watch.stop()
        exporter.close()


@contextmanager
def shown_for(home: Path, folder: Path) -> Iterator[PageServer]:
    """Serve the page of the lead of a real service's home."""
    own, _ = own_certificates(credentials_of(home))
    connect = partial(LeadClient.open, home, own.lead)
    with shown(connect, folder, own, ["--home", str(home)]) as (server, _):
        yield server


def opened(server: PageServer) -> Browser:
    return Browser(server).open()
