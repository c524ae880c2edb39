from __future__ import annotations

from pathlib import Path

import pytest

from fl_core.errors import ConfigError
from silo.pacs.reference import PacsReference

BASE = "dicomweb:https://pacs.example.org:8043/dicom-web/"


def test_an_address_with_options_is_read() -> None:
    made = PacsReference.parse(f"{BASE}?labels=/l.csv:finding&modality=CR,DX&date=20240101-&series=largest&cache=2.5")
    assert made.url == "https://pacs.example.org:8043/dicom-web"
    assert made.table == (Path("/l.csv"), "finding")
    assert made.modalities == ["CR", "DX"]
    assert made.dates == ("20240101", "99999999")
    assert (made.series, made.cache) == ("largest", 2.5)


@pytest.mark.parametrize(
    ("text", "code", "match"),
    [
        (BASE, "E-CFG-02", "labels=FILE:COLUMN"),
        (f"{BASE}?labels=l.csv", "E-CFG-02", "labels=FILE:COLUMN"),
        (f"{BASE}?labels=l.csv:a&modlity=CT", "E-CFG-01", "did you mean 'modality'"),
        (f"{BASE}?labels=l.csv:a&series=second", "E-CFG-02", "series=all"),
        (f"{BASE}?labels=l.csv:a&date=yesterday", "E-CFG-02", "YYYYMMDD"),
        (f"{BASE}?labels=l.csv:a&date=-", "E-CFG-02", "YYYYMMDD"),
        (f"{BASE}?labels=l.csv:a&date=2024010120240131", "E-CFG-02", "YYYYMMDD"),
        (f"{BASE}?labels=l.csv:a&date=20240101-20240131-", "E-CFG-02", "YYYYMMDD"),
        (f"{BASE}?labels=l.csv:a&date=٢٠٢٤٠١٠١", "E-CFG-02", "YYYYMMDD"),
        (f"{BASE}?labels=/d/labels.toml:a", "E-CFG-02", "another name than labels.toml"),
        (f"{BASE}?labels=l.csv:a&cache=0", "E-CFG-02", "GiB"),
        (f"{BASE}?labels=l.csv:a&cache=nan", "E-CFG-02", "GiB"),
        (f"{BASE}?labels=l.csv:a#part", "E-CFG-02", "expected dicomweb:"),
        ("dicomweb:ftp://pacs/?labels=l.csv:a", "E-CFG-02", "expected dicomweb:"),
        ("dicomweb:https://[::1?labels=l.csv:a", "E-CFG-02", "expected dicomweb:"),
        ("dicomweb:https://pacs:port/?labels=l.csv:a", "E-CFG-02", "expected dicomweb:"),
        ("dicomweb:http://pacs.example/?labels=l.csv:a&credentials=p", "E-CFG-02", "https with credentials"),
    ],
)
def test_what_is_no_reference_says_what_is_expected(text: str, code: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        PacsReference.parse(text)
    assert error.value.code == code


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="without a user and password") as error:
        PacsReference.parse("dicomweb:https://ward:s3cret@pacs.example/?labels=l.csv:a")
    assert "s3cret" not in str(error.value)


def test_the_same_selection_has_one_folder_whoever_asks_with_which_password() -> None:
    plain = PacsReference.parse(f"{BASE}?labels=/l.csv:a")
    assert plain.key == PacsReference.parse(f"{BASE}?labels=/l.csv:a&credentials=/p&cache=1&ca=/c.pem").key
    assert plain.key != PacsReference.parse(f"{BASE}?labels=/l.csv:a&modality=CT").key
    assert plain.public == "dicomweb:https://pacs.example.org:8043/dicom-web"
