"""docs/privacy says what is so: numbers follow from closed forms, and what is named exists."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import typer
import yaml
from PIL import Image
from scipy.stats import norm

from benchmarks.epsilon_picture import __main__ as picture
from benchmarks.epsilon_picture import limits
from fl_core.errors import ConfigError
from fl_core.methods import METHODS, build_method
from privacy.accounting.accountant import FilterName, replace_one
from privacy.accounting.gaussian import delta_of, mu_of
from privacy.accounting.record_config import RecordDpConfig
from privacy.mechanisms.noise.discrete_gaussian import MIN_SIGMA, TOTAL_VARIATION
from privacy.mechanisms.noise.grid import SLACK
from privacy.mechanisms.silo.config import SiloDpConfig
from privacy.policy import Policy
from privacy.profiles import PROFILES
from silo.cli.main import program as silo

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/privacy").glob("*.md"))
PICTURE = ROOT / "benchmarks/epsilon_picture/README.md"
DELTA = RecordDpConfig().delta
SAID = ("policy.toml", "ledger.key", "hospital", "CONSILIUM_SILO_LEDGER", "accuracy_low", "accuracy_high", "withheld")
SAID += get_args(FilterName)
"""What people type or read that is no name in Python."""
TEXT = {page.name: page.read_text() for page in PAGES}
EPSILON = TEXT["epsilon.md"]
FLAT = " ".join(EPSILON.split())


def tables(text: str) -> list[list[list[str]]]:
    """Return the tables of a page: rows of cells, without the heads."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append(rows[2:])
    return found


def says_at_most(cell: str, value: float) -> None:
    """Hold a cell against a value that it bounds: the value rounded up to the digits that the cell shows."""
    number = cell.removesuffix("%").strip().replace(",", "")
    digits = len(number.partition(".")[2])
    exact = value * (100 if cell.endswith("%") else 1)
    assert float(number) == pytest.approx(math.ceil(round(exact * 10**digits, 6)) / 10**digits), (cell, exact)


# ---- the closed forms ------------------------------------------------------------------------------------------


def curve(epsilon: float, delta: float) -> list[tuple[float, float]]:
    """Walk the best tests (false, true positives) of the worst mechanism of all: it tells with probability delta, and
    else answers truly with odds e^epsilon. Outcomes are taken by their likelihood ratio, as Neyman and Pearson say.
    """
    true = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    used = [delta, true, 1 - delta - true, 0.0]
    points, x, y = [(0.0, 0.0)], 0.0, 0.0
    for p, q in zip(used, reversed(used), strict=True):
        x, y = x + q, y + p
        points.append((x, y))
    return points


@pytest.mark.parametrize("delta", [0.0, DELTA, 1e-2])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0])
def test_limits_are_those_of_the_worst_mechanism(epsilon: float, delta: float) -> None:
    points = curve(epsilon, delta)
    x, y = zip(*points, strict=True)
    assert limits.right(epsilon, delta) == pytest.approx(max((1 + b - a) / 2 for a, b in points), abs=1e-12)
    for wrong in (1e-4, 1e-3, 1e-2, 0.3, 0.9):
        assert limits.found(epsilon, delta, wrong) == pytest.approx(float(np.interp(wrong, x, y)), abs=1e-12)
    picked = float(np.trapezoid(y, x))  # of two records: the same but for what delta adds
    assert abs(picked - limits.right(epsilon, delta)) <= delta + 1e-12


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 20.0])
def test_limits_of_gaussian_noise_are_those_of_two_normal_distributions(epsilon: float) -> None:
    z = 1 / mu_of(epsilon, DELTA)
    assert delta_of(1 / z, epsilon) == pytest.approx(DELTA, rel=1e-6)
    cuts = np.linspace(-8, 12, 200_001)
    false, true = norm.sf(cuts), norm.sf(cuts, loc=1 / z)
    assert limits.gaussian_right(epsilon, DELTA) == pytest.approx(float((1 + true - false).max() / 2), abs=1e-6)
    assert limits.gaussian_picked(epsilon, DELTA) == pytest.approx(float(-np.trapezoid(true, false)), abs=1e-6)
    for wrong in (1e-3, 1e-2):
        found = limits.gaussian_found(epsilon, DELTA, wrong)
        assert found == pytest.approx(float(np.interp(wrong, false[::-1], true[::-1])), abs=1e-6)
        assert found <= limits.found(epsilon, DELTA, wrong)


def test_a_belief_is_moved_by_the_factor_alone() -> None:
    for before in (1e-3, 0.01, 0.5):
        after = limits.belief(2.0, before)
        assert after / (1 - after) == pytest.approx(math.exp(2.0) * before / (1 - before))


def test_records_of_one_person_add_up_step_by_step() -> None:
    assert limits.of_group(1.0, DELTA, 1) == (1.0, DELTA)
    assert limits.of_group(1.0, DELTA, 2) == pytest.approx(replace_one(1.0, DELTA))
    # one more step: P <= e^eps Q + delta, in a chain
    epsilon, delta = limits.of_group(0.7, DELTA, 4)
    before = limits.of_group(0.7, DELTA, 3)
    assert (epsilon, delta) == pytest.approx((before[0] + 0.7, before[1] + math.exp(before[0]) * DELTA))
    assert limits.of_group(8.0, DELTA, 10)[1] == 1.0


# ---- the numbers of the pages ----------------------------------------------------------------------------------


def test_the_tables_of_epsilon_follow_from_the_closed_forms() -> None:
    most, noise, persons = tables(EPSILON)
    assert [float(row[0]) for row in most] == [float(row[0]) for row in noise] == [0.1, 0.5, 1, 2, 4, 8]
    for epsilon, factor, right, belief, one, tenth in most:
        e = float(epsilon)
        says_at_most(factor, math.exp(e))
        says_at_most(right, limits.right(e, DELTA))
        says_at_most(belief, limits.belief(e, 0.01))
        says_at_most(one, limits.found(e, DELTA, 0.01))
        says_at_most(tenth, limits.found(e, DELTA, 0.001))
    for epsilon, right, one, tenth in noise:
        e = float(epsilon)
        says_at_most(right, limits.gaussian_right(e, DELTA))
        says_at_most(one, limits.gaussian_found(e, DELTA, 0.01))
        says_at_most(tenth, limits.gaussian_found(e, DELTA, 0.001))
    assert [row[0] for row in persons] == ["1", "2", "3", "5"]
    for images, epsilon, delta, right in persons:
        e, d = limits.of_group(1.0, DELTA, int(images))
        assert float(epsilon) == e
        says_at_most(delta, d)
        says_at_most(right, limits.right(e, d))


def test_what_is_said_of_attacks_is_what_the_audits_found() -> None:
    audit = json.loads(picture.AUDIT.read_text())

    def between(name: str, training: str) -> str:
        found = [f["auc"] for f in audit[name]["bounds"][training]]
        assert len(found) == 5
        return f"{100 * min(found):.0f} % to {100 * max(found):.0f} %"

    assert f"right in {between('white-box', 'epsilon 8')} of such pairs" in FLAT
    assert f"with the finished model alone in {between('black-box', 'epsilon 8')}." in FLAT
    assert f"was right in {between('black-box', 'no privacy')}." in FLAT


def test_what_mechanics_adds_to_delta_follows_from_the_error_of_one_number() -> None:
    (row,) = (rows for rows in tables(TEXT["mechanics.md"]) if rows[0][0].startswith("1e"))
    for numbers, t, one, eight in row:
        apart = float(numbers.split()[0]) * TOTAL_VARIATION
        for cell, value in ((t, apart), (one, (1 + math.e) * apart), (eight, (1 + math.exp(8)) * apart)):
            assert value <= float(cell) < 1.05 * value
    flat = " ".join(TEXT["mechanics.md"].split())
    assert f"noise is scaled to {1 + SLACK:g} times the sensitivity" in flat
    assert f"least {MIN_SIGMA:g} units of the grid" in flat
    assert math.exp(-2 * math.pi**2 * MIN_SIGMA**2) < 1e-137


# ---- what the pages name ---------------------------------------------------------------------------------------


def named() -> Iterator[tuple[str, str]]:
    """Yield (page, what it writes as code)."""
    for page in (*PAGES, PICTURE):
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            yield page.name, code


def test_what_is_written_as_code_exists() -> None:
    """Commands, paths and error codes: tests/docs/test_pages.py."""
    tops = {p.name for p in ROOT.iterdir() if p.is_dir()}
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for page, code in sorted({*named()}):
        where = f"{page}: {code}"
        if re.match(r"(silo|coordinator) |E-[A-Z]+-\d\d$", code) or ("/" in code and code.split("/")[0] in tops):
            continue
        if code == "--out":
            assert f'"{code}"' in (ROOT / "benchmarks/epsilon_picture/__main__.py").read_text()
        elif code.startswith("--"):
            (serve,) = (
                c for name, c in typer.main.get_command(silo().build(["serve"])).commands.items() if name == "serve"
            )  # type: ignore[attr-defined]
            assert code in {option for parameter in serve.params for option in parameter.opts}, where
        elif code.startswith("python -m "):
            assert importlib.util.find_spec(code.split()[2]) is not None, where
        elif re.fullmatch(r"test_\w+", code):
            assert re.search(rf"def {code}\b", tests), where
        elif code in SAID:
            assert any(code in file.read_text() for top in ("privacy", "silo") for file in (ROOT / top).rglob("*.py"))
        elif code.startswith("privacy=") or code in PROFILES:
            assert code.removeprefix("privacy=") in PROFILES, where
        elif code in METHODS:
            continue
        elif re.fullmatch(r"method\.\w+=\w+", code):
            key, value = code.removeprefix("method.").split("=")
            having = [name for name in METHODS if key in {f.name for f in fields(METHODS[name])}]
            assert having, where
            for name in having:
                build_method(name, {key: yaml.safe_load(value)})
        elif re.fullmatch(r"privacy\.\w+=\w+", code):
            key, value = code.removeprefix("privacy.").split("=")
            made = [kind for kind in (RecordDpConfig, SiloDpConfig) if hasattr(kind(), key)]
            beside = {"bit_noise": 1.0} if key == "clipping" else {}
            chosen = {**beside, key: math.inf if value == "inf" else value}
            assert any(accepts(kind, chosen) for kind in made), where
        elif re.fullmatch(r"(runs|privacy|prototypes|evaluation|secagg|peers|survey)\.\w+( = .+)?", code):
            section, key = code.split(" ")[0].split(".")
            terms = (getattr(Policy(), section), RecordDpConfig(), SiloDpConfig())
            assert any(hasattr(kind, key) for kind in terms), where
            if " = " in code:
                Policy.parse(code.encode())
        else:
            defined_in_the_files_of_its_row(code)


def accepts(kind: type[RecordDpConfig | SiloDpConfig], chosen: Mapping[str, object]) -> bool:
    try:
        kind.of(chosen)
    except ConfigError:
        return False
    return True


def defined_in_the_files_of_its_row(code: str) -> None:
    """Require a name that stands beside `package/file.py` in the same line or paragraph to be defined there."""
    texts = [page.read_text() for page in (*PAGES, PICTURE)]
    lines = [line for text in texts for line in re.split(r"\n(?=[|\n-])", text) if f"`{code}`" in line]
    assert lines, code
    for line in lines:
        files = [ROOT / f for f in re.findall(r"`([\w/]+\.py)`", line)]
        assert any(re.search(rf"\b(def|class) {code}\b|^{code}\b.*=", f.read_text(), re.MULTILINE) for f in files), code


# ---- the picture -----------------------------------------------------------------------------------------------


def test_the_picture_is_drawn_and_the_page_shows_it(tmp_path: Path) -> None:
    out = tmp_path / "epsilon.png"
    assert picture.main(["--out", str(out)]) == 0
    drawn = np.asarray(Image.open(out).convert("L"))
    assert drawn.std() > 10
    assert Image.open(picture.PICTURE).size == (drawn.shape[1], drawn.shape[0])
    assert "(epsilon.png)" in EPSILON


def test_no_attack_that_is_drawn_stands_above_the_limit_that_is_drawn_with_it() -> None:
    found = picture.attacks(json.loads(picture.AUDIT.read_text()))
    assert [len(values) for attack in found for values in attack.auc.values()] == [5] * 9
    for attack in found:
        assert set(attack.auc) == set(picture.PLACES)
        for training, epsilon in (("epsilon 1", 1.0), ("epsilon 8", 8.0)):
            assert np.mean(attack.auc[training]) < limits.gaussian_picked(epsilon, DELTA)
    assert min(found[0].auc["no privacy"]) > limits.gaussian_picked(8.0, DELTA)


def test_the_pictures_readme_has_true_numbers() -> None:
    text = PICTURE.read_text()
    flat = " ".join(text.split())
    right, gaussian, right_8, gaussian_8, limit_8, limit = re.search(
        r"is right in at most (.+? %) .+? and in at most (.+? %) .+? At epsilon 8 these are (.+? %) and (.+? %)\."
        r".+?\(limit (.+? %)\).+?\(limit (.+? %)\)",
        flat,
    ).groups()  # type: ignore[union-attr]
    says_at_most(right, limits.right(1.0, DELTA))
    says_at_most(gaussian, limits.gaussian_right(1.0, DELTA))
    says_at_most(right_8, limits.right(8.0, DELTA))
    says_at_most(gaussian_8, limits.gaussian_right(8.0, DELTA))
    says_at_most(limit_8, limits.gaussian_picked(8.0, DELTA))
    says_at_most(limit, limits.gaussian_picked(1.0, DELTA))
    strongest = picture.attacks(json.loads(picture.AUDIT.read_text()))[0].auc
    for training, said in (("epsilon 8", "two records in {:.0f} %"), ("epsilon 1", "in {:.0f} % at epsilon 1")):
        assert said.format(100 * np.mean(strongest[training])) in flat
    assert f"in {100 * np.mean(strongest['no privacy']):.0f} % without privacy" in flat
