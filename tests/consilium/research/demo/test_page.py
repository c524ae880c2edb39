"""The page of the demo's results: one file that needs nothing but itself."""

from __future__ import annotations

import re
from pathlib import Path

from consilium.research.demo.report import Holdings, ResultTable, write_page

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


def test_it_loads_nothing_and_shows_what_it_is_given_as_text(tmp_path: Path) -> None:
    file = tmp_path / "index.html"
    table = ResultTable(HOSTILE, ("who", HOSTILE), [(HOSTILE, "90 %")])
    held = Holdings((HOSTILE, "1"), {HOSTILE: (0, 7), "north": (14, 0)})
    write_page(file, HOSTILE, HOSTILE, held, {"plain": [0.1, 0.5], "private": [0.1]}, [table])
    page = file.read_text()
    assert not re.findall(r"(?:src|href|action)=|@import|url\(", page)
    assert "<script" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert page.count('vector-effect="non-scaling-stroke"') == 2
    assert "50" in page
    assert re.findall(r'number images(\d)">(\d*)<', page) == [("0", ""), ("2", "7"), ("4", "14"), ("0", "")]
