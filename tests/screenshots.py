"""Write the pictures of pages that the documentation shows: `python -m tests.screenshots`. Look at them afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image

from silo.page.site import HospitalPage
from tests.support.chromium import Visit, chromium
from tests.support.hospital_page import furnished
from web.serve import PageServer

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pages"
SCREENS = {
    "light": {"viewport": {"width": 1100, "height": 1500}},
    "dark": {"viewport": {"width": 1100, "height": 1500}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 375, "height": 812}, "device_scale_factor": 2},
}
COLOURS = 64
"""Of the palette: a picture of text stays sharp, and a quarter as large."""


@contextmanager
def hospital() -> Iterator[PageServer]:
    """Serve the page of a furnished home."""
    with tempfile.TemporaryDirectory() as folder:
        home = furnished(Path(folder) / "home")
        page = HospitalPage(home)
        with PageServer(page.site(), home.path) as server:
            yield server
        page.close()


PAGES: dict[str, Callable[[], object]] = {"hospital": hospital}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with chromium() as browser:
        for name, serve in PAGES.items():
            with serve() as server:  # type: ignore[attr-defined]
                for screen, how in SCREENS.items():
                    visit = Visit(browser, server, **how)
                    picture = Image.open(BytesIO(visit.page.screenshot())).convert("RGB").quantize(COLOURS)
                    picture.save(FOLDER / f"{name}-{screen}.png", optimize=True)
                    visit.context.close()


if __name__ == "__main__":
    main()
