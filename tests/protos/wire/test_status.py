"""An error crosses the wire as the status of a call."""

from __future__ import annotations

import pytest

from fl_core.errors import ConfigError, FederationError, ProtocolError, RefusedError, StateError, UnavailableError
from protos.wire.status import from_status, to_status


@pytest.mark.parametrize("kind", [RefusedError, ProtocolError, StateError, UnavailableError])
def test_kind_code_and_message_come_back(kind: type[FederationError]) -> None:
    back = from_status(*to_status(kind("E-WIRE-06", "expected one line,\nfound two")))
    assert (type(back), back.code, back.message) == (kind, "E-WIRE-06", "expected one line,\nfound two")


def test_what_the_caller_got_wrong_comes_back_as_one_kind() -> None:
    assert type(from_status(*to_status(ConfigError("E-CFG-02", "found 0")))) is type(
        from_status(*to_status(ProtocolError("E-CFG-02", "found 0")))
    )


def test_an_answer_without_a_code_is_retried_where_that_can_help() -> None:
    assert from_status("UNAVAILABLE", "connection reset").code == "E-NET-01"
    assert from_status("UNIMPLEMENTED", None).code == "E-WIRE-10"
