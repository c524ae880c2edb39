"""`silo page` as a process: it says where it is, opens once, and ends on a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.pki import authority, join, today
from tests.support.web import request, send

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "import sys; from silo.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"


def test_the_command_serves_until_it_is_told_to_stop_and_needs_no_torch(tmp_path) -> None:
    home = tmp_path / "home"
    join(authority(tmp_path / "ca", today()), home, "north")
    words = [sys.executable, "-c", PROGRAM, "page", "--no-browser", "--json", "--home", str(home)]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        assert facts["link"] in Path(facts["file"]).read_text()

        class Server:
            host = facts["address"]

        target = facts["link"].partition(facts["address"])[2]
        opened = send(Server, request("GET", target, [("Host", facts["address"])]))
        cookie = (opened.header("set-cookie") or "").partition(";")[0]
        page = send(Server, request("GET", "/", [("Host", facts["address"]), ("Cookie", cookie)]))
        assert (page.status, "north" in page.text) == (200, True)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=200)
        assert (process.returncode, rest.decode().split()) == (0, ["False"])
    assert not Path(facts["file"]).exists()
