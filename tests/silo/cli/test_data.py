"""What `silo data check` says to a hospital of its data."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from silo.cli.main import program
from tests.silo.admission.test_surveys import write_images


@pytest.mark.parametrize(("named", "said"), [(True, "groups 10"), (False, "none: patients are not named")])
def test_a_check_says_whether_patients_are_named_and_how_to_name_them(tmp_path, named, said):
    reference = write_images(tmp_path / "images", range(10), named=named)
    result = CliRunner().invoke(program().build(["data"]), ["data", "check", reference], env={"COLUMNS": "400"})
    assert said in " ".join(result.output.split())
    assert ("column group of a list" in result.output) is not named
