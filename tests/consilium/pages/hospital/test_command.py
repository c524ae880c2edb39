"""`silo page` as a process: it says where it is, opens once, and ends on a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from consilium.pages.hospital.command import show_beside
from consilium.pages.hospital.site import FILE
from consilium.web.command import OPENED_PAGE
from silo.cli.operations import PAGES
from silo.storage.home import ServeOptions
from tests.support import until
from tests.support.fake_coordinator import enrolled
from tests.support.hospital import spent
from tests.support.pages import Answer, request, send
from tests.support.pki import authority, join, today
from tests.support.privacy import budgeted

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = "import sys; from silo.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"


def opened(link: str) -> Answer:
    """Follow an opening link to the page."""
    address, slash, target = link.removeprefix("http://").partition("/")
    server = SimpleNamespace(host=address)
    cookie = send(server, request("GET", slash + target, [("Host", address)])).header("set-cookie") or ""
    return send(server, request("GET", "/", [("Host", address), ("Cookie", cookie.partition(";")[0])]))


def test_a_backup_leaves_out_the_files_that_open_pages() -> None:
    assert set(PAGES) == {FILE, OPENED_PAGE}


@pytest.mark.integration
def test_the_command_serves_until_it_is_told_to_stop_and_needs_no_torch(tmp_path) -> None:
    home = tmp_path / "home"
    join(authority(tmp_path / "ca", today()), home, "north")
    spent(budgeted(home))
    words = [sys.executable, "-c", PROGRAM, "page", "--no-browser", "--json", "--home", str(home)]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        assert facts["link"] in Path(facts["file"]).read_text()
        page = opened(facts["link"])
        assert (page.status, "north" in page.text) == (200, True)
        assert "Epsilon 4.48 of 8 is spent for each record" in page.text
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=200)
        assert (process.returncode, rest.decode().split()) == (0, ["False"])
    assert not Path(facts["file"]).exists()


def test_the_page_of_a_service_is_there_as_long_as_the_service_and_opens_by_its_file(tmp_path) -> None:
    home = enrolled(tmp_path / "home")
    with ExitStack() as beside:
        file = show_beside(home, beside)
        assert file == home.path / "page.html"
        link = re.findall(r'href="([^"]+)"', file.read_text())[0]
        assert opened(link).status == 200
    assert not file.exists()


@pytest.mark.slow
def test_a_service_shows_its_page_and_takes_it_with_it_when_it_ends(tmp_path) -> None:
    home = enrolled(tmp_path / "home")
    words = [sys.executable, "-m", "silo.cli.main", "serve", "--page", "--data", "digits/p3c4/1", "--json"]
    words += ["--home", str(home.path), "--device", "cpu"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = next(e for e in map(json.loads, process.stdout) if e["event"] == "page")
        file = Path(said["text"].rpartition(" ")[2])
        link = re.findall(r'href="([^"]+)"', file.read_text())[0]
        assert link not in json.dumps(said)
        until(lambda: (home.path / "health.json").exists())
        assert "The service is running and trying to connect" in opened(link).text
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=200)
    assert process.returncode == 0
    assert not file.exists()
    assert home.served() == ServeOptions("digits/p3c4/1", cwd=str(ROOT))
