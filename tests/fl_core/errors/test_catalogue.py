"""A code is explained offline, and an error travels with its code."""

from __future__ import annotations

import copy
import pickle

import pytest

from fl_core.errors import ConfigError, FederationError, UnavailableError
from fl_core.errors.catalogue import explain_text
from silo.cancellation import CancelledError


def test_a_code_is_explained_however_it_is_written() -> None:
    assert explain_text(" e-budget-01").startswith("E-BUDGET-01  The privacy budget")


def test_an_unknown_code_is_answered_with_those_near_it() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-01: there is no error code 'E-TLS-99'; near: E-TLS"):
        explain_text("E-TLS-99")


@pytest.mark.parametrize(
    "error", [UnavailableError("E-RUN-03", "two of four silos"), CancelledError("the lead ended it")], ids=repr
)
def test_an_error_travels_between_processes_with_its_code(error: FederationError) -> None:
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(found) is type(error)
        assert (str(found), vars(found)) == (str(error), vars(error))
