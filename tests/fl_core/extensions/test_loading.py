"""Code of other distributions: identified without an import, and imported only where somebody here allows it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import manifest_from
from fl_core import datasets
from fl_core.errors import ConfigError, RefusedError
from fl_core.extensions import loading, registry
from fl_core.extensions.registry import Extension
from fl_core.methods import METHODS, build_method
from fl_core.methods.fedavg import FedAvg
from fl_core.rounds.manifest import NamedOptions, RunManifest
from fl_core.rounds.run_setup import RunSetup
from tests.support.extensions import Installed, install
from tests.support.federations import manifest


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    return install(tmp_path, monkeypatch)


# ---- identity: nothing is imported ----------------------------------------------------------------------------------


def test_a_package_is_identified_without_being_imported(mine: Installed) -> None:
    found = mine.identity()
    assert (found.distribution, found.version, len(found.digest)) == ("Mine_Package", "1.2", 64)
    assert not mine.imported


def test_the_digest_is_that_of_names_and_bytes_wherever_they_lie(mine: Installed, tmp_path: Path) -> None:
    first = mine.identity().digest
    (tmp_path / "mine_package/__pycache__").mkdir(exist_ok=True)
    (tmp_path / "mine_package/__pycache__/x.cpython-311.pyc").write_bytes(b"1")
    assert mine.identity().digest == first
    changes = []
    for name, content in (("a.py", b""), ("data.txt", b"x"), ("old.pyc", b"x"), ("sub/b.so", b"x")):
        file = tmp_path / "mine_package" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        changes.append(mine.identity().digest)
        file.unlink()
    text = mine.module.read_text()
    mine.module.write_text(text + "#")
    changes.append(mine.identity().digest)
    mine.module.write_text(text)
    mine.module.rename(mine.module.with_name("methods.py"))
    changes.append(mine.identity().digest)
    assert len({first, *changes}) == len(changes) + 1


@pytest.mark.parametrize("kind", ["folder link", "pipe", "broken link"])
def test_what_a_digest_could_not_cover_is_refused(mine: Installed, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "mine_package/odd"
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path if kind == "folder link" else tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="'odd', a link to a folder or a special file") as caught:
        mine.identity()
    assert caught.value.code == "E-CFG-02"


def test_a_package_of_too_many_or_too_large_files_is_refused(
    mine: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_MAX_FILES", 1)
    with pytest.raises(ConfigError, match="at most 1 files"):
        mine.identity()
    monkeypatch.setattr(loading, "_MAX_FILES", 10)
    with (tmp_path / "mine_package/large").open("wb") as file:
        file.truncate(loading._MAX_BYTES + 1)  # sparse: it must not be read
    with pytest.raises(ConfigError, match="512 MiB"):
        mine.identity()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "profile"},
        {"name": "os.system"},
        {"name": "a:b;c"},
        {"name": "é:b"},
        {"name": "a:" + "b" * 300},
        {"distribution": "x\n"},
        {"distribution": "\u202ex"},
        {"distribution": "x" * 1000},
        {"version": "\x1b[0m"},
        {"digest": "z"},
        {"digest": "a" * 65},
    ],
)
def test_a_manifest_cannot_hold_an_extension_with_a_hostile_field(fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(Extension("method", "a:b", "dist", "1", "00"), **fields)
    assert caught.value.code == "E-CFG-02"
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


# ---- load_allowed: what a hospital does with a manifest ------------------------------------------------------------


def refused(extension: Extension, *allowed: str) -> str:
    with pytest.raises(RefusedError) as caught:
        loading.load_allowed(extension, allowed)
    assert caught.value.code == "E-POLICY-15"
    return str(caught.value)


@pytest.mark.parametrize("allowed", [[], ["another"], ["mine-package==1.3"], ["mine-packages"], ["mine"]])
def test_code_that_is_not_allowed_is_never_imported(mine: Installed, allowed: list[str]) -> None:
    assert "found mine_package.method:Mine of Mine_Package 1.2" in refused(mine.identity(), *allowed)
    assert not mine.imported


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1.3"},
        {"digest": "0" * 64},
        {"digest": ""},
        {"name": "mine_package.method:Undeclared"},
        {"name": "os:system"},
        {"name": "subprocess:Popen"},
        {"name": "mine_package:method"},
        {"kind": "model"},
    ],
)
def test_other_code_than_the_manifest_names_is_never_imported(mine: Installed, change: dict[str, str]) -> None:
    refused(replace(mine.identity(), **change), "mine-package")
    assert not mine.imported


def test_another_distribution_s_name_does_not_open_the_door(
    mine: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allowed is `good`; a manifest that says that `mine_package` is of `good` is a lie that metadata do not share."""
    wanted = replace(mine.identity(), distribution="good")
    install(tmp_path / "good", monkeypatch, "good_package", name="good", version="1.2")
    assert "found none" in refused(wanted, "good")
    refused(replace(wanted, distribution=""), "good", "")
    assert not mine.imported


@pytest.mark.parametrize("allowed", ["mine-package", "Mine.Package == 1.2", "MINE_PACKAGE==1.2"])
def test_allowed_code_is_loaded_and_makes_the_method(mine: Installed, allowed: str) -> None:
    wanted = mine.identity()
    loading.load_allowed(wanted, [allowed])
    loading.load_allowed(wanted, [allowed])
    assert build_method(mine.reference, {"mu": 0.25}) == sys.modules["mine_package.method"].Mine(mu=0.25)


def test_permission_is_asked_for_each_time_and_code_that_changed_meanwhile_is_another(mine: Installed) -> None:
    first = mine.identity()
    loading.load_allowed(first, ["mine-package"])
    refused(first)
    mine.module.write_text(mine.module.read_text() + "\n")
    assert "loaded in this process" in refused(mine.identity(), "mine-package")
    loading.load_allowed(first, ["mine-package"])  # what runs here is still the first


def test_files_that_changed_since_their_package_was_imported_are_not_taken_for_what_runs(mine: Installed) -> None:
    compose_spec([f"method={mine.reference}"])
    mine.module.write_text(mine.module.read_text() + "\n")
    other = "mine_package.method:Undeclared"
    with pytest.raises(ConfigError, match="start it again") as caught:
        compose_spec([f"method={other}"])
    assert caught.value.code == "E-CFG-08"
    point = mine.folder / "mine_package-1.2.dist-info/entry_points.txt"
    point.write_text(point.read_text() + f"other = {other}\n")
    assert "start it again" in refused(loading.identify("method", other), "mine-package")


def test_code_that_does_not_import_is_refused_for_this_hospital_and_no_mistake_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = install(tmp_path, monkeypatch, source="import not_there")
    assert "not_there" in refused(found.identity(), "mine-package")


# ---- manifests -----------------------------------------------------------------------------------------------------


def test_a_run_of_our_own_code_keeps_its_digest_and_names_nothing() -> None:
    assert '"extensions"' not in manifest().to_json()


def test_a_manifest_names_the_code_it_uses_and_a_process_without_it_says_so(
    mine: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = compose_spec(["method=mine", "method.mu=0.25"])
    run = manifest_from(spec, ["a", "b"])
    assert run.method == NamedOptions(mine.reference, {"mu": 0.25, "weights": "samples"})
    assert run.extensions == (mine.identity(),)
    assert RunManifest.from_json(run.to_json()) == run
    monkeypatch.setattr(registry, "_LOADED", {})
    with pytest.raises(ConfigError, match=r"loaded here.*--extension") as caught:
        RunSetup.of(run)
    assert caught.value.code == "E-CFG-01"


def test_a_manifest_that_hides_whose_code_it_uses_is_refused_even_where_that_is_loaded(mine: Installed) -> None:
    run = manifest_from(compose_spec(["method=mine"]), ["a", "b"])
    other = replace(run.extensions[0], name="mine_package.method:Undeclared")
    for lie in ((), (*run.extensions, other), (other,), run.extensions * 2):
        with pytest.raises(ConfigError, match="names the code"):
            RunSetup.of(replace(run, extensions=lie))
    with pytest.raises(ConfigError) as caught:
        RunSetup.of(replace(run, extensions=(replace(run.extensions[0], digest="0" * 64),)))
    assert caught.value.code == "E-CFG-08"


def test_no_lookup_of_a_name_imports(mine: Installed) -> None:
    for ask in (
        lambda: build_method(mine.reference, {}),
        lambda: datasets.schema_of(mine.reference),
        lambda: datasets.parse(f"{mine.reference}/p5c2/0"),
        lambda: datasets.parse_federation(mine.reference),
        lambda: RunSetup.of(replace(manifest(), method=NamedOptions(mine.reference))),
    ):
        with pytest.raises(ConfigError):
            ask()
    assert not mine.imported


# ---- words of one's own ---------------------------------------------------------------------------------------------


def test_two_distributions_with_one_name_are_told_apart_by_their_places(
    mine: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "two", monkeypatch, "other_package", name="other")
    with pytest.raises(ConfigError, match=r"mine_package.method:Mine \(Mine_Package\), other_package") as caught:
        compose_spec(["method=mine"])
    assert caught.value.code == "E-CFG-08"
    assert compose_spec([f"method={mine.reference}"]).method["name"] == mine.reference


def test_a_name_of_ours_stays_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = install(tmp_path, monkeypatch, points={"fedmr": "mine_package.method:Mine"})
    assert compose_spec(["method=fedmr"]).method["name"] == "fedmr"
    assert not found.imported


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import not_there", "not_there"),
        ("class Mine: pass", "a method, a class below"),
        ("Mine = 3", "a method, a class below"),
        ("from fl_core.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    x: int = 0", r"options \(x\)"),
        ("def min(): pass", "there is no 'Mine'"),
        (
            "from dataclasses import dataclass\nfrom fl_core.methods.fedavg import FedAvg\n"
            "@dataclass(frozen=True, kw_only=True)\nclass Mine(FedAvg):\n    x: int",
            "a plain default for each option",
        ),
    ],
)
def test_what_is_no_method_is_refused_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    found = install(tmp_path, monkeypatch, source=source)
    with pytest.raises(ConfigError, match=says):
        compose_spec(["method=mine"])
    with pytest.raises(ConfigError):
        build_method(found.reference, {})


def test_a_misspelt_place_is_answered_with_the_nearest(mine: Installed) -> None:
    with pytest.raises(ConfigError, match="did you mean 'Mine'"):
        compose_spec(["method=mine_package.method:Mien"])
    with pytest.raises(ConfigError, match="there is no package 'no_such_package'"):
        compose_spec(["method=no_such_package:Mine"])
    with pytest.raises(ConfigError, match="built into Python"):
        compose_spec(["method=sys:Mine"])


def test_the_folder_of_the_process_is_looked_at_last_and_only_for_words_that_name_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    compose_spec(["method=fedmr"])
    assert str(tmp_path) not in sys.path
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    install(tmp_path / "site", monkeypatch, "lies_here")
    (tmp_path / "here_alone.py").write_text((tmp_path / "site/lies_here/method.py").read_text())
    spec = compose_spec(["method=here_alone:Mine"])
    assert sys.path[-1] == str(tmp_path)
    run = manifest_from(spec, ["a"])
    assert (run.extensions[0].distribution, run.extensions[0].version) == ("", "")
    refused(run.extensions[0], "", "here_alone")


def test_a_given_class_is_there_for_the_context_alone() -> None:
    class Local(FedAvg):
        pass

    with loading.registered("method", Local) as name:
        assert isinstance(build_method(name, {}), Local)
    with pytest.raises(ConfigError):
        build_method(name, {})
    assert "fedavg" in METHODS


def test_what_is_installed_is_said_without_an_import(mine: Installed) -> None:
    found = registry.installed(["mine-package", "mine-package==9", "nothing"])
    assert found == {
        "mine-package": "1.2: method mine_package.method:Mine",
        "mine-package==9": "not installed, found 1.2",
        "nothing": "not installed, found none",
    }
    assert not mine.imported
