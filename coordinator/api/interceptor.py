"""Authorization before every call, and our errors as statuses after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from coordinator.api.authorization import Authorizer
from fl_core.errors import FederationError
from protos.wire import status

log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
"""Requests and replies pass through unseen: the interceptor is the same for every message type."""


class Interceptor(grpc.ServerInterceptor):
    """Lets a call in or refuses it, and answers every error with a status whose text begins with a code.

    Guarantees: no handler runs for a peer that is refused; only our own messages cross the wire: an unexpected error is
    E-RUN-99 there and a traceback in the log here.
    """

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of a call, whichever of the four kinds it is."""
        handler = continuation(handler_call_details)
        return None if handler is None else self._wrap(handler, str(handler_call_details.method))

    def _wrap(self, handler: Handler, method: str) -> Handler:
        codecs = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            inner: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream

            def stream(request: object, context: grpc.ServicerContext) -> Iterator[object]:
                with self._answering(method, context):
                    yield from inner(request, context)

            make_stream = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make_stream(stream, *codecs)
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

        def unary(request: object, context: grpc.ServicerContext) -> object:
            with self._answering(method, context):
                return inner(request, context)

        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(unary, *codecs)

    @contextmanager
    def _answering(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        try:
            self._authorizer.authorize_call(method, context)
            yield
        except FederationError as error:
            name, text = status.to_status(error)
            context.abort(grpc.StatusCode[name], text)
        except grpc.RpcError:
            raise  # the other side has gone: there is nobody to answer
        except Exception:
            log.exception("unexpected error in %s", method)
            context.abort(
                grpc.StatusCode.INTERNAL, "E-RUN-99: the coordinator met an unexpected error; its log has the details"
            )
