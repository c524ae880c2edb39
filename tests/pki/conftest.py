"""Shared by the tests of handshakes: today's clock, and an environment without a proxy."""

from __future__ import annotations

import pytest
from helpers_pki import today


@pytest.fixture
def no_proxy(monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def clock():
    return today()
