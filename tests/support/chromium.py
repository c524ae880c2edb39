"""The system's Chromium, driven by playwright; tests that need it skip with words where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service_core.web.serve import PageServer
from tests.support import until

CHROMIUM = Path("/usr/bin/chromium")
PATIENCE_MS = 20_000


@contextmanager
def chromium() -> Iterator[Any]:
    """Give a browser, or skip."""
    if not CHROMIUM.exists():
        pytest.skip(f"no browser: install Debian's chromium ({CHROMIUM})")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A tab that was opened through the link's file, and what it asked for and complained about meanwhile."""

    def __init__(self, browser: Any, server: PageServer, **how: Any) -> None:
        self.server = server
        self.context = browser.new_context(**how)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.set_default_timeout(60_000)
        until(self._opened)
        self.complaints.clear()  # of a link that was used before

    def _opened(self) -> bool:
        """Open the file; where its link was used a moment ago, the next one is there soon."""
        from playwright.sync_api import TimeoutError

        self.page.goto(self.server.file.as_uri())
        try:
            self.page.wait_for_url(f"http://{self.server.host}/", timeout=PATIENCE_MS)
        except TimeoutError:
            return False
        return True

    @property
    def elsewhere(self) -> list[str]:
        """Addresses that were asked for and are neither this page's nor the link's file."""
        own = (f"http://{self.server.host}/", self.server.file.as_uri())
        return [url for url in self.asked if not url.startswith(own)]
