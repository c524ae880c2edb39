"""Every page fits every screen, light and dark: nothing sticks out, no metres are empty, charts fill their card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from consilium.web.chart import MAX_SERIES
from tests.support.gallery import PAGES, gallery
from tests.support.pages import chromium

pytestmark = pytest.mark.integration

WIDTHS = (390, 800, 1280)
SCHEMES = ("light", "dark")
EMPTY_PX = 120
"""Pixels of height without anything to see, at most: a heading's distance from the card before it is half of that."""
FAULTS = """
([widest, most]) => {
  const faults = [], root = document.documentElement, box = e => e.getBoundingClientRect();
  const say = (what, e) => faults.push(`${what}: ${e.outerHTML.slice(0, 90)}`);
  const texts = e => [...e.childNodes].filter(n => n.nodeType === Node.TEXT_NODE && n.data.trim());
  const around = node => { const range = new Range(); range.selectNodeContents(node); return range; };
  for (const all of document.querySelectorAll('details')) all.open = true;
  if (root.scrollWidth > root.clientWidth) faults.push(`wider than the screen: ${root.scrollWidth} px`);

  const seen = [];
  for (const e of document.querySelectorAll('body *')) {
    const {left, right, width, height} = box(e);
    if (!width || !height || !e.checkVisibility() || e.matches('.skip')) continue;
    const card = box(e.closest('.card') ?? document.body), scrolls = e.parentElement.closest('.scroll');
    if (!scrolls && (right > card.right + 1 || left < card.left - 1)) say('sticks out', e);
    const edge = box(e.closest('.scroll') ?? root).right;
    for (const shown of e.matches('img, button, input, .plot') ? [e] : texts(e).map(around))
      if (box(shown).left < edge) seen.push([box(shown).top, box(shown).bottom]);
  }
  let low = 0;
  for (const [top, bottom] of seen.map(ends => ends.map(y => y + scrollY)).sort((a, b) => a[0] - b[0])) {
    if (top - low > most) faults.push(`empty: ${Math.round(top - low)} px above ${Math.round(top)} px`);
    low = Math.max(low, bottom);
  }

  for (const chart of document.querySelectorAll('.chart')) {
    const plot = box(chart.querySelector('.plot > svg')).width, room = box(chart).width;
    if (plot < room - 70) say(`fills ${Math.round(plot)} of ${Math.round(room)} px`, chart);
    const curves = [...chart.querySelectorAll('.plot path')];
    if (curves.every(curve => box(curve).width < 2)) say('a chart without a curve', chart);
    const colours = curves.map(path => getComputedStyle(path).stroke);
    if (colours.length > widest) say(`${colours.length} curves`, chart);
    if (new Set(colours).size < colours.length) say('two curves of one colour', chart);
  }

  const ink = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true}), known = new Map();
  const light = colours => {
    for (const colour of colours) { ink.fillStyle = colour; ink.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...ink.getImageData(0, 0, 1, 1).data].map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (colour, papers) => {
    const key = [...papers, colour].join('; ');
    if (!known.has(key)) {
      const [low, high] = [light([...papers, colour]), light(papers)].sort((a, b) => a - b);
      known.set(key, (high + 0.05) / (low + 0.05));
    }
    return known.get(key);
  };
  for (const e of document.querySelectorAll('body *')) {
    const line = e.matches('.curve'), style = getComputedStyle(e), papers = [];
    if (!e.checkVisibility() || !(line || texts(e).length)) continue;
    for (let below = e; below; below = below.parentElement) papers.unshift(getComputedStyle(below).backgroundColor);
    const found = contrast(line ? style.stroke : e.matches('text') ? style.fill : style.color, papers);
    if (found < (line ? 3 : 4.5)) say(`contrast of ${found.toFixed(1)}`, e);
  }
  for (const row of document.querySelectorAll('.charts')) {
    const last = Math.max(...[...row.children].map(e => box(e).right));
    if (row.children.length && last < box(row).right - 2) say('empty beside charts', row);
  }
  return faults;
}
"""
"""Of an open page, as sentences: what is wider than the screen or its card, empty, or not to be read."""


@pytest.fixture(scope="module")
def show(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    with chromium() as browser, gallery(browser, tmp_path_factory.mktemp("gallery")) as found:
        yield found


def faults(tab: Any, change: str = "") -> list[str]:
    """Find the faults of an open page. change: a statement about `main` before that, in one step: the page lives."""
    before = f"const main = document.querySelector('main'); {change};"
    found: list[str] = tab.evaluate(f"limits => {{ {before} return ({FAULTS})(limits); }}", [MAX_SERIES, EMPTY_PX])
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_every_screen_and_is_read_in_light_and_dark(show: Callable[[str], Any], name: str) -> None:
    tab, found = show(name), {}
    for scheme in SCHEMES:
        tab.emulate_media(color_scheme=scheme)
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            found[f"{width} px, {scheme}"] = faults(tab)
    assert {screen: said for screen, said in found.items() if said} == {}


ADDED = {
    "wider than the screen": "main.style.minWidth = '1400px'",
    "sticks out": "main.querySelector('h2').style.width = '1400px'",
    "empty": "main.querySelector('h2').style.marginBottom = '200px'",
    "contrast": "main.querySelector('h2').style.color = '#999'",
    "fills": "main.querySelector('.plot').style.width = '200px'",
    "7 curves": "for (let k = 4; k; k--) main.querySelector('.curve').after(main.querySelector('.curve').cloneNode())",
    "a chart without": "main.querySelectorAll('.plot path').forEach(e => e.remove())",
    "two curves of one colour": "main.querySelector('.curve.c2').classList.replace('c2', 'c1')",
    "empty beside charts": "main.querySelectorAll('.charts > *').forEach(e => e.style.flex = '0 0 200px')",
}


@pytest.mark.parametrize("fault", ADDED)
def test_what_does_not_fit_is_found(show: Callable[[str], Any], fault: str) -> None:
    tab = show("lead, finished")
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.emulate_media(color_scheme="light")
    assert faults(tab) == []
    assert any(said.startswith(fault) for said in faults(tab, ADDED[fault]))
