"""A policy that is not what the hospital wrote, or that says what no number can keep to, allows nothing at all."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fl_core.errors import ConfigError, FederationError, RefusedError
from fl_core.rounds.run_setup import RunSetup
from privacy.policy import Policy
from privacy.policy_terms import Floors, PrototypePolicy
from privacy.profiles.record import release_plan
from silo.admission.controls import AdmissionRequest, HospitalControls
from silo.cli.main import run
from silo.storage.home import Home
from silo.storage.store import SiloStore
from tests.support.fake_coordinator import Hospital, enrolled, manifest
from tests.support.hospital import Watched
from tests.support.privacy import TEST, TRAIN, budgeted, private

pytestmark = pytest.mark.integration

SOUND = '[privacy]\nrng = "test"\nepsilon = 8.0\n'
STRANGER = 54321


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home in which a private run within the policy would be accepted."""
    budgeted(tmp_path / "home", policy=SOUND)
    return enrolled(tmp_path / "home")


@pytest.fixture
def controls(home: Home):
    store = SiloStore(home.database)
    yield HospitalControls(home, store)
    store.close_database()


def digits() -> tuple[str, ...]:
    return tuple(manifest().schema.classes)


def code_of(controls: HospitalControls, about=None) -> str:
    """Ask for a plain and for a private run; return the one code of both refusals, or that of `about` alone."""
    codes = []
    for asked in (private(), manifest()) if about is None else (about,):
        with pytest.raises(FederationError) as refused:
            controls.admit(AdmissionRequest("run-1", asked, digits))
        assert isinstance(refused.value, RefusedError)
        codes.append(refused.value.code)
    (code,) = set(codes)
    return code


def checked(home: Home, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run `silo policy check`; return the code that it fails with, "" where it finds the policy sound."""
    capsys.readouterr()
    status = run(["policy", "check", *words, "--home", str(home.path)])
    message = capsys.readouterr().err
    assert (status != 0) == bool(message)
    return message.split(":")[0] if status else ""


def test_the_sound_file_and_a_link_to_one_are_accepted(home, controls, capsys, tmp_path) -> None:
    assert controls.admit(AdmissionRequest("run-1", private(), digits))
    (tmp_path / "etc").mkdir()
    home.policy.rename(tmp_path / "etc/policy.toml")
    home.policy.symlink_to(tmp_path / "etc/policy.toml")
    assert controls.admit(AdmissionRequest("run-1", private(), digits))
    assert checked(home, capsys) == ""


def dangling(home: Home) -> None:
    home.policy.rename(home.path / "elsewhere")
    home.policy.symlink_to(home.path / "mistyped")


def circle(home: Home) -> None:
    home.policy.unlink()
    home.policy.symlink_to(home.policy)


def folder(home: Home) -> None:
    home.policy.unlink()
    home.policy.mkdir()


def pipe(home: Home) -> None:
    home.policy.unlink()
    os.mkfifo(home.policy, 0o600)


def huge(home: Home) -> None:
    home.policy.write_text(SOUND + "#" * (1 << 20))


@pytest.mark.parametrize("harm", [dangling, circle, folder, pipe, huge], ids=lambda harm: harm.__name__)
def test_what_is_no_readable_file_allows_nothing(home, controls, capsys, harm) -> None:
    harm(home)
    assert code_of(controls) == "E-POLICY-01"
    assert checked(home, capsys) == "E-POLICY-01"
    assert controls.hides_size()
    controls.policy_digest()  # goes with every session: it must not end the service


def test_a_file_that_cannot_be_opened_allows_nothing_and_does_not_end_the_service(home, controls, monkeypatch) -> None:
    """The tests may run as root, whom no mode keeps out: the refusal is the operating system's, made here."""
    plain = os.open

    def refuse(path, *args, **kwargs):
        if Path(path) == home.policy:
            raise PermissionError(13, "Permission denied")
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path, os.O_RDONLY))
    assert code_of(controls) == "E-POLICY-01"
    assert controls.policy_digest() == ""


def test_a_file_that_was_there_and_vanished_is_no_policy_of_defaults(home, controls, capsys) -> None:
    assert controls.admit(AdmissionRequest("run-1", private(), digits))
    home.policy.unlink()
    assert code_of(controls) == "E-POLICY-13"
    assert checked(home, capsys) == "E-POLICY-13"
    home.policy.write_text("")  # the operator says that the defaults are meant
    assert controls.admit(AdmissionRequest("run-1", manifest()))
    assert checked(home, capsys) == ""


def test_a_home_that_never_had_a_policy_has_the_defaults(tmp_path) -> None:
    place = enrolled(tmp_path / "new")
    store = SiloStore(place.database)
    assert HospitalControls(place, store).admit(AdmissionRequest("run-1", manifest()))
    store.close_database()


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_file_that_others_can_write_allows_nothing_and_the_remedy_is_named(home, controls, capsys, mode) -> None:
    home.policy.chmod(mode)
    assert code_of(controls) == "E-POLICY-10"
    with pytest.raises(RefusedError, match="chmod go-w"):
        controls.policy()
    assert checked(home, capsys) == "E-POLICY-10"
    assert checked(home, capsys, str(home.policy)) == "E-POLICY-10"
    home.policy.chmod(mode & ~0o022)
    assert controls.admit(AdmissionRequest("run-1", private(), digits))


def test_a_link_to_a_file_that_others_can_write_allows_nothing(home, controls, tmp_path) -> None:
    real = home.policy.rename(tmp_path / "policy.toml")
    home.policy.symlink_to(real)
    real.chmod(0o666)
    assert code_of(controls) == "E-POLICY-10"


def test_a_file_in_a_folder_that_everybody_can_write_allows_nothing(home, controls, tmp_path) -> None:
    (tmp_path / "open").mkdir()
    real = home.policy.rename(tmp_path / "open/policy.toml")
    home.policy.symlink_to(real)
    assert controls.admit(AdmissionRequest("run-1", private(), digits))
    (tmp_path / "open").chmod(0o777)
    assert code_of(controls) == "E-POLICY-10"


def test_the_file_of_another_user_allows_nothing(home, controls, monkeypatch) -> None:
    if os.geteuid() == 0:
        os.chown(home.policy, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert code_of(controls) == "E-POLICY-10"


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-1.0", "0.0"])
@pytest.mark.parametrize("key", ["privacy.epsilon", "privacy.delta", "budget.'center1/train'.epsilon"])
def test_no_number_that_bounds_nothing_stands_in_a_policy(home, controls, capsys, key, number) -> None:
    rest = "budget.'center1/train'.delta = 1e-5\n" if key.startswith("budget") else ""
    home.policy.write_text(f"privacy.rng = 'test'\n{rest}{key} = {number}\n")
    assert code_of(controls) == "E-POLICY-01"
    assert checked(home, capsys) == "E-POLICY-01"


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-1", "-0.5", "1" + "0" * 400])
@pytest.mark.parametrize("key", ["prototypes.min_count", "privacy.min_noise"])
def test_no_negative_or_endless_count_stands_in_a_policy(home, controls, key, number) -> None:
    home.policy.write_text(f"privacy.rng = 'test'\n{key} = {number}\n")
    assert code_of(controls) == "E-POLICY-01"


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda x: Policy(privacy=Floors(epsilon=x)), (math.inf, math.nan, -1.0, 0.0)),
        (lambda x: Policy(budgets={TRAIN: (x, 1e-5)}), (math.inf, math.nan, -1.0, 0.0)),
        (lambda x: replace(Policy(), budgets={TRAIN: (x, 1e-5)}).caps(), (math.inf, math.nan, -1.0, 0.0)),
        (lambda x: Floors(delta=x), (math.inf, math.nan, 0.0, 1.0)),
        (lambda x: Policy(budgets={TRAIN: (1.0, x)}), (math.inf, math.nan, 0.0, 1.0)),
        (lambda x: PrototypePolicy(min_count=x), (math.nan, math.inf, -1.0)),
        (lambda x: Floors(min_noise=x), (math.nan, math.inf, -1.0)),
        (lambda x: Floors(max_rate=x), (math.nan, math.inf, -1.0)),
    ],
)
def test_python_makes_no_policy_of_numbers_that_mean_nothing_either(make, numbers) -> None:
    for number in numbers:
        with pytest.raises(ConfigError, match="E-POLICY-01"):
            make(number)


def test_a_plan_whose_numbers_are_nan_is_not_allowed() -> None:
    plan = release_plan(RunSetup.of(private()), 1)
    Floors().check_plan(plan, "record")
    vars(plan)["noise"] = math.nan  # what a solver might return: the property is computed once and kept
    with pytest.raises(RefusedError, match="E-POLICY-05"):
        Floors().check_plan(plan, "record")
    with pytest.raises(RefusedError, match="E-POLICY-05"):
        Floors().check_update(math.nan)


def test_a_manifest_that_states_a_smaller_hospital_gets_no_larger_delta() -> None:
    """delta must stay below a tenth of one unit: of the size that the hospital declared, not of what a run claims."""
    plan = release_plan(RunSetup.of(private(delta=9e-6)), 1)
    Floors().check_plan(plan, "record", declared=11_000)
    with pytest.raises(RefusedError, match="E-POLICY-05"):
        Floors().check_plan(plan, "record", declared=12_000)


def test_a_budget_for_no_collection_of_the_ledger_closes_the_hospital_to_private_runs(home, controls, capsys) -> None:
    home.policy.write_text(SOUND + "[budget.'center1/trian']\nepsilon = 1.0\ndelta = 1e-5\n")
    with pytest.raises(RefusedError, match=f"E-POLICY-09.*did you mean '{TRAIN}'.*{TEST}"):
        controls.admit(AdmissionRequest("run-1", private(), digits))
    assert checked(home, capsys) == "E-POLICY-09"
    assert "E-POLICY-09" in [detail for _, _, state, detail, _ in controls.ledger.events() if state == "REFUSED"]
    home.policy.write_text(SOUND + f"[budget.'{TRAIN}']\nepsilon = 1.0\ndelta = 1e-5\n")
    assert controls.admit(AdmissionRequest("run-1", private(), digits))
    assert checked(home, capsys) == ""


def test_the_check_of_a_file_that_is_not_there_is_no_sound_one(home, capsys) -> None:
    assert checked(home, capsys, str(home.path / "polcy.toml")) == "E-POLICY-01"


def test_no_record_is_read_under_a_policy_that_others_can_write(tmp_path, monkeypatch) -> None:
    """The whole service, with the file opened to others while it serves."""
    ledger = budgeted(tmp_path / "home", policy=SOUND)
    hospital = Hospital(tmp_path / "home", private())
    hospital.start()
    Home(tmp_path / "home").policy.chmod(0o666)
    watched = Watched(monkeypatch)
    hospital.offer()
    try:
        refused = hospital.refused()
    finally:
        hospital.end()
    assert refused.code == "E-POLICY-10"
    assert str(tmp_path) not in refused.reason
    assert watched.read == 0
    assert ledger.history(TRAIN) == []
