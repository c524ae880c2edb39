"""The bill of materials has what the lock has: held against readings of the lock that are not its own."""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from pathlib import Path
from typing import Any

import pytest

from release import sbom
from release.build import LOCKS

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
WHEEL = ("consilium_fl-0.1.0-py3-none-any.whl", "a" * 64)


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    return json.loads(sbom.bill(LOCK, PYPROJECT, WHEEL, 1_700_000_000))


def test_every_pin_of_the_lock_is_in_it_once_with_all_its_digests(bill: dict[str, Any]) -> None:
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", LOCK, re.MULTILINE)
    found = [(c["name"], c["version"]) for c in bill["components"]]
    assert sorted(found) == sorted((name.lower().replace("_", "-").replace(".", "-"), v) for name, v in pins)
    digests = [h["content"] for c in bill["components"] for h in c["hashes"]]
    assert sorted(digests) == sorted(re.findall(r"--hash=sha256:([0-9a-f]{64})", LOCK))
    assert len(pins) > 200


def test_a_digest_stands_at_the_distribution_that_it_is_of(bill: dict[str, Any]) -> None:
    blocks = {m[1]: m[0] for m in re.finditer(r"^([a-z0-9-]+)==.*?(?=^\S|\Z)", LOCK, re.MULTILINE | re.DOTALL)}
    component = {c["name"]: c for c in bill["components"]}
    for name in ("absl-py", "cryptography", "torch", "zipp" if "zipp" in blocks else "typer"):
        assert {h["content"] for h in component[name]["hashes"]} == set(re.findall(r"sha256:(\w{64})", blocks[name]))


def test_every_component_is_named_by_its_package_url(bill: dict[str, Any]) -> None:
    for c in bill["components"]:
        assert c["purl"] == c["bom-ref"] == f"pkg:pypi/{c['name']}@{c['version']}"
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", c["name"])
    assert len({c["bom-ref"] for c in bill["components"]}) == len(bill["components"])


def test_what_every_service_needs_is_what_the_lock_of_a_hospital_has(bill: dict[str, Any]) -> None:
    """Those locks were resolved by another program: with torch, and without it for bodies in ONNX files."""
    names = [re.findall(r"^([a-z0-9-]+)==", (ROOT / lock).read_text(), re.MULTILINE) for lock in LOCKS[1:4:2]]
    hospitals = set.intersection(*map(set, names))
    assert {c["name"] for c in bill["components"] if c["scope"] == "required"} == hospitals
    scope = {c["name"]: c["scope"] for c in bill["components"]}
    assert (scope["matplotlib"], scope["onnx"], scope["mlflow"]) == ("optional",) * 3
    assert (scope["pytest"], scope["ruff"], scope["mkdocs-material"]) == ("excluded",) * 3


def test_dependencies_are_those_of_the_lock_and_of_the_project(bill: dict[str, Any]) -> None:
    depends = {d["ref"]: d["dependsOn"] for d in bill["dependencies"]}
    refs = {c["bom-ref"] for c in bill["components"]}
    root = bill["metadata"]["component"]["bom-ref"]
    assert set(depends) == refs | {root}
    assert all(set(on) <= refs for on in depends.values())
    of_root = {purl.removeprefix("pkg:pypi/").partition("@")[0] for purl in depends[root]}
    project = tomllib.loads(PYPROJECT)["project"]
    direct = {re.split(r"[\[<>=]", word)[0].lower() for word in project["dependencies"]}
    assert direct <= of_root
    (grpc,) = (ref for ref in refs if ref.startswith("pkg:pypi/grpcio-health-checking@"))
    assert {purl.partition("@")[0] for purl in depends[grpc]} == {"pkg:pypi/grpcio", "pkg:pypi/protobuf"}


def test_it_says_of_which_wheel_it_is_and_when_it_was_made(bill: dict[str, Any]) -> None:
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    about = bill["metadata"]["component"]
    assert about["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert about["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert bill["serialNumber"] == uuid.UUID(bill["serialNumber"].removeprefix("urn:uuid:")).urn


def test_equal_releases_have_one_bill_and_others_another() -> None:
    first = sbom.bill(LOCK, PYPROJECT, WHEEL, 1.0)
    assert sbom.bill(LOCK, PYPROJECT, WHEEL, 1.0) == first
    other = sbom.bill(LOCK, PYPROJECT, (WHEEL[0], "b" * 64), 1.0)
    assert json.loads(other)["serialNumber"] != json.loads(first)["serialNumber"]


def test_a_marker_is_kept(bill: dict[str, Any]) -> None:
    component = {c["name"]: c for c in bill["components"]}
    assert component["appnope"]["properties"] == [
        {"name": "consilium:installed-where", "value": "sys_platform == 'darwin'"}
    ]
    assert "properties" not in component["absl-py"]


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        ("a==1 \\\n    # via b\n", "digest for a==1"),
        ("a>=1\n", "line 1: a>=1"),
        ("a==1 \\\n    --hash=md5:00\n", "line 2"),
        ("-e .\n", "line 1"),
        ("    --hash=sha256:" + "0" * 64, "line 1"),
    ],
)
def test_a_lock_that_pins_no_bytes_is_refused(lock: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        sbom.read_lock(lock)
