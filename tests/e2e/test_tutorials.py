"""The tutorials are run as they stand, but for an address: each by the role that it is for, the others beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.test_readme import Machine, blocks, images
from tests.support import until
from tests.support.pacs import dicom, pacs
from tests.support.processes import ROOT, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COLOURS = {"melanoma": (60, 20, 20), "nevus": (120, 80, 40), "keratosis": (200, 180, 150)}


@contextmanager
def machines(folder: Path, *names: str) -> Iterator[dict[str, Machine]]:
    found = {name: Machine(folder / name) for name in names}
    try:
        yield found
    finally:
        for machine in found.values():
            machine.stop()


def tutorial(name: str, port: int) -> list[tuple[list[str], str]]:
    text = (ROOT / f"docs/tutorials/{name}.md").read_text()
    for address in ("consilium.example.org:8443", "0.0.0.0:8443"):
        text = text.replace(address, f"127.0.0.1:{port}")
    found = blocks(text)
    assert len(found) == text.count("```sh")
    return found


def state(lead: Machine) -> str:
    return str(json.loads(lead.run("coordinator runs --json"))[0]["state"])


def joined(machine: Machine, lead: Machine, name: str, classes: list[str]) -> None:
    """Let another hospital take part that the tutorial is not about."""
    images(machine.folder / "images", {c: COLOURS[c] for c in classes})
    token = lead.folder / f"{name}.token"
    if not token.exists():
        lead.run(f"coordinator invite {name} --out {name}.token")
    machine.run(f"silo join --token-file {token}")
    machine.serve(f"silo serve --data folder:images --holds {','.join(classes)}")


def test_the_tutorial_for_hospitals(tmp_path: Path) -> None:
    port = free_port()
    with machines(tmp_path, "lead", "south", "other") as there:
        lead, south, other = there["lead"], there["south"], there["other"]
        lead.run(f"coordinator init study --address 127.0.0.1:{port}")
        lead.run(f"coordinator invite south --out {south.folder}/south.token")
        lead.serve(f"coordinator serve --bind 127.0.0.1:{port}")
        images(south.folder / "images", {c: COLOURS[c] for c in ("nevus", "keratosis")}, 200)
        joined(other, lead, "other", ["melanoma", "nevus"])
        other.run("silo ledger register --data folder:images --name skin")
        other.run("silo ledger budget set skin --epsilon 8 --delta 1e-5 --reason trial")
        for words, script in tutorial("hospital", port):
            machine = there[words[0]]
            if "service" in words:
                machine.serve(script)
            elif "waits" in words:
                until(lambda: "analytic" in south.run("silo approve"), "a run that waits")
                assert "epsilon" in south.run("silo approve")
                machine.run(script)
            else:
                if "after" in words:
                    until(lambda: state(lead) in ("finished", "failed", "paused"), "the run's end")
                    assert state(lead) == "finished"
                machine.run(script)
        told = json.loads(south.run("silo status --json"))
        assert told["left"]["verdict"] == "No image has left this hospital"
        assert told["runs"][0]["evaluations"][-1]["accuracy"] > 0.6  # chance: a third
        spent = south.run("silo ledger show --json")
        assert '"skin' in spent


def test_the_tutorial_for_hospitals_with_a_pacs(tmp_path: Path) -> None:
    port, rows = free_port(), ["AccessionNumber,diagnosis"]
    with machines(tmp_path, "lead", "south", "other") as there, pacs() as source:
        lead, south, other = there["lead"], there["south"], there["other"]
        source.user = "research:correct horse"
        for k in range(90):
            uid, facts = f"1.2.{k}.1.7", {"AccessionNumber": f"A2024-{k:04}", "PatientID": f"P{k}", "Modality": "CT"}
            source.add(f"1.2.{k}", f"1.2.{k}.1", uid, dicom(uid, seed=k, side=32, shade=70 * (k % 3)), **facts)
            rows.append(f"A2024-{k:04},{list(COLOURS)[k % 3]}")
        (south.folder / "labels.csv").write_text("\n".join(rows))
        lead.run(f"coordinator init study --address 127.0.0.1:{port}")
        lead.run(f"coordinator invite south --out {south.folder}/south.token")
        lead.serve(f"coordinator serve --bind 127.0.0.1:{port}")
        joined(other, lead, "other", ["melanoma", "nevus"])
        page = (ROOT / "docs/tutorials/pacs.md").read_text().replace("https://pacs.example.org/dicom-web", source.url)
        south.env["PACS"] = page.partition("PACS='")[2].partition("'")[0]
        for words, script in blocks(page):
            machine = there[words[0]]
            (machine.serve if "service" in words else machine.run)(script)
        told = json.loads(south.run("silo status --json"))
        assert told["left"]["verdict"] == "No image has left this hospital"
        assert told["runs"][0]["evaluations"][-1]["accuracy"] > 0.6  # chance: a third
        assert list((lead.folder / "models").glob("*.safetensors"))


def test_the_tutorial_for_leads(tmp_path: Path) -> None:
    port = free_port()
    with machines(tmp_path, "north", "hospital-a", "hospital-b") as there:
        north = there["north"]
        for words, script in tutorial("lead", port):
            if "service" in words:
                north.serve(script)
                continue
            if "joined" in words:
                joined(there["hospital-a"], north, "hospital-a", ["melanoma", "nevus"])
                joined(there["hospital-b"], north, "hospital-b", ["nevus", "keratosis"])
            north.run(script)
        assert json.loads(north.run("coordinator show first --json"))["global_accuracy"] > 0.9  # chance: a third
        assert list((north.folder / "models").glob("*.safetensors"))
        assert (north.folder / "curves.png").stat().st_size > 1000


def test_the_tutorial_for_administrators(tmp_path: Path) -> None:
    port = free_port()
    with machines(tmp_path, "north", "south") as there:
        for words, script in tutorial("administrator", port):
            if "service" in words:
                if words[0] == "south":
                    images(there["south"].folder / "images", COLOURS)
                there[words[0]].serve(script)
                continue
            token = there["north"].folder / "clinic.token"
            if words == ["south"] and token.exists():
                (there["south"].folder / "clinic.token").write_text(token.read_text())
            there[words[0]].run(script)


FILES = re.compile(r'```python title="([a-z_]+\.py)"\n(.*?)```', re.DOTALL)


def test_the_tutorial_for_researchers(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorials/researcher.md").read_text()
    with machines(tmp_path, "here") as there:
        here = there["here"]
        images(here.folder / "images", COLOURS, 30)
        for name, code in FILES.findall(text):
            (here.folder / name).write_text(code)
        said = ""
        for words, script in blocks(text):
            if words == ["interrupted"]:
                log = here.start(script)
                until(lambda: list(here.folder.glob("long/checkpoints/round-*")), log.read_text())
                here.services[0].kill()
                here.services.pop().wait()
                assert not (here.folder / "long" / "summary.json").exists()
            said += here.run(script)
        assert "standard error" in said
        assert "withheld: " not in said  # a tutorial whose numbers noise hides shows nothing
        rounds = (here.folder / "long" / "history.csv").read_text().splitlines()
        assert sum(line.split(",")[1] == "accuracy" for line in rounds) == 31
        assert json.loads((here.folder / "long" / "summary.json").read_text())["rounds"] == 30
        assert (here.folder / "own_data.csv").stat().st_size > 1000
