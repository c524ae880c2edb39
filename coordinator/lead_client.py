"""The lead's side of the wire, for the command line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc

from coordinator.paths import ADDRESS_FILE
from coordinator.pki.authority import FOLDER, Authority
from fl_core.errors import ConfigError, FederationError, ProtocolError, UnavailableError
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.pki.identity import Address
from protos.storage.digests import file_digest
from protos.storage.private_files import Credentials
from protos.tls import connect
from protos.wire import status
from protos.wire.channel_options import CLIENT_OPTIONS
from protos.wire.chunks import append_chunk

Reply = TypeVar("Reply")
_DEADLINE_S = 20.0
_SUBMIT_DEADLINE_S = 120.0  # the service builds the model and runs it dry once
_WATCH_RETRY_S = 1.0
_WATCH_PATIENCE_S = 120.0
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where a service on all addresses is reached from here


class LeadClient:
    """Commands to a running coordinator. Every error is a FederationError; a failed connection is explained."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self.address = address
        self._credentials = credentials
        secure = grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.cert_pem)
        self._channel = grpc.secure_channel(str(address), secure, CLIENT_OPTIONS)
        self._lead = rpc.LeadStub(self._channel)
        self._transfer = rpc.TransferStub(self._channel)

    @classmethod
    def open(cls, home: Path, lead: str | None = None) -> LeadClient:
        """Connect to the service that runs on a home, as the lead whose certificate is there.

        Raises UnavailableError (E-NET-01) when no service runs there; ConfigError (E-ID-11) without a certificate.
        """
        authority = Authority.open(home)
        found = sorted(p.stem.removeprefix("lead-") for p in (home / FOLDER).glob("lead-*.pem"))
        if not found or (lead is not None and lead not in found):
            raise ConfigError(
                "E-ID-11", f"expected a lead's certificate in {home / FOLDER}, found {', '.join(found) or 'none'}"
            )
        try:
            about = json.loads((home / ADDRESS_FILE).read_text())
            host, port = Address.parse(about["address"]).host, int(about["port"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UnavailableError(
                "E-NET-01", f"expected a coordinator running on {home}, found none: start it (coordinator serve)"
            ) from None
        return cls(Address(_LOCAL.get(host, host), port), authority.lead_credentials(lead or found[0]))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    # ---- commands --------------------------------------------------------------------------------------------------

    def submit(self, spec_json: str, request_id: str) -> pb.RunInfo:
        """Submit a run; repeating it with the same request id is safe."""
        request = pb.SubmitRequest(spec_json=spec_json, request_id=request_id)
        return self._call(self._lead.Submit, request, _SUBMIT_DEADLINE_S)

    def runs(self) -> Sequence[pb.RunInfo]:
        """List all runs, newest first."""
        return self._call(self._lead.Runs, pb.RunsRequest()).runs

    def show(self, run: str = "latest") -> pb.RunDetail:
        """Show a run, by id, name or `latest`."""
        return self._call(self._lead.Show, pb.RunQuery(run_id=run))

    def abort(self, run: str) -> pb.RunInfo:
        """End a run for good."""
        return self._call(self._lead.Abort, pb.RunQuery(run_id=run))

    def resume(self, run: str) -> pb.RunInfo:
        """Let a failed run go on at its last closed round; raises StateError (E-RUN-11) when it has not failed."""
        return self._call(self._lead.Resume, pb.RunQuery(run_id=run))

    def silos(self) -> pb.SiloList:
        """List the silos and the open invitations."""
        return self._call(self._lead.Silos, pb.SilosRequest())

    def watch(self, run: str = "latest", after: int = 0) -> Iterator[pb.Event]:
        """Follow a run until it ends; a cut stream goes on after the last event seen.

        Raises the error of the connection once the service has been away for two minutes.
        """
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

    def fetch(self, digest: str, path: Path) -> None:
        """Write an object to a file; raises ProtocolError (E-WIRE-04) when what arrives is not that object."""
        have = 0
        with path.open("wb") as file, self._errors():
            for chunk in self._transfer.Get(pb.GetRequest(digest=digest)):
                have = append_chunk(chunk, file, have)
        if file_digest(path) != digest:
            path.unlink()
            raise ProtocolError("E-WIRE-04", f"expected the object {digest[:16]}, found other bytes: fetch it again")

    # ---- errors ----------------------------------------------------------------------------------------------------

    def _call(self, method: Callable[..., Reply], request: object, seconds: float = _DEADLINE_S) -> Reply:
        with self._errors():
            return method(request, timeout=seconds)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._explain(error) from error

    def _explain(self, error: grpc.RpcError) -> FederationError:
        """Turn a failed call into the error that the service raised, or into why it could not be reached."""
        if not isinstance(error, grpc.Call):
            return UnavailableError("E-NET-01", f"the call failed: {error}")
        answer = status.from_status(error.code().name, error.details())
        if answer.code != "E-NET-01" or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return answer
        own = self._credentials
        found = connect.diagnose(self.address.host, self.address.port, own.ca_pem, own.cert_pem, own.key_pem)
        return answer if found.ok else found.error()
