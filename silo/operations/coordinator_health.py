"""What a coordinator says of itself to a silo that asks without a session."""

from __future__ import annotations

import time
from contextlib import closing

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fl_core.errors import FederationError
from protos.operations.health import Answer
from protos.pki.identity import Address
from protos.storage.private_files import Credentials
from protos.wire.status import from_status
from silo.connection.channel import connect_with

_ASK_S = 10.0


def ask(address: Address, own: Credentials) -> Answer:
    """Ask a coordinator how it is; raises FederationError where it refuses or does not answer."""
    with closing(connect_with(lambda: own)(address)) as channel:
        stub, asked = health_pb2_grpc.HealthStub(channel), time.time()
        check = stub.Check  # type: ignore[attr-defined]  # set in __init__, which the stub does not show
        try:
            answer, call = check.with_call(health_pb2.HealthCheckRequest(), timeout=_ASK_S)
        except grpc.RpcError as error:
            raise _explained(error) from None
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return Answer.of(serving, call.trailing_metadata() or (), asked, time.time())


def _explained(error: grpc.RpcError) -> FederationError:
    assert isinstance(error, grpc.Call)
    return from_status(error.code().name, error.details())
