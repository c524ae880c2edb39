"""The fault driver: its plans, its line, and three minutes of it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.plan import CHARGING, COORDINATOR, LINE_FAULTS, PROCESS_FAULTS, RESTORES, draw
from tests.chaos.proxy import Proxy
from tests.support.processes import ENV, ROOT


def test_a_seed_decides_what_happens() -> None:
    assert [draw(3, n) for n in range(8)] == [draw(3, n) for n in range(8)]
    assert draw(3, 0) != draw(4, 0)
    kinds = {f.kind for seed in range(5) for n in range(8) for f in draw(seed, n).faults}
    assert kinds == {*PROCESS_FAULTS, *LINE_FAULTS}


def test_a_private_run_is_interrupted_no_oftener_than_its_ledger_repeats_a_round() -> None:
    private = [plan for seed in range(20) for n in range(8) if (plan := draw(seed, n)).private]
    assert all(sum(f.kind in CHARGING and f.target != COORDINATOR for f in p.faults) <= 2 for p in private)


def test_only_runs_without_masks_and_noise_are_put_back() -> None:
    plans = [draw(seed, n) for seed in range(20) for n in range(8)]
    assert {p.name for p in plans if any(f.kind in RESTORES for f in p.faults)} == {"fedavg"}
    assert all(f.target != COORDINATOR for p in plans for f in p.faults if f.kind == "renewal")


def test_the_line_passes_bytes_on_flips_one_and_cuts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Proxy(server.getsockname()[1])
        client = socket.create_connection(("127.0.0.1", line.port), 10)
        far, _ = server.accept()
        far.settimeout(10)
        client.sendall(b"abc")
        assert far.recv(3) == b"abc"
        line.flip(1, upward=True)
        client.sendall(b"abc")
        assert far.recv(3) == bytes([ord("a"), ord("b") ^ 0xFF, ord("c")])
        line.truncate(2, upward=False)
        far.sendall(b"abc")
        assert client.recv(3) == b"ab"
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        client.close()
        far.close()
        line.stop()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.fault(
    "connections, disks, clocks and machines",
    "fail at random times (kill, stop, cut, truncation, bit flip, delay, throttling, black hole, full "
    "disk, wrong clock), renew, or are restored, also partly",
    "every run ends with the undisturbed model, and every ledger is exact",
)
def test_three_minutes_of_chaos_change_no_model_and_no_ledger(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--minutes", "3", "--seed", "9", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
