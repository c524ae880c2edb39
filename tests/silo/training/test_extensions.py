"""A hospital imports code of another distribution where its policy names it, and nothing because a manifest does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import build_manifest, manifest_from
from coordinator.config.run_spec import RunSpec
from fl_core import datasets
from fl_core.errors import ConfigError, FederationError, RefusedError
from fl_core.extensions import loading, registry
from fl_core.rounds.manifest import RunManifest
from protos.consilium.v1 import federation_pb2 as pb
from silo.admission.controls import AdmissionRequest, HospitalControls
from silo.admission.run_request import describe_request
from silo.storage.home import Home
from silo.storage.store import SiloStore
from silo.training.data_source import DataSource
from tests.support.extensions import Installed, install

ALLOWED = "[runs]\nextensions = ['mine-package']\n"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    return install(tmp_path / "site", monkeypatch)


@pytest.fixture
def run(mine: Installed, monkeypatch: pytest.MonkeyPatch) -> RunManifest:
    """The manifest of a coordinator elsewhere; nothing is loaded here afterwards."""
    made = manifest_from(compose_spec(["method=mine", "model=digits_linear"]), ["north", "south"])
    monkeypatch.setattr(registry, "_LOADED", {})
    monkeypatch.setattr(loading, "_IMPORTED", {})
    monkeypatch.delitem(__import__("sys").modules, "mine_package.method")
    return made


def controls(tmp_path: Path, policy: str | None) -> HospitalControls:
    home = Home(tmp_path / "home")
    home.make()
    if policy is not None:
        home.policy.write_text(policy)
        home.policy.chmod(0o600)
    return HospitalControls(home, SiloStore(home.database))


@pytest.mark.parametrize(
    "policy",
    [
        None,
        "",
        "[runs]\nmethods = ['mine_package.method:Mine']\n",
        "[runs]\nextensions = []\n",
        "[runs]\nextensions = ['other']\n",
        "[runs]\nextensions = ['mine-package==1.3']\n",
        "[runs]\nextensions = ['*']\n",
        "[runs]\nextensions = 'mine-package'\n",
        "[runs]\nextensions = ['']\n",
        "[runs]\nmethods = ['fedavg']\nextensions = ['mine-package']\n",
    ],
)
def test_code_that_the_policy_does_not_name_is_refused_and_not_imported(
    tmp_path: Path, mine: Installed, run: RunManifest, policy: str | None
) -> None:
    with pytest.raises(RefusedError) as caught:
        controls(tmp_path, policy).admit(AdmissionRequest("run-1", run))
    assert caught.value.code in ("E-POLICY-15", "E-POLICY-01", "E-POLICY-02")
    assert not mine.imported


def test_code_that_the_policy_names_is_run_and_asked_about_with_its_identity(
    tmp_path: Path, mine: Installed, run: RunManifest
) -> None:
    answer = controls(tmp_path, ALLOWED).admit(AdmissionRequest("run-1", run))
    assert answer.run.manifest == run
    admitted = answer.run
    assert type(admitted.method).__module__ == "mine_package.method"
    said = describe_request(admitted)
    assert "Mine_Package 1.2" in said
    assert mine.identity().digest[:16] in said


def test_a_permission_that_is_withdrawn_ends_although_the_code_is_loaded(
    tmp_path: Path, mine: Installed, run: RunManifest
) -> None:
    hospital = controls(tmp_path, ALLOWED)
    hospital.admit(AdmissionRequest("run-1", run))
    hospital.home.policy.write_text("")
    with pytest.raises(RefusedError, match="none is"):
        hospital.admit(AdmissionRequest("run-1", run))
    with pytest.raises(FederationError) as caught:  # nor does a manifest that hides what it uses open it again
        hospital.admit(AdmissionRequest("run-2", replace(run, extensions=())))
    assert caught.value.code == "E-CFG-08"


def test_a_manifest_that_names_no_code_or_more_than_it_uses_imports_nothing(
    tmp_path: Path, mine: Installed, run: RunManifest
) -> None:
    more = replace(run.extensions[0], kind="partition")
    for lie in ((), (*run.extensions, more), (more,)):
        with pytest.raises(FederationError):
            controls(tmp_path, ALLOWED).admit(AdmissionRequest("run-1", replace(run, extensions=lie)))
    assert not mine.imported


def test_a_coordinator_s_service_imports_nothing_that_a_lead_names(mine: Installed, run: RunManifest) -> None:
    spec = replace(compose_spec([]), method={"name": mine.reference})
    silos = [pb.SiloInfo(name="north", state="online", data=pb.DataOffer(name="digits"))]
    with pytest.raises(ConfigError, match="--extension") as caught:
        build_manifest(RunSpec.from_json(spec.to_json()).to_json(), silos)
    assert caught.value.code == "E-CFG-01"
    assert not mine.imported
    loading.load_distributions(["mine-package"])  # what `coordinator serve --extension` does
    assert build_manifest(spec.to_json(), silos).extensions == (mine.identity(),)


def test_a_service_does_not_start_with_an_extension_that_is_not_installed(mine: Installed) -> None:
    with pytest.raises(ConfigError, match="did you mean 'Mine_Package'"):
        loading.load_distributions(["mine-packages"])


DATA = """
import numpy as np
from consilium.extending import ArrayData

class Mine(ArrayData):
    shape, classes = (2,), ("a", "b")

    def read(self, root):
        x = np.arange(24, dtype=np.float32).reshape(12, 2)
        return (x, np.arange(12) % 2), (x[:4] + 0.5, np.arange(4) % 2)
"""


def test_a_hospital_serves_a_data_set_that_its_own_command_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = install(tmp_path, monkeypatch, "own_data", source=DATA)
    with pytest.raises(ConfigError):
        datasets.parse(found.reference)
    source = DataSource(found.reference)
    assert str(source.reference) == found.reference
    assert len(source.load().train) == 12
    assert source.load().schema.classes == ("a", "b")
    part = datasets.load(loading.load_of_reference(f"{found.reference}/iid-3@1/2"))
    assert (len(part.train), part.origin) == (4, f"{found.reference}/iid-3@1/2")
    assert loading.load_of_reference("digits/p5c2@3/1") == "digits/p5c2@3/1"
    assert loading.load_of_reference("folder:/a/b#p5c2/1") == "folder:/a/b#p5c2/1"
    assert loading.load_of_reference("folder:/a/b") == "folder:/a/b"
