"""Limits and authorization before every call, and conversion of errors to statuses after it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from coordinator.api.admission import LeadsFirst
from coordinator.api.authorization import PUBLIC_SERVICES, Authorizer, Context
from coordinator.api.event_loop import Workers
from coordinator.api.limits import Gate, require_known_fields
from coordinator.api.open_streams import OpenStreams
from coordinator.operations.audit_trail import CallAuditTrail, Count, CountingContext
from coordinator.operations.metrics import CoordinatorMetrics
from fl_core.errors import FederationError, UnavailableError
from protos.wire import status
from protos.wire.chunks import Chunk, encode
from service_core.pki.identity import CertificateRole

log = logging.getLogger(__name__)

_CROSSING = ("Transfer/Open", "Transfer/Commit")
"""Calls that exchange the ends of both audit logs."""
_PUTS, _GET = ("Transfer/Put", "Lead/PutWeights"), "Transfer/Get"
"""Calls whose requests are chunks, and the call whose replies are chunks."""
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
"""Requests and replies are not inspected: the interceptor is the same for every message type."""


class Interceptor(grpc.aio.ServerInterceptor):
    """Admits or refuses each call, and converts every error to a status whose text begins with a code.

    A handler that is no coroutine runs on a thread; leads have threads of their own, which hospitals cannot occupy.
    Guarantees: no handler runs for a refused peer. Only messages of this software are sent: an unexpected error is
    sent as E-RUN-99, and its traceback is in the log.
    """

    def __init__(
        self,
        authorizer: Authorizer,
        gate: Gate,
        members: Workers,
        leads: Workers,
        trail: CallAuditTrail,
        metrics: CoordinatorMetrics,
        streams: OpenStreams,
        leads_first: LeadsFirst,
    ) -> None:
        self._leads_first = leads_first
        self._streams = streams
        self._trail = trail
        self._metrics = metrics
        self._authorizer = authorizer
        self._gate = gate
        self._members = members
        self._leads = leads

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else self._wrap(handler, str(handler_call_details.method))

    def _wrap(self, handler: Handler, method: str) -> Handler:
        codecs = (
            Chunk.decode if method.endswith(_PUTS) else handler.request_deserializer,
            encode if method.endswith(_GET) else handler.response_serializer,
        )
        if handler.response_streaming:
            inner: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream

            async def stream(request: object, context: Any) -> None:  # noqa: ANN401
                if method.endswith(_GET):
                    context = CountingContext(context, self._on_sent(context))
                async with (
                    self._answering(method, context, request),
                    self._while_authorized(method, context),
                ):
                    await self._run_stream(inner, method, request, context)

            make_stream = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make_stream(stream, *codecs)
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def unary(request: object, context: Any) -> object:  # noqa: ANN401
            if method.endswith("/Put"):
                context = CountingContext(context, on_received=self._metrics.received)
            async with self._answering(method, context, request) as workers:
                if handler.request_streaming:
                    async with self._while_authorized(method, context):
                        return await inner(request, context)
                if inspect.iscoroutinefunction(inner):
                    reply = await inner(request, context)
                else:
                    reply = await workers.run(inner, request, context)
                if method.endswith(_CROSSING):
                    await workers.run(self._trail.cross, context, request, reply)
                return reply

        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(unary, *codecs)

    def _on_sent(self, context: Context) -> Count:
        """Return a counter for the bytes of a stream, separate for hospitals and leads."""
        try:
            return self._metrics.sent_to(self._authorizer.caller(context).identity.kind)
        except FederationError:  # refused: no stream
            return lambda _: None

    async def _run_stream(self, inner: Any, method: str, request: object, context: Context) -> None:  # noqa: ANN401
        """Run a stream. Those of health and reflection do not limit their own time, and are ended here."""
        if not method.startswith(PUBLIC_SERVICES):
            await inner(request, context)
            return
        seconds = self._gate.limits.watch_s
        try:
            async with asyncio.timeout(seconds):
                if inspect.isasyncgenfunction(inner):
                    async with aclosing(inner(request, context)) as replies:
                        async for reply in replies:
                            await context.write(reply)
                else:
                    await inner(request, context)
        except TimeoutError:
            raise UnavailableError("E-NET-12", f"a stream ends after {seconds:g} s: open a new one") from None

    @asynccontextmanager
    async def _while_authorized(self, method: str, context: Context) -> AsyncIterator[None]:
        """Raise the refusal inside the block if its caller is no longer allowed; sessions end themselves."""
        if method.endswith("/Session"):
            yield
            return
        refused: list[FederationError] = []
        try:
            async with asyncio.timeout(None) as scope:

                def end(error: FederationError) -> None:
                    refused.append(error)
                    scope.reschedule(asyncio.get_running_loop().time())

                with self._streams.watching(self._authorizer.caller(context), method, context.peer(), end):
                    yield
        except TimeoutError:
            if not refused:
                raise
            raise refused[0] from None

    @asynccontextmanager
    async def _answering(self, method: str, context: Context, request: object) -> AsyncIterator[Workers]:
        try:
            with self._metrics.call(method), self._trail.call(method, context, request):
                peer, address = self._authorizer.peer(method, context), context.peer()
                workers = self._leads if peer.identity.kind is CertificateRole.LEAD else self._members
                short = workers is self._leads and isinstance(request, Message)
                first = self._leads_first.call() if short else nullcontext()
                with self._gate.call(peer, method, address), first:
                    require_known_fields(request)
                    await workers.run(self._authorizer.authorize_peer, peer, method, address)
                    yield workers
        except FederationError as error:
            self._metrics.refused(error.code)
            name, text = status.to_status(error)
            await context.abort(grpc.StatusCode[name], text)
        except grpc.aio.AbortError:
            raise  # answered
        except Exception:
            if context.done() or context.cancelled():
                raise  # the other side is gone: no answer is possible
            log.exception("unexpected error in %s", method)
            self._metrics.refused("E-RUN-99")
            await context.abort(grpc.StatusCode.INTERNAL, "E-RUN-99: unexpected error at the coordinator; see its log")
