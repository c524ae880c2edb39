"""What computes nothing loads no torch: it takes 450 MB and seconds in a process that only waits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import update

from coordinator.lead.client import ADDRESS_FILE
from coordinator.storage.schema import runs
from coordinator.storage.store import OBJECTS, CoordinatorStore
from protos.consilium.v1 import federation_pb2 as pb
from protos.wire.codec import write_state
from service_core.storage.object_store import ObjectStore
from tests.support import until
from tests.support.coordinator import HELLO, Line, copied
from tests.support.federations import manifest
from tests.support.privacy import hospital_level, private
from tests.support.processes import ENV, World
from tests.support.recorded_runs import record_run

pytestmark = pytest.mark.integration


def loaded_by(code: str) -> set[str]:
    """Return the packages that a new process has loaded after this code."""
    program = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "from fl_core.methods import METHODS, programs; assert 'fedavg' in METHODS and 'survey' in list(programs())",
        "import protos.wire.codec",
        "import consilium.pages.lead.site, consilium.pages.lead.command",
        "import consilium.pages.hospital.site, consilium.pages.hospital.command",
        "from coordinator.cli.main import program; program()",
        "import coordinator.cli.runs, coordinator.cli.operations, coordinator.lead.watcher",
        "import silo.cli.ledger, silo.cli.status, silo.cli.operations",
    ],
)
def test_what_only_names_things_loads_no_torch(code: str) -> None:
    assert loaded_by(code) & {"torch", "torchvision", "scipy"} == set()


@pytest.mark.parametrize("words", ["simulate", "demo", "data split", "methods", "models", "privacy preview"])
def test_the_help_of_a_command_that_computes_loads_no_torch(words: str) -> None:
    code = f"import sys; sys.argv = ['coordinator', *{words.split()}, '--help']\nfrom coordinator.cli.main import main"
    assert "torch" not in loaded_by(f"{code}\ntry: main()\nexcept SystemExit: pass")


@pytest.mark.parametrize("module", ["coordinator.api.server", "coordinator.cli.consortium", "silo.cli.foreground"])
def test_a_service_imports_nothing_that_computes(module: str) -> None:
    assert loaded_by(f"import {module}") & {"torch", "torchvision", "scipy", "PIL", "pydicom", "hydra"} == set()


def remember_runs(home: Path) -> None:
    """Write runs of an earlier version, which stored no facts: finished, failed and private ones, one unreadable."""
    with closing(CoordinatorStore(home)) as store:
        model = torch.randn(5, 3)
        file = ObjectStore(home / OBJECTS, sharded=True).put_file(lambda file: write_state({"w": {"m": model}}, file))
        record_run(store, "finished", [0.2, 0.6])
        record_run(store, "failed", [0.2, 0.3, 0.5], finished=False, reason="E-RUN-03: too few", model=file)
        record_run(store, "private", [0.2, 0.6], agreed=private())
        record_run(store, "hospital", [0.2, 0.6], agreed=hospital_level())
        record_run(store, "summed", [0.2, 0.6], agreed=manifest("analytic"))
        with store.database.write() as db:
            db.execute(update(runs).where(runs.c.id == "failed").values(model_digest=""))
        later = json.dumps({**json.loads(store.runs.get("finished").manifest), "format": 99})
        store.runs.add(replace(store.runs.get("finished"), id="later", request_id="later", manifest=later), 2)


def maps(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/maps").read_text()


def test_a_coordinator_loads_no_torch_to_show_runs_of_the_past_or_to_continue_one(tmp_path: Path) -> None:
    """Its pages ask what the lead's commands ask; a hospital is connected meanwhile."""
    world = copied(tmp_path / "home", ["north"])
    remember_runs(world.home)
    words = [sys.executable, "-m", "coordinator.cli.main", "serve", "--bind", "127.0.0.1:0", "--home", str(world.home)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            address = world.home / ADDRESS_FILE
            until(lambda: address.exists() or process.poll() is not None, "the service", seconds=120)
            assert process.poll() is None, (tmp_path / "log").read_text()
            world.port = json.loads(address.read_text())["port"]
            line, lead = Line(world, "north", HELLO), world.lead()
            until(lambda: any(s.state == "online" for s in lead.Silos(pb.SilosRequest()).silos), "the hospital", 60)
            listed = {info.run_id: info for info in lead.Runs(pb.RunsRequest(), timeout=60).runs}
            assert len(listed["failed"].model_digest) == 64
            shown = {id: lead.Show(pb.RunQuery(run_id=id), timeout=60) for id in listed}
            followed = [event for id in listed for event in lead.Watch(pb.WatchRequest(run_id=id), timeout=60)]
            assert all(shown[id].rounds[0].HasField("noise") for id in ("private", "hospital"))
            assert [shown[id].aggregator for id in ("finished", "hospital", "later")] == ["norm_clipped", "mean", ""]
            assert shown["summed"].rounds[0].untrained
            assert any(event.HasField("closed") and event.closed.HasField("noise") for event in followed)
            preview = lead.Withdraw(pb.WithdrawRequest(silo="north", preview=True), timeout=60)
            assert {one.run_id for one in preview.withdrawals} >= {"summed", "finished"}
            assert "libtorch" not in maps(process)
            assert "site-packages/scipy" not in maps(process)
            lead.Resume(pb.ResumeRequest(run_id="failed"), timeout=120)
            assert "libtorch" not in maps(process)
            line.close()
        finally:
            process.terminate()
            process.wait(60)


class ColdWorld(World):
    """A federation whose processes import what they need themselves."""

    def start(self, name: str, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", f"{words[0]}.cli.main", *words[1:]]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = self.running[name] = subprocess.Popen(program, stdout=log, stderr=log, env=ENV | (env or {}))
        return process


def test_no_service_loads_torch_in_a_whole_masked_run(tmp_path: Path) -> None:
    """They open the run, transfer, confirm, and take the masks off; their workers compute."""
    world = ColdWorld(tmp_path)
    try:
        world.federation([f"digits/p4c3/{k}" for k in range(3)], "--device", "cpu")
        run = world.submit("data=digits", "federation=p4c3", "rounds=1", "train.epochs=1", "secagg=on")
        assert world.wait(run)["round"][0]["examples"]
        heavy = [name for name in world.running if re.search("libtorch|site-packages/scipy", maps(world.running[name]))]
        assert heavy == []
    finally:
        world.stop()
