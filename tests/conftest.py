"""Shared fixtures: real images, a clock, no proxy; and a thread count that makes numbers repeat."""

from __future__ import annotations

from service_core.tls.connect import require_tls13

require_tls13()  # before anything imports gRPC

import copy  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Generator, Iterator, Mapping, Sequence  # noqa: E402
from functools import cache  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from fl_core.datasets.sources import arrays, image_folders  # noqa: E402
from tests.support.data import real_data  # noqa: E402
from tests.support.pki import today  # noqa: E402

if TYPE_CHECKING:
    from tests.support.coordinator import World

_MEMORY, _ROOM = Path("/dev/shm"), 4 << 30

if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM:
    # Services flush each write before they go on, and on a disk tests wait for that; programs that tests start follow.
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

settings.register_profile("ci", derandomize=True, max_examples=25, deadline=None)
settings.register_profile("nightly", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile, and later not among what was imported: there is none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Compose equal words once, and quicker: it takes Hydra a tenth of a second each time.

    Words of an extension and of a folder of the user's own are composed anew, since what they name may have changed.
    """
    module = sys.modules.get("coordinator.config.hydra_config")
    if module is None:
        return
    module.ConfigStore.__deepcopy__ = lambda store, memo: store  # Hydra copies all choices for each composition
    plain = module._compose

    @cache
    def kept(root: str, words: tuple[str, ...]) -> Mapping[str, Any]:
        return plain(root, words, None)

    def composed(root: str, words: Sequence[str], config_dir: Path | None) -> Mapping[str, Any]:
        if config_dir is not None or any(":" in word for word in words):
            return plain(root, words, config_dir)
        return copy.deepcopy(kept(root, tuple(words)))

    module._compose = composed


@pytest.fixture(scope="session")
def isic_root() -> Path:
    """Give the real Fed-ISIC2019 folder, or skip."""
    root = real_data("isic2019")
    if root is None:
        pytest.skip("no real Fed-ISIC2019 images: set CONSILIUM_TEST_DATA")
    return root


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def clock():
    return today()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing read for one test is kept for another; checksums of the real archives cannot hold for tiny copies."""
    for cached in (arrays._read, arrays._partition, image_folders.scan, image_folders.shares):
        cached.cache_clear()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Give a coordinator that runs for one test."""
    from tests.support.coordinator import running
    from tests.support.federations import NAMES

    with running(tmp_path / "home", NAMES) as found:
        yield found
