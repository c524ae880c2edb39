"""Lead: the consortium's own commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc

from coordinator.api import messages
from coordinator.api.authorization import Authorizer
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.scheduler import RunScheduler
from coordinator.storage.records import Run
from coordinator.storage.store import Store
from fl_core.errors import ConfigError
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc

BuildManifest = Callable[[str, list[pb.SiloInfo]], RunManifest]
"""From a submitted configuration (JSON) and the members of the consortium to the frozen manifest, or ConfigError."""

_MIN_LIVE_INTERVAL_S = 1.0
_POLL_S = 5.0


class LeadService(rpc.LeadServicer):
    """Submit, Runs, Show, Watch, Abort, Resume and Silos."""

    def __init__(
        self,
        authorizer: Authorizer,
        store: Store,
        dispatcher: Dispatcher,
        runs: RunScheduler,
        build_manifest: BuildManifest,
    ) -> None:
        self._authorizer = authorizer
        self._store = store
        self._dispatcher = dispatcher
        self._runs = runs
        self._build_manifest = build_manifest

    def Submit(self, request: pb.SubmitRequest, context: grpc.ServicerContext) -> pb.RunInfo:  # noqa: N802
        """Freeze a run and queue it; the same request id is the same run."""
        if not request.request_id:
            raise ConfigError("E-CFG-02", "expected a request id, found none: choose a new one for each new run")
        known = self._store.runs.of_request(request.request_id)
        if known is not None and known.spec == request.spec_json:
            return self._info(known)
        with self._runs.model_lock:
            manifest = self._build_manifest(request.spec_json, self._silos(revoked=False))
        manifest = replace(manifest, lead=self._authorizer.caller(context).identity.name)
        return self._info(self._runs.submit(manifest, request.spec_json, request.request_id))

    def Runs(self, request: pb.RunsRequest, context: grpc.ServicerContext) -> pb.RunList:  # noqa: ARG002, N802
        """List all runs, newest first."""
        return pb.RunList(runs=[self._info(self._runs.with_model_digest(run)) for run in self._store.runs.all()])

    def Show(self, request: pb.RunQuery, context: grpc.ServicerContext) -> pb.RunDetail:  # noqa: ARG002, N802
        """Show one run with its manifest and its closed rounds."""
        run = self._runs.with_model_digest(self._store.runs.find(request.run_id))
        noise = messages.stored_result_noise(run.manifest)
        rounds = [messages.round_info(row, noise) for row in self._store.runs.rounds(run.id)]
        return pb.RunDetail(info=self._info(run), manifest_json=run.manifest, rounds=rounds)

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Event]:  # noqa: N802
        """Stream a run's events after a number until it ends, and between them what its silos are doing.

        The live events have kind "silo", no silo of their own and the number of the last stored event.
        """
        run = self._store.runs.find(request.run_id)
        last, changes, shown = request.after, -1, list[pb.SiloInfo]()
        while context.is_active():
            changes = self._dispatcher.changes.wait(changes, _POLL_S)
            run = self._store.runs.get(run.id)
            for row in self._store.runs.events(run.id, last):
                last = row.number
                yield messages.event(row, self._store)
            if run.state.ended:
                return
            live = self._members(run)
            if [_activity(s) for s in live] != [_activity(s) for s in shown]:
                shown = live
                yield pb.Event(
                    number=last, at_unix=time.time(), run_id=run.id, kind="silo", round=run.closed, silos=live
                )
                self._pause(_MIN_LIVE_INTERVAL_S, run.id, last)

    def _pause(self, seconds: float, run_id: str, last: int) -> None:
        """Wait so that heartbeats are shown together; a stored event ends the wait."""
        until, changes = time.monotonic() + seconds, self._dispatcher.changes.count()
        while (left := until - time.monotonic()) > 0 and not self._store.runs.events(run_id, last):
            changes = self._dispatcher.changes.wait(changes, left)

    def Abort(self, request: pb.RunQuery, context: grpc.ServicerContext) -> pb.RunInfo:  # noqa: ARG002, N802
        """End a run for good."""
        return self._info(self._runs.with_model_digest(self._runs.abort(request.run_id)))

    def Resume(self, request: pb.RunQuery, context: grpc.ServicerContext) -> pb.RunInfo:  # noqa: ARG002, N802
        """Let a failed run go on at its last closed round."""
        return self._info(self._runs.with_model_digest(self._runs.resume(request.run_id)))

    def Silos(self, request: pb.SilosRequest, context: grpc.ServicerContext) -> pb.SiloList:  # noqa: ARG002, N802
        """List the silos, whether each is online, and the open invitations."""
        invitations = [
            pb.InvitationInfo(name=i.name, expires_unix=i.expires) for i in self._store.members.invitations()
        ]
        return pb.SiloList(silos=self._silos(revoked=True), invitations=invitations)

    def _info(self, run: Run) -> pb.RunInfo:
        return messages.run_info(run, self._store)

    def _silos(self, revoked: bool) -> list[pb.SiloInfo]:
        now = time.time()
        silos = self._store.members.silos()
        return [messages.silo_info(s, self._dispatcher, now) for s in silos if revoked or not s.revoked]

    def _members(self, run: Run) -> list[pb.SiloInfo]:
        return [s for s in self._silos(revoked=True) if s.name in run.members]


def _activity(silo: pb.SiloInfo) -> tuple[object, ...]:
    return silo.name, silo.state, silo.activity, silo.run_id, silo.round, silo.done, silo.total
