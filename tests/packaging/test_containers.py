"""The container files: what they copy exists, and they build where there is a builder."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples/containers"
CONTAINERFILE = (FOLDER / "Containerfile").read_text()


def builder() -> str | None:
    for name in ("podman", "docker"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


def test_what_the_image_is_made_of_is_what_the_wheel_is_made_of() -> None:
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    packages = set(re.findall(r'"([a-z_]+)\*"', (ROOT / "pyproject.toml").read_text()))
    assert packages <= kept
    copied = {
        name for line in re.findall(r"^COPY (?!--)(.*) \./$", CONTAINERFILE, re.MULTILINE) for name in line.split()
    }
    assert copied <= kept
    assert all((ROOT / name).exists() for name in copied)


def test_no_service_runs_as_root_or_may_write_into_its_image() -> None:
    last = CONTAINERFILE[CONTAINERFILE.rindex("FROM ") :]
    assert re.search(r"^USER (?!root|0)", last, re.MULTILINE)
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert set(services) == {"coordinator", "north", "south"}
    for service in services.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert all(
            volume.startswith(("coordinator:", "north:", "south:")) or volume.endswith(":ro")
            for volume in service["volumes"]
        )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_builds_and_answers() -> None:
    found = builder()
    if found is None:
        pytest.skip("no container builder here")
    build = [found, "build", "-q", "-f", str(FOLDER / "Containerfile"), "-t", "consilium-test", str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    for words in (["coordinator", "--version"], ["silo", "--version"], ["id", "-u"]):
        done = subprocess.run(
            [found, "run", "--rm", "--read-only", "consilium-test", *words], check=True, capture_output=True, text=True
        )
        assert done.stdout.strip() not in ("", "0")
