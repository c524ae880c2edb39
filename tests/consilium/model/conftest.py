"""One exported model, with hospitals and new images, for the tests of a module."""

from __future__ import annotations

import pytest

from tests.support.exported import Exported, exported


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(tmp_path_factory.mktemp("exported"))
