"""Charts and gauges are right, whatever numbers they get; and a CSV holds no formula."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilium.pages.lead.exports import csv_bytes
from consilium.web import rendering
from consilium.web.chart import MAX_POINTS, MAX_SERIES, TABLE_ROWS, Chart, Series, draw
from consilium.web.rendering import make_environment, moment, size

ANY = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([1e38, -1e38, 1e-40, 0.0, -0.0, 1.0])


def _points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def test_a_curve_goes_through_its_values() -> None:
    found = draw(Chart("Accuracy", "round", [1, 2, 3], [Series("all", [0.0, 0.5, 1.0], 1)], limits=(0.0, 1.0)))
    assert _points(found.curves[0].path) == [(0, 1000), (500, 500), (1000, 0)]
    assert [t.text for t in found.x_ticks] == ["1", "2", "3"]
    assert [t.text for t in found.y_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [t.at for t in found.y_ticks] == pytest.approx([100 - 20 * k for k in range(6)])
    assert found.rows == (("1", "0"), ("2", "0.5"), ("3", "1"))
    assert "all 1" in found.text


def test_a_gap_interrupts_a_curve_and_a_lonely_point_is_a_dot() -> None:
    found = draw(Chart("A", "round", [1, 2, 3, 4], [Series("s", [None, 0.5, math.nan, 1.0], 1)], limits=(0.0, 1.0)))
    assert found.curves[0].path == "M333.3 500.0h0M1000.0 0.0h0"
    assert [row[1] for row in found.rows] == ["–", "0.5", "–", "1"]


@given(st.lists(st.lists(ANY, min_size=3, max_size=3), max_size=MAX_SERIES))
def test_whatever_the_numbers_are_the_drawing_stays_in_its_field(values) -> None:
    found = draw(Chart("A", "round", [1, 2, 3], [Series(f"s{k}", v, k) for k, v in enumerate(values, 1)]))
    for curve in found.curves:
        assert all(0 <= x <= 1000 and 0 <= y <= 1000 for x, y in _points(curve.path))
    assert all(-0.1 <= t.at <= 100.1 for t in (*found.x_ticks, *found.y_ticks))
    assert all(curve.name == f"s{curve.colour}" for curve in found.curves)


def test_long_runs_are_bounded_and_say_what_is_left_out() -> None:
    x = list(range(10_000))
    found = draw(Chart("A", "round", x, [Series("n" * 2000, [float(k) for k in x], 1)]))
    points = _points(found.curves[0].path)
    assert len(points) <= MAX_POINTS + 1
    assert points[-1][0] == 1000
    assert (len(found.rows), found.rows_left_out) == (TABLE_ROWS, 10_000 - TABLE_ROWS)


@pytest.mark.parametrize("x", [[1, 1], [2, 1], [1, math.nan]])
def test_x_that_does_not_increase_is_an_error(x) -> None:
    with pytest.raises(ValueError, match="increasing"):
        Chart("A", "round", x, [])


def test_a_series_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected 2 values, found 1"):
        Chart("A", "round", [1, 2], [Series("s", [1.0], 1)])


@pytest.mark.parametrize("colours", [[0], [MAX_SERIES + 1], [1, 1], [*range(1, MAX_SERIES + 2)]])
def test_two_curves_of_one_colour_and_more_than_a_reader_tells_apart_are_an_error(colours) -> None:
    with pytest.raises(ValueError, match="different colours from 1 to 6"):
        Chart("A", "round", [1], [Series("s", [1.0], colour) for colour in colours])


def test_a_curve_without_values_keeps_no_other_from_its_colour() -> None:
    series = [Series("a", [None], 1), Series("b", [0.5], 2)]
    assert [(c.name, c.colour) for c in draw(Chart("A", "round", [1], series)).curves] == [("b", 2)]


def test_no_values_are_an_empty_drawing_that_says_so() -> None:
    found = draw(Chart("Accuracy", "round", [], []))
    assert (found.curves, found.rows, found.text) == ((), (), "Accuracy: nothing to draw yet")


@given(st.floats(min_value=0, allow_nan=False), st.floats(min_value=0, allow_nan=False))
def test_a_gauge_never_leaves_its_track(used, more) -> None:
    found = rendering.draw(used, more)
    assert 0 <= found.used <= 100
    assert 0 <= found.more <= 100.01 - found.used
    assert found.full is (used >= 1)


def test_a_gauge_says_both_shares_in_words() -> None:
    found = rendering.draw(0.25, 0.5)
    assert (found.used, found.more) == (25, 50)
    assert found.text == "25 percent used, would use 50 percent more"


@pytest.mark.parametrize(("used", "more"), [(-0.1, 0), (0, -0.1), (math.nan, 0), (0, math.nan)])
def test_a_gauge_of_no_share_is_an_error(used, more) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        rendering.draw(used, more)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", " =1", "\n=1"])
def test_a_text_that_a_spreadsheet_would_compute_is_only_text(text) -> None:
    rows = list(csv.reader(io.StringIO(csv_bytes(["name"], [[text]]).decode())))
    assert rows[1][0].startswith("'")


def test_numbers_stay_numbers_in_csv() -> None:
    assert csv_bytes(["a", "b"], [[-1.5, "x\u202e"]]).decode().splitlines() == ["a,b", "-1.5,x\\u202e"]


@pytest.mark.parametrize(
    ("bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (45_120_000, "45.1 MB"), (2e14, "200.0 TB")],
)
def test_sizes_are_for_people(bytes, text) -> None:
    assert size(bytes) == text


def test_a_time_that_no_calendar_has_is_a_dash() -> None:
    assert moment(1e300) == moment(None) == moment(0) == moment(-1e20) == "–"


def test_everything_of_a_chart_is_escaped(tmp_path: Path) -> None:
    hostile = "</svg><script>\u202e\x00"
    (tmp_path / "t.html").write_text('{% from "parts.html" import chart with context %}{{ chart(c, "c1") }}')
    text = (
        make_environment(tmp_path)
        .get_template("t.html")
        .render(c=Chart(hostile, hostile, [1], [Series(hostile, [1.0], 1)]), token="t")
    )
    assert "<script>" not in text
    assert "\u202e" not in text
    assert "\x00" not in text


def test_the_cells_of_a_stacked_table_have_the_names_of_their_columns(tmp_path: Path) -> None:
    hostile = '"><script>\u202e'
    table = (
        '{% filter stacked %}<table><thead><tr><th scope="col">a</th><th>{{ h }}</th><th>c</th></tr></thead>\n<tbody>\n'
        "{% for v in (h, none) %}<tr><th>{{ v }}</th><td class=x>{{ v }}</td><td><b>{{ v }}</b></td></tr>{% endfor %}"
        "</tbody></table>{% endfilter %}"
    )
    (tmp_path / "t.html").write_text(table)
    text = make_environment(tmp_path).get_template("t.html").render(h=hostile)
    name = r"&#34;&gt;&lt;script&gt;\u202e"
    assert text.count(f'<td data-label="{name}" class=x') == 2
    assert f'<td data-label="{name}" class=x data-empty>–</td><td data-label="c"><b>–</b></td>' in text
    assert "<script>" not in text
