"""Signals to a service: SIGTERM and SIGINT end it, SIGHUP does not."""

from __future__ import annotations

import os
import signal

from service_core.operations.exit_status import ShutdownSignals


def test_a_hangup_ends_no_service_and_is_told_once() -> None:
    with ShutdownSignals(service=True) as signals:
        assert not signals.hung_up()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received == []
        assert signals.hung_up()
        assert not signals.hung_up()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == [signal.SIGTERM]


def test_what_is_no_service_ends_with_its_terminal_and_afterwards_all_is_as_before() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with ShutdownSignals():
        assert signal.getsignal(signal.SIGHUP) is before
    with ShutdownSignals(service=True):
        assert signal.getsignal(signal.SIGHUP) is not before
    assert signal.getsignal(signal.SIGHUP) is before
