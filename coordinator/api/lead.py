"""Lead: the commands of the consortium's leads."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from coordinator.api import messages
from coordinator.api.authorization import Authorizer, Context
from coordinator.api.event_loop import Workers, wait_for, waker
from coordinator.api.open_streams import PutStream
from coordinator.runs import lineage
from coordinator.runs.dispatcher import Dispatcher
from coordinator.runs.lineage import RunLineage
from coordinator.runs.run_facts import DerivedFacts
from coordinator.runs.scheduler import RunScheduler
from coordinator.runs.withdrawal import AffectedRun, Withdrawals
from coordinator.storage.records import Contribution, StoredRun
from coordinator.storage.store import CoordinatorStore
from coordinator.storage.weights import WeightsUploads
from fl_core.errors import ConfigError, ProtocolError
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc
from protos.wire.chunks import append_chunk
from service_core.storage.object_store import open_partial
from service_core.storage.private_files import Credentials

BuildManifest = Callable[[str, list[pb.SiloInfo]], RunManifest]
"""Makes the frozen manifest of a submitted configuration (JSON) for these members; raises ConfigError."""

_MIN_LIVE_INTERVAL_S = 1.0
_POLL_S = 5.0
MAX_PAGE = 200
"""Runs in one page of a list."""
_LAST_EVENT = 2**63 - 1
"""The highest integer in SQLite: no event has a higher number."""


class LeadService(rpc.LeadServicer):
    """OpenWeights, PutWeights, Submit, Runs, Show, Watch, Abort, Resume, Exclude, Extend, Withdraw and Silos."""

    def __init__(
        self,
        authorizer: Authorizer,
        store: CoordinatorStore,
        dispatcher: Dispatcher,
        runs: RunScheduler,
        build_manifest: BuildManifest,
        workers: Workers,
        weights: WeightsUploads,
        put_idle_s: float,
        own: Callable[[], Credentials],
    ) -> None:
        """Set up. put_idle_s: idle seconds after which an upload of weights ends   own: reads the signing key."""
        self._own = own
        self._withdrawals = Withdrawals(store, runs.submit, runs.schedule_cleanup)
        self._weights = weights
        self._put_idle_s = put_idle_s
        self._authorizer = authorizer
        self._store = store
        self._dispatcher = dispatcher
        self._runs = runs
        self._build_manifest = build_manifest
        self._workers = workers

    async def OpenWeights(self, request: pb.OpenWeightsRequest, context: Context) -> pb.OpenReply:  # noqa: N802
        """Accept the announcement of weights and return how many bytes are here."""
        lead = self._authorizer.caller(context).identity.name
        return pb.OpenReply(have=await self._workers.run(self._weights.open, lead, request.digest, request.size))

    async def PutWeights(self, request_iterator: object, context: Context) -> pb.PutReply:  # noqa: ARG002, N802
        """Append chunks to weights. Received bytes stay, however the stream ends; complete weights become an object."""
        lead = self._authorizer.caller(context).identity.name
        stream = PutStream(context, self._put_idle_s)
        async with self._weights.stream():
            chunk = await stream.next()
            digest = chunk.object if chunk is not None else ""
            size = self._weights.announced(lead, digest)
            async with self._weights.uploads.writing(f"{lead}/{digest}", stream.end):
                with open_partial(self._weights.uploads.path(lead, digest)) as file:
                    while chunk is not None:
                        if chunk.object not in ("", digest):
                            raise ProtocolError("E-WIRE-06", "a stream carries one object, and a second one came")
                        await self._workers.run(append_chunk, chunk, file, file.size, size)
                        chunk = await stream.next()
                    have, received = file.size, file.digest()
                if have == size:
                    await self._workers.run(self._weights.finish, lead, digest, received)
        return pb.PutReply(have=have)

    def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.RunInfo:  # noqa: N802
        """Freeze a run and queue it; a repeated request id returns the same run."""
        if not request.request_id:
            raise ConfigError("E-CFG-02", "the request has no id: choose a new one for each new run")
        run = self._store.runs.of_request(request.request_id)
        if run is not None and (run.spec, run.parent) == (request.spec_json, request.start_from):
            return self._info(run)
        silos = self._silos(revoked=False)
        if request.start_from:  # before the run is built
            silos = self._may_go_on(request, silos)
        manifest = self._build_manifest(request.spec_json, silos)
        manifest = replace(manifest, lead=self._authorizer.caller(context).identity.name)
        return self._info(self._runs.submit(manifest, request.spec_json, request.request_id, request.start_from))

    def _may_go_on(self, request: pb.SubmitRequest, silos: list[pb.SiloInfo]) -> list[pb.SiloInfo]:
        """Leave out the silos that a run may not ask because of the run it continues, unless it names its silos.

        Raises ConfigError: E-RUN-10 on an unknown run, E-RUN-05 if no silo is left; StateError (E-RUN-11).
        """
        parent, line = self._store.runs.get(request.start_from), RunLineage(self._store.runs)
        lineage.require_over(parent)
        line.require_open(parent)
        adds, named = _asked(request.spec_json)
        never = line.not_asked(parent, adds)
        if named or not never:
            return silos
        remaining = [silo for silo in silos if silo.name not in never]
        if not any(silo.state == "online" for silo in remaining):
            listed = "; ".join(f"{name} {why}" for name, why in never.items())
            raise ConfigError(
                "E-RUN-05",
                (f"no hospital that is online can continue from {parent.id}. These cannot: {listed}"),
            )
        return remaining

    def Runs(self, request: pb.RunsRequest, context: Context) -> pb.RunList:  # noqa: ARG002, N802
        """List runs, newest first: one page, or all runs if the request has no page size."""
        size = min(request.page_size or MAX_PAGE, MAX_PAGE)
        answer = pb.RunList(next_page_token=request.page_token)
        while True:
            page = self._store.runs.page(answer.next_page_token, size + 1)
            shown = [self._runs.with_model_digest(run) for run in page[:size]]
            infos = messages.run_infos(shown, self._store, self._runs.waiting)
            answer.runs.extend(self._with_arrivals(info) for info in infos)
            answer.next_page_token = shown[-1].id if len(page) > size else ""
            if request.page_size or not answer.next_page_token:
                return answer

    def Show(self, request: pb.RunQuery, context: Context) -> pb.RunDetail:  # noqa: ARG002, N802
        run = self._runs.with_model_digest(self._store.runs.find(request.run_id))
        facts = DerivedFacts.of(run)
        came: dict[int, list[Contribution]] = defaultdict(list)
        for update in self._store.contributions.arrivals(run.id):
            came[update.round].append(update)
        return pb.RunDetail(
            info=self._with_arrivals(self._info(run)),
            manifest_json=run.manifest,
            rounds=[
                messages.round_info(row, facts.noise, came[row.round], facts.exchanges)
                for row in self._store.runs.rounds(run.id)
            ],
            spec_json=run.spec,
            declarations=messages.declarations(run.id, self._store),
            software=self._store.runs.software(run.id),
            aggregator=facts.aggregator,
            withdrawals=self._signed(self._withdrawals.of(run)),
        )

    async def Watch(  # type: ignore[override]  # noqa: N802 - the stub knows generators alone
        self, request: pb.WatchRequest, context: Context
    ) -> None:
        """Stream a run's events after a number until it ends, and between them the state of its silos.

        The live events have kind "silo", no silo name and the number of the last stored event.
        """
        run = await self._workers.run(self._store.runs.find, request.run_id)
        last, shown, changed, next_live = request.after, list[object](), asyncio.Event(), 0.0
        with self._dispatcher.changes.listening(waker(changed)):
            while True:
                run, events = await self._workers.run(self._events, run.id, min(last, _LAST_EVENT))
                for event in events:
                    last = event.number
                    await context.write(event)
                if run.state.ended:
                    return
                # Pulses are shown together, at most once a second.
                if (wait := next_live - time.monotonic()) <= 0:
                    live = await self._workers.run(self._live, run, last)
                    now: list[object] = [
                        *map(_activity, live.silos),
                        *((s.name, s.online) for s in live.info.waiting.silos),
                    ]
                    if now != shown:
                        shown, next_live = now, time.monotonic() + _MIN_LIVE_INTERVAL_S
                        await context.write(live)
                        continue
                    wait = _POLL_S
                await wait_for(changed, wait)

    def _events(self, run_id: str, after: int) -> tuple[StoredRun, list[pb.Event]]:
        run = self._store.runs.get(run_id)  # read before its events: if it has ended, they are complete
        return run, [messages.event(row, self._store) for row in self._store.runs.events(run_id, after)]

    def _live(self, run: StoredRun, last: int) -> pb.Event:
        live, info = self._members(run), self._info(run)
        for silo in live:  # declarations do not change with every pulse
            silo.ClearField("data")
        event = pb.Event(number=last, run_id=run.id, kind="silo", round=run.closed, silos=live, info=info)
        event.at_unix = time.time()
        return event

    def Abort(self, request: pb.RunQuery, context: Context) -> pb.RunInfo:  # noqa: ARG002, N802
        return self._info(self._runs.with_model_digest(self._runs.abort(request.run_id)))

    def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.RunInfo:  # noqa: ARG002, N802
        """Resume a paused or failed run after its last closed round."""
        return self._info(self._runs.with_model_digest(self._runs.resume(request.run_id, request.quorum)))

    def Exclude(self, request: pb.ExcludeRequest, context: Context) -> pb.RunInfo:  # noqa: ARG002, N802
        """Exclude a silo from a run, or readmit it."""
        run = self._runs.exclude(request.run_id, request.silo, request.readmit)
        return self._info(self._runs.with_model_digest(run))

    def Extend(self, request: pb.ExtendRequest, context: Context) -> pb.RunInfo:  # noqa: ARG002, N802
        """Extend the open round."""
        return self._info(self._runs.with_model_digest(self._runs.extend(request.run_id, request.hours)))

    def Withdraw(self, request: pb.WithdrawRequest, context: Context) -> pb.WithdrawReply:  # noqa: N802
        """Withdraw a hospital from its runs; return the models that its sums are taken out of, and all others."""
        lead = self._authorizer.caller(context).identity.name
        withdrawals = self._withdrawals.withdraw(request.silo, lead, request.preview)
        self._dispatcher.changes.notify()
        return pb.WithdrawReply(withdrawals=self._signed(withdrawals))

    def _signed(self, affected: list[AffectedRun]) -> list[pb.Withdrawal]:
        if not affected:
            return []
        credentials = self._own()
        return [one.message(credentials) for one in affected]

    def Silos(self, request: pb.SilosRequest, context: Context) -> pb.SiloList:  # noqa: ARG002, N802
        invitations = [
            pb.InvitationInfo(name=i.name, expires_unix=i.expires) for i in self._store.members.invitations()
        ]
        return pb.SiloList(silos=self._silos(revoked=True), invitations=invitations)

    def _info(self, run: StoredRun) -> pb.RunInfo:
        return messages.run_info(run, self._store, self._runs.waiting(run.id))

    def _with_arrivals(self, info: pb.RunInfo) -> pb.RunInfo:
        """Add the updates that arrived in the open round."""
        if info.HasField("waiting"):
            opened = self._store.runs.round(info.run_id, info.waiting.round)
            info.waiting.opened_unix = 0.0 if opened is None else opened.opened
            came = self._store.contributions.arrivals(info.run_id, info.waiting.round)
            info.waiting.arrivals.extend(messages.arrivals(came))
        return info

    def _silos(self, revoked: bool) -> list[pb.SiloInfo]:
        silos = [s for s in self._store.members.silos() if revoked or not s.revoked]
        return messages.silo_infos(silos, self._dispatcher, time.time())

    def _members(self, run: StoredRun) -> list[pb.SiloInfo]:
        return [s for s in self._silos(revoked=True) if s.name in run.members]


def _asked(spec_json: str) -> tuple[bool, bool]:
    """Tell whether a configuration adds to exact sums, and names its silos; an invalid one is refused later."""
    try:
        spec = json.loads(spec_json)
        return spec["method"]["name"] == lineage.SUMS and spec["rounds"] != 0, bool(spec.get("silos"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False, True


def _activity(silo: pb.SiloInfo) -> tuple[object, ...]:
    return silo.name, silo.state, silo.activity, silo.run_id, silo.round, silo.done, silo.total
