"""`coordinator page` as a command: it listens, says where, and ends when it is told to."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.pki.authority import Authority
from tests.support.coordinator import World
from tests.support.pages import request, send
from tests.support.processes import BIN, ENV, here


def started(home: Path) -> subprocess.Popen[str]:
    words = [str(BIN / "coordinator"), "page", "--home", str(home), "--no-browser", "--json"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)


def test_without_a_leads_certificate_there_is_no_page(tmp_path: Path) -> None:
    Authority.create(tmp_path / "home", "test", ["127.0.0.1:8443"])
    done = here("page", "--home", str(tmp_path / "home"), "--no-browser")
    assert done.returncode == 2
    assert "E-ID-11" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_address_than_loopback_is_refused(world: World) -> None:
    done = here("page", "--home", str(world.home), "--no-browser", "--bind", "0.0.0.0:8600")
    assert done.returncode == 2
    assert "E-CFG-02" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("served", [True, False], ids=["beside a service", "without one"])
def test_it_says_where_it_listens_shows_the_page_and_ends_when_told_to(world: World, served: bool) -> None:
    if not served:
        world.stop()
    process = started(world.home)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["address"].startswith("127.")
        file = Path(said["file"])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        server = SimpleNamespace(host=said["address"])
        path = said["link"].removeprefix(f"http://{said['address']}")
        opened = send(server, request("GET", path, [("Host", server.host)]))
        assert opened.status == 200
        cookie = (opened.header("set-cookie") or "").partition(";")[0]
        page = send(server, request("GET", "/", [("Host", server.host), ("Cookie", cookie)]))
        assert page.status == 200
        assert ("The coordinator does not answer" in page.text) != served
        assert send(server, request("GET", "/", [("Host", server.host)])).status == 401
    finally:
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=30)
    assert "Traceback" not in complaints
    assert not file.exists()


def test_the_page_is_served_without_torch() -> None:
    program = (
        "import sys; import consilium.pages.lead.command, consilium.pages.lead.site, consilium.web.serve; "
        "print(sorted({'torch', 'matplotlib', 'hydra'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
