"""The gRPC client of the command line."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import grpc

from coordinator.operations.health import ask
from coordinator.pki.authority import FOLDER, Authority
from fl_core.errors import ConfigError, FederationError, ProtocolError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire import status
from protos.wire.channel_options import LEAD_OPTIONS
from protos.wire.chunks import append_chunk, encode, read_chunks
from service_core.operations.health import HealthAnswer
from service_core.pki.identity import Address
from service_core.storage.digests import file_digest
from service_core.storage.private_files import Credentials
from service_core.tls import connect

ADDRESS_FILE = "service.json"
"""The service's address, in its home; written when it listens."""
Response = TypeVar("Response")
MAIN_LEAD, LEAD_ENV = "lead", "CONSILIUM_LEAD"
_DEADLINE_S = 20.0
_SUBMIT_DEADLINE_S = 120.0  # the service builds the model and does a dry run
_WATCH_RETRY_S = 1.0
_WATCH_PATIENCE_S = 120.0
_DAMAGED = 2
"""Restarts of an upload after damaged bytes."""
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where a service on all addresses is reached from here


def is_live(event: pb.Event) -> bool:
    """Tell whether an event is live: it is not stored, and comes after all stored ones."""
    return event.kind == "silo" and not event.silo


def credentials_of(home: Path, lead: str | None = None) -> Credentials:
    """Read the key and the certificate of a lead, as `LeadClient.open`; raises ConfigError (E-ID-11) without one."""
    authority = Authority.open(home)
    names = sorted(p.stem.removeprefix("lead-") for p in (home / FOLDER).glob("lead-*.pem"))
    lead = lead or os.environ.get(LEAD_ENV) or (MAIN_LEAD if MAIN_LEAD in names else None)
    if not names or (lead is not None and lead not in names):
        raise ConfigError(
            "E-ID-11", f"this lead has no certificate in {home / FOLDER}. Leads there: {', '.join(names) or 'none'}"
        )
    return authority.lead_credentials(lead or names[0])


_PAGE = 50
"""Runs requested per page."""


class LeadClient:
    """Commands to a running coordinator. Every error is a FederationError, also of a failed connection."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self.address = address
        self._credentials = credentials
        secure = grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.cert_pem)
        self._channel = grpc.secure_channel(str(address), secure, LEAD_OPTIONS)
        self._lead = rpc.LeadStub(self._channel)
        self._transfer = rpc.TransferStub(self._channel)
        self._put_weights = self._channel.stream_unary("/consilium.v1.Lead/PutWeights", encode, pb.PutReply.FromString)

    @classmethod
    def open(cls, home: Path, lead: str | None = None) -> LeadClient:
        """Connect to a home's service as a lead whose certificate is in it.

        lead: its name; by default that in CONSILIUM_LEAD, then that of `coordinator init`.
        Raises UnavailableError (E-NET-01) if no service runs there; ConfigError (E-ID-11) without a certificate.
        """
        credentials = credentials_of(home, lead)
        try:
            about = json.loads((home / ADDRESS_FILE).read_text())
            host, port = Address.parse(about["address"]).host, int(about["port"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise UnavailableError(
                "E-NET-01", f"no coordinator is running on {home}: start it (coordinator serve)"
            ) from None
        return cls(Address(_LOCAL.get(host, host), port), credentials)

    def close(self) -> None:
        self._channel.close()

    def send_weights(self, digest: str, file: Path) -> None:
        """Send weights until the service has them all; after an interruption only missing bytes.

        Raises UnavailableError if no byte gets through for two minutes; ProtocolError (E-WIRE-01) if the service's
        version accepts none.
        """
        size, best, since, damaged = file.stat().st_size, -1, time.monotonic(), 0
        while True:
            try:
                have = self._call(self._lead.OpenWeights, pb.OpenWeightsRequest(digest=digest, size=size)).have
                if have >= size:
                    return
                if have > best:
                    best, since = have, time.monotonic()
                with self._errors():
                    self._put_weights(read_chunks(file, digest, have))
            except ProtocolError as error:
                damaged += 1  # or, with E-WIRE-06, no longer open: another console of this lead may have sent the rest
                if error.code not in ("E-WIRE-04", "E-WIRE-06") or damaged > _DAMAGED:
                    raise
            except UnavailableError:
                if time.monotonic() - since > _WATCH_PATIENCE_S:
                    raise
                threading.Event().wait(_WATCH_RETRY_S)

    def submit(self, spec_json: str, request_id: str, start_from: str = "") -> pb.RunInfo:
        """Submit a configuration. start_from: the id of a run whose last model it starts from."""
        request = pb.SubmitRequest(spec_json=spec_json, request_id=request_id, start_from=start_from)
        return self._call(self._lead.Submit, request, _SUBMIT_DEADLINE_S)

    def runs(self) -> Sequence[pb.RunInfo]:
        """List all runs, newest first, page by page; a service without pages sends all at once."""
        listed: list[pb.RunInfo] = []
        token = ""
        while True:
            page = self._call(self._lead.Runs, pb.RunsRequest(page_size=_PAGE, page_token=token))
            listed.extend(page.runs)
            if page.next_page_token in ("", token):
                return listed
            token = page.next_page_token

    def show(self, run: str = "latest") -> pb.RunDetail:
        return self._call(self._lead.Show, pb.RunQuery(run_id=run))

    def abort(self, run: str) -> pb.RunInfo:
        return self._call(self._lead.Abort, pb.RunQuery(run_id=run))

    def resume(self, run: str, quorum: int = 0) -> pb.RunInfo:
        """Resume a paused or failed run; raises StateError (E-RUN-11) if it is neither. quorum: 0: as before."""
        return self._call(self._lead.Resume, pb.ResumeRequest(run_id=run, quorum=quorum))

    def exclude(self, run: str, silo: str, readmit: bool = False) -> pb.RunInfo:
        """Exclude a silo from a run, or readmit it."""
        return self._call(self._lead.Exclude, pb.ExcludeRequest(run_id=run, silo=silo, readmit=readmit))

    def extend(self, run: str, hours: float) -> pb.RunInfo:
        """Extend the open round; raises StateError (E-RUN-11) if none is open."""
        return self._call(self._lead.Extend, pb.ExtendRequest(run_id=run, hours=hours))

    def withdraw(self, silo: str, preview: bool = False) -> Sequence[pb.Withdrawal]:
        """Withdraw a hospital: its sums are taken out of the models that allow it. preview: only describe this."""
        request = pb.WithdrawRequest(silo=silo, preview=preview)
        return self._call(self._lead.Withdraw, request, _SUBMIT_DEADLINE_S).withdrawals

    def silos(self) -> pb.SiloList:
        return self._call(self._lead.Silos, pb.SilosRequest())

    def health(self) -> HealthAnswer:
        """Ask for the service's health, time and version."""
        with self._errors():
            return ask(self._channel)

    def watch(self, run: str = "latest", after: int = 0) -> Iterator[pb.Event]:
        """Yield a run's events until it ends; reconnects for up to two minutes, then raises UnavailableError."""
        run_id, last = self.show(run).info.run_id, after
        away_since: float | None = None
        while True:
            try:
                with self._errors():
                    call = self._lead.Watch(pb.WatchRequest(run_id=run_id, after=last))
                    try:
                        for event in call:
                            last, away_since = max(last, event.number), None
                            yield event
                    finally:
                        call.cancel()
                if self.show(run_id).info.state not in ("waiting", "running"):
                    return
            except UnavailableError:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _WATCH_PATIENCE_S:
                    raise
            threading.Event().wait(_WATCH_RETRY_S)

    def events(self, run: str, after: int = 0) -> list[pb.Event]:
        """Return a run's events so far. after: only events with a higher number."""
        with self._errors():
            call = self._lead.Watch(pb.WatchRequest(run_id=run, after=after), timeout=_DEADLINE_S)
            try:
                return list(takewhile(lambda event: not is_live(event), call))  # then all stored events have arrived
            finally:
                call.cancel()

    def fetch(self, digest: str, path: Path, limit: int) -> None:
        """Write an object to a file; raises ProtocolError (E-WIRE-04) if other bytes arrive, or more than `limit`."""
        have = 0
        try:
            with path.open("wb") as file, self._errors():
                for chunk in self._transfer.Get(pb.GetRequest(digest=digest)):
                    have = append_chunk(chunk, file, have)
                    if have > limit:
                        raise ProtocolError(
                            "E-WIRE-04", f"the coordinator sent more than the expected {limit} bytes: nothing was saved"
                        )
            if file_digest(path) != digest:
                raise ProtocolError("E-WIRE-04", f"the received bytes are not the object {digest[:16]}: fetch it again")
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _call(self, method: Callable[..., Response], request: object, seconds: float = _DEADLINE_S) -> Response:
        with self._errors():
            return method(request, timeout=seconds)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._explain(error) from error

    def _explain(self, error: grpc.RpcError) -> FederationError:
        """Return the error that the service raised, or the reason why it cannot be reached."""
        if not isinstance(error, grpc.Call):
            return UnavailableError("E-NET-01", f"the call failed: {error}")
        answer = status.from_status(error.code().name, error.details())
        if isinstance(answer, ProtocolError) and not answer.code.startswith("E-WIRE"):
            answer = ConfigError(answer.code, answer.message)  # has the same status, but the caller asked for it
        if answer.code != "E-NET-01" or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return answer
        mine, address = self._credentials, self.address
        diagnosis = connect.diagnose(address.host, address.port, mine.ca_pem, mine.cert_pem, mine.key_pem)
        return answer if diagnosis.ok else diagnosis.error()
