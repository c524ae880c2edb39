"""Write the pictures of pages that the documentation shows: `python -m tests.screenshots [NAME ...]`. Look at them.

Without names all of them are written. `demo` is the page of the newest demo: `make demo` first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from consilium.pages.hospital.site import HospitalPage
from consilium.web.serve import PageServer
from tests.support.hospital import furnished
from tests.support.made_up_service import FEDAVG, FEDMR, WAITS, consortium
from tests.support.pages import Visit, chromium, shown

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pages"
SCREENS = {
    "light": {"viewport": {"width": 1100, "height": 1500}},
    "dark": {"viewport": {"width": 1100, "height": 1500}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 375, "height": 812}, "device_scale_factor": 2},
}
DEMO = FOLDER.parents[1] / "runs/demo/index.html"
COLOURS = 200
"""Of the palette: colours stay what they are, and the picture half as large."""


@contextmanager
def hospital() -> Iterator[PageServer]:
    """Serve the page of a furnished home."""
    with tempfile.TemporaryDirectory() as folder:
        home = furnished(Path(folder) / "home")
        page = HospitalPage(home)
        with PageServer(page.site(), home.path) as server:
            yield server
        page.close()


@contextmanager
def lead() -> Iterator[PageServer]:
    """Serve the page of a lead whose service's answers are made up."""
    with tempfile.TemporaryDirectory() as folder, shown(consortium(), Path(folder) / "page") as (server, _):
        yield server


class Picture(NamedTuple):
    """Of which page: who serves it, its path, and on which screens."""

    serve: Callable[[], AbstractContextManager[PageServer]]
    path: str = "/"
    screens: tuple[str, ...] = tuple(SCREENS)


PICTURES = {
    "hospital": Picture(hospital),
    "lead": Picture(lead, screens=("light", "phone")),
    "lead-run": Picture(lead, f"/runs/{WAITS}", ("light", "dark")),
    "lead-compare": Picture(lead, f"/compare?a={FEDAVG}&b={FEDMR}", ("light",)),
}


def _save(shot: bytes, name: str) -> None:
    Image.open(BytesIO(shot)).convert("RGB").quantize(COLOURS).save(FOLDER / f"{name}.png", optimize=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*PICTURES, "demo"]))
    wanted = arguments.parse_args().names or [*PICTURES, "demo"]
    FOLDER.mkdir(exist_ok=True)
    with chromium() as browser:
        if "demo" in wanted:
            page = browser.new_page(viewport={"width": 1100, "height": 1130})
            page.goto(DEMO.as_uri())
            _save(page.screenshot(), "demo")
        for name in (name for name in wanted if name != "demo"):
            picture = PICTURES[name]
            with picture.serve() as server:
                for screen in picture.screens:
                    visit = Visit(browser, server, **SCREENS[screen])
                    answer = visit.page.goto(f"http://{server.host}{picture.path}")
                    assert answer.ok, f"{name}: the page answered {answer.status}"
                    _save(visit.page.screenshot(), f"{name}-{screen}")
                    visit.context.close()


if __name__ == "__main__":
    main()
