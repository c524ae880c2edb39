"""A call with one's own credentials to a coordinator of the tests, and the error of one that is refused."""

from __future__ import annotations

import grpc
import pytest

from silo.identity.credentials import channel_credentials, name_options

HOST = "127.0.0.1"


def call(port, credentials, method="/x/silo", name=None):
    options = [*name_options(name), ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"{HOST}:{port}", channel_credentials(credentials), options=options) as channel:
        return channel.unary_unary(method)(b"", timeout=10)


def refused_call(port, credentials, method="/x/silo", name=None) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(port, credentials, method, name)
    return caught.value
