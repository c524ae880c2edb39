"""The documentation as a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from coordinator.cli.main import COMMANDS
from fl_core.methods import METHODS
from tests.support.pages import chromium

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    ROOT / "README.md": "index.html",
    **{ROOT / f"{name}.md": f"{name.lower()}.html" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")},
    **{page: f"benchmarks/{page.parent.name}.html" for page in (ROOT / "benchmarks").glob("*/README.md")},
    **{
        page: page.relative_to(ROOT / "docs").with_suffix(".html").as_posix().replace("README", "index")
        for page in (ROOT / "docs").rglob("*.md")
    },
}
"""A page's source -> its place in the site."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_navigation_has_at_most_forty_pages_and_every_other_page_is_listed_on_one(site: Path) -> None:
    links = set(re.findall(r'<a href="([^"#]+)" class="md-nav__link', (site / "index.html").read_text()))
    shown = {link for link in links if not link.startswith("adr/")}
    assert shown == links, "decisions are for those who change the code"
    assert len(links) <= 40
    rest = set(re.findall(r'<li><a href="([^"#]+)">', (site / "all-pages.html").read_text()))
    there = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    decisions = {page for page in there if page.startswith("adr/0")}
    assert there - decisions - links - rest - {"index.html"} == set()
    for role in ("hospital", "lead", "researcher", "administrator", "data-protection-officer"):
        assert f"roles/{role}.html" in links


def test_a_page_for_a_role_fits_a_screen() -> None:
    for page in (ROOT / "docs/roles").glob("*.md"):
        text = page.read_text()
        assert len(re.sub(r"\]\([^)]*\)", "]", text).split()) <= 260, page
        assert len(text.splitlines()) <= 32, page


@pytest.mark.slow
def test_the_search_finds_pages_without_a_server(site: Path) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.goto((site / "roles/hospital.html").as_uri())
        page.fill("input.md-search__input", "secure aggregation")
        found = page.locator(".md-search-result__item h1").first
        found.wait_for(state="attached", timeout=60_000)
        assert "ecure aggregation" in str(found.text_content())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_kept_from_reading_the_site(site: Path, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with chromium() as browser:
        context = browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 844})
        for name in ("index", "roles/hospital", "reference/silo", "all-pages", "privacy/epsilon"):
            page = context.new_page()
            page.goto((site / f"{name}.html").as_uri())
            found = Axe().run(page).response["violations"]
            assert [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] != "minor"] == []


def test_the_site_names_every_command_and_loads_nothing_from_elsewhere(site: Path) -> None:
    reference = (site / "reference/coordinator.html").read_text()
    assert all(f"coordinator {name}" in reference for commands in COMMANDS.values() for name in commands)
    methods = (site / "reference/methods.html").read_text()
    assert all(f"method={name}" in methods for name in METHODS)
    for page in site.rglob("*.html"):
        loaded = re.findall(r"""<(?:script|img|link)[^>]+(?:src|href)=["']?(https?:[^"' >]+)""", page.read_text())
        assert loaded == [], page


class Blocks(HTMLParser):
    """The texts of a page's <pre><code>."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found, self._within = list[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("pre", "code"):
            self._within.append(tag)
            if self._within == ["pre", "code"]:
                self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("pre", "code"):
            self._within.pop()

    def handle_data(self, data: str) -> None:
        if self._within == ["pre", "code"]:
            self.found[-1] += data


def test_every_fenced_block_is_code_on_the_site_and_in_a_plain_viewer(site: Path) -> None:
    """A plain viewer shows what CommonMark says, and takes the first word after the marks for the language."""
    for source, page in SOURCES.items():
        text, shown = source.read_text(), [block.strip() for block in Blocks((site / page).read_text()).found]
        fences = [token for token in MarkdownIt().parse(text) if token.type == "fence"]
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(fences), source
        assert [f.content for f in fences if f.content.strip() not in shown] == [], source
        assert {f.info.split()[0] for f in fences if f.info} <= {"sh", "python", "toml", "csv", "text"}, source


def test_no_page_of_the_site_shows_the_marks_of_a_block(site: Path) -> None:
    assert [str(page.relative_to(site)) for page in site.rglob("*.html") if "```" in page.read_text()] == []
