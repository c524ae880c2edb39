"""The wheel works where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from setuptools import build_meta

from service_core.version import PACKAGES, build, software
from tests.e2e.test_readme import Machine, images
from tests.support.processes import free_port

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
KEPT_OUT = ("tests", "benchmarks", "docs", "examples")
WITHOUT_LIBRARIES = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"matplotlib", "sklearn", "ray", "pandas", "pyarrow", "onnx", "mlflow", "hydra"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel in a copy of what git would check out."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines():  # fmt: skip
        if (ROOT / name).is_file() and not name.startswith(tuple(f"{kept}/" for kept in KEPT_OUT)):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    code = f"import os; os.chdir({str(source)!r}); from setuptools import build_meta; "
    code += f"print(build_meta.build_wheel({str(built)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(unpacked)
    return unpacked


def run(wheel: Path, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(wheel), "HOME": str(folder), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def test_it_holds_the_packages_their_data_and_their_types_and_nothing_else(wheel: Path) -> None:
    there = {p.name for p in wheel.iterdir() if p.suffix != ".dist-info"}
    assert there == set(PACKAGES)
    assert {p.relative_to(wheel / "coordinator") for p in (wheel / "coordinator/configs").rglob("*.yaml")} == {
        p.relative_to(ROOT) for p in (ROOT / "configs").rglob("*.yaml")
    }
    for name in there:
        assert (wheel / name / "py.typed").exists(), f"{name} has types, and does not say so"
        unpacked = {p.relative_to(wheel) for p in (wheel / name).rglob("*") if p.is_file()}
        tracked = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", name],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.splitlines()  # fmt: skip
        assert {Path(p) for p in tracked if (ROOT / p).is_file()} - unpacked == set()


def test_wheel_and_checkout_call_themselves_alike(wheel: Path, tmp_path: Path) -> None:
    assert build(wheel) == build(ROOT)
    found = run(wheel, tmp_path, "import service_core.version as v; print(v.__file__, v.software())")
    assert found.stdout.strip() == f"{wheel / 'service_core/version.py'} {software()}", found.stderr


def test_it_works_beside_others_who_call_theirs_web_and_configs(wheel: Path, tmp_path: Path) -> None:
    """web.py, for one, installs a module `web`."""
    for name in ("web", "configs"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not ours')")
    code = "from consilium.web.serve import PageServer; from coordinator.config.hydra_config import compose_spec\n"
    code += "print(compose_spec(['data=digits']).data['name'])"
    found = run(wheel, tmp_path, code)
    assert found.stdout.strip() == "digits", found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["coordinator", "--version"],
        ["coordinator", "methods", "--papers"],
        ["coordinator", "simulate", "method=fedmr", "data=digits", "federation=p5c2", "rounds=1"],
        ["coordinator", "privacy", "preview", "privacy=dp_record", "data=digits", "federation=p5c2"],
        ["coordinator", "explain", "E-TLS-05"],
        ["coordinator", "init", "study", "--home", "home", "--address", "localhost:1"],
        ["silo", "data", "check", "digits/hospital2"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_its_commands_run_in_an_empty_folder(wheel: Path, words: list[str], tmp_path: Path) -> None:
    code = f"import sys; sys.argv = {words!r}; import {words[0]}.cli.main as m; print(m.__file__); m.main()"
    found = run(wheel, tmp_path, code)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(str(wheel))


@pytest.mark.slow
def test_a_silo_needs_none_of_the_extras(wheel: Path, tmp_path: Path) -> None:
    """A hospital installs no plots, tables, exports, trackers or engines, and no configuration library."""
    code = WITHOUT_LIBRARIES + "sys.argv = ['silo', '--help']; import silo.cli.main as m\ntry: m.main()\n"
    code += "except SystemExit: pass\nimport silo.service.task_runner, silo.training.trainer, privacy.compiled_run\n"
    code += "print('loads')"
    found = run(wheel, tmp_path, code)
    assert found.stdout.endswith("loads\n"), found.stderr
    code = WITHOUT_LIBRARIES + "sys.argv = ['silo', 'audit', '--data', 'digits', '--out', 'x']\n"
    code += "import silo.cli.main as m; m.main()"
    found = run(wheel, tmp_path, code)
    assert found.returncode == 2
    assert "E-CFG-08" in found.stderr
    assert "pip install 'consilium-fl[audit]'" in found.stderr


IMPORT_ALL = """
import importlib, pkgutil
for package in PACKAGES:
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print("all imported")
"""
NO_REGISTRY = ("Failed to fetch", "error sending request", "Network connectivity is disabled")


def installed(place: Path, *packages: Sequence[str]) -> Path:
    """Make an environment of nothing but packages, and return where its programs are. packages: words of each install.

    Skips the test where there is no uv, or no registry can be reached.
    """
    places = (None, ROOT / ".venv/.uv/bin", Path(sys.base_prefix) / "bin")  # where `make setup` finds it, or puts it
    uv = next(filter(None, (shutil.which("uv", path=place) for place in places)), None)
    if uv is None:
        pytest.skip("no uv here")
    place.mkdir(exist_ok=True)
    python = place / "bin/python"
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    for words in (
        [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(place)],
        *([*install, *words] for words in packages),
    ):
        done = subprocess.run(words, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode and any(said in done.stderr for said in NO_REGISTRY):
            pytest.skip("no package registry can be reached")
        assert done.returncode == 0, done.stderr
    return python.parent


@pytest.fixture(scope="module")
def lowest(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel beside the oldest version of everything that it names, and return where its programs are."""
    oldest = ["--resolution", "lowest-direct", "-r", str(ROOT / "pyproject.toml"), "--extra", "all"]
    return installed(tmp_path_factory.mktemp("lowest"), oldest, ["--no-deps", str(wheel_file)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hospital_without_torch_takes_400_mb_and_says_what_it_computes(wheel_file: Path, tmp_path: Path) -> None:
    lock = ["--require-hashes", "-r", str(ROOT / "requirements-without-torch.lock")]
    base = installed(tmp_path / "small", lock, ["--no-deps", str(wheel_file)])
    size = subprocess.run(["du", "-sm", tmp_path / "small"], capture_output=True, text=True, check=True).stdout
    assert int(size.split()[0]) <= 400
    words = [base / "silo", "doctor", "--home", tmp_path / "home", "--device", "auto"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "without torch: surveys, runs of method=analytic" in told
    assert "pip install 'consilium-fl[torch]'" in told
    for words, extra in (
        ([base / "coordinator", "simulate", "data=digits"], "research"),
        ([base / "coordinator", "serve"], "torch"),
        ([base / "silo", "audit", "--data", "digits", "--out", "x"], "audit"),
    ):
        trains = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (trains.returncode, "Traceback" in trains.stderr) == (2, False)
        assert f"E-CFG-08: expected torch for {words[0].name} {words[1]}" in trains.stderr
        assert f"pip install 'consilium-fl[{extra}]'" in trains.stderr
    code = "import consilium\ntry: consilium.simulate\nexcept consilium.ConfigError as error: print(error)"
    answer = subprocess.run([base / "python", "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.startswith("E-CFG-08: expected torch for consilium.simulate")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_over_two_services_needs_torch_and_no_other_extra(wheel_file: Path, tmp_path: Path) -> None:
    """What a room of `consilium` needs comes with its extra, and a command without it says which."""
    wanted = f"consilium-fl[torch] @ {wheel_file.as_uri()}"
    base = installed(tmp_path / "base", ["--constraint", str(ROOT / "requirements.lock"), wanted])
    listed = subprocess.run(
        [base / "python", "-c", "from importlib.metadata import distributions as d; print(*(f.name for f in d()))"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert {"starlette", "scikit-learn", "matplotlib", "pandas", "onnx", "highdicom"} & set(listed) == set()
    here, address = Machine(tmp_path / "here"), f"127.0.0.1:{free_port()}"
    here.env["PATH"] = f"{base}{os.pathsep}{here.env['PATH'].partition(os.pathsep)[2]}"
    images(tmp_path / "here/images", {"melanoma": (60, 20, 20), "nevus": (120, 80, 40)})
    try:
        here.run(f"coordinator init study --address {address} && coordinator invite north --out north.token")
        here.serve(f"coordinator serve --bind {address} --metrics {free_port()}")
        here.run("silo join --token-file north.token && silo doctor")
        here.serve("silo serve --data folder:images")
        words = 'data=folder "data.classes=[melanoma,nevus]" data.image_size=32 model=simple_cnn'
        here.run(f"coordinator run method=fedavg {words} rounds=1 train.epochs=1")
        assert "finished" in here.run("coordinator show latest && silo status")
        for command, extra in {
            "coordinator simulate data=digits federation=p5c2 rounds=1": "research",
            "coordinator page --no-browser": "pages",
            "silo page --no-browser": "pages",
            "silo audit --data folder:images --out audit": "audit",
            "coordinator export latest --format onnx": "model",
        }.items():
            said = here.run(f"{command} || test $? = 2")
            assert f"pip install 'consilium-fl[{extra}]'" in said, said
    finally:
        here.stop()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_with_one_extra_shows_the_demo_in_an_empty_environment(wheel_file: Path, tmp_path: Path) -> None:
    """What README says to somebody without make: two commands."""
    locked = ["--constraint", str(ROOT / "requirements.lock"), f"{wheel_file}[research]"]
    here = Machine(tmp_path / "here")
    here.env["PATH"] = f"{installed(tmp_path / 'research', locked)}{os.pathsep}/usr/bin{os.pathsep}/bin"
    assert "The results, as a page: file://" in here.run("consilium demo --rounds 1")
    assert (tmp_path / "here/runs/demo/index.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_is_imported_beside_the_oldest_versions_that_are_declared(lowest: Path, tmp_path: Path) -> None:
    code = f"PACKAGES = {PACKAGES}\n{IMPORT_ALL}"
    done = subprocess.run([lowest / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all imported", done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_is_trained_over_the_wire_beside_the_oldest_versions_that_are_declared(
    lowest: Path, tmp_path: Path
) -> None:
    here, address = Machine(tmp_path / "here"), f"127.0.0.1:{free_port()}"
    here.env["PATH"] = f"{lowest}{os.pathsep}{here.env['PATH']}"
    try:
        here.run(f"coordinator init study --address {address} && coordinator invite north --out north.token")
        here.serve(f"coordinator serve --bind {address} --metrics {free_port()}")
        here.run("silo join --token-file north.token && silo doctor")
        here.serve("silo serve --data digits/hospital0")
        here.run("coordinator run method=fedavg data=digits rounds=1 train.epochs=1")
        assert "software: consilium-fl" in here.run("coordinator show latest")
        assert here.run("silo serve || test $? = 2")
    finally:
        here.stop()


def test_the_build_needs_setuptools_alone() -> None:
    assert build_meta.get_requires_for_build_wheel() == []
