"""The lead's page in a real browser: a run is watched to its end, its model downloaded, two runs compared."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from safetensors import safe_open

from consilium.web.serve import PageServer
from coordinator.storage.records import RunState
from fl_core.errors import UnavailableError
from tests.support.coordinator import World, running
from tests.support.federation import Federation, manifest
from tests.support.federations import NAMES
from tests.support.made_up_service import FEDAVG, FEDMR, WAITS, MadeUpService, consortium
from tests.support.pages import Visit, chromium, shown, shown_for
from tests.support.recorded_runs import record_run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def service() -> MadeUpService:
    return consortium()


@pytest.fixture
def made_up(service: MadeUpService, tmp_path: Path) -> Iterator[PageServer]:
    with shown(service, tmp_path / "page") as (server, _):
        yield server


def go(visit: Visit, path: str) -> Any:
    visit.page.goto(f"http://{visit.server.host}{path}")
    return visit.page


def headline(page: Any) -> str:
    return page.get_by_role("heading", level=1).inner_text()


@pytest.mark.integration
def test_a_run_is_watched_to_its_end_without_loading_the_page_again(browser: Any, world: World, tmp_path: Path) -> None:
    run = world.submit(manifest(rounds=2))
    with shown_for(world.home, tmp_path / "page") as server:
        visit = Visit(browser, server)
        page = go(visit, f"/runs/{run.id}")
        page.get_by_role("heading", name="Round 1 of 2 waits for").wait_for()
        page.evaluate("window.stays = true")
        people = Federation(world)
        people.come()
        page.get_by_role("heading", name="Finished: ").wait_for()
        assert page.locator("#rounds tbody tr").count() == 3
        assert page.locator("#accuracy path").count() >= 2
        assert world.run(run.id).model_digest in page.locator("#model-digest").inner_text()
        assert page.evaluate("window.stays")
        assert (visit.elsewhere, visit.complaints) == ([], [])
        visit.context.close()
        people.leave()


@pytest.mark.slow
def test_a_service_that_goes_away_is_said_with_its_last_facts_dated_and_noticed_when_it_is_back(
    browser: Any, service: MadeUpService, made_up: PageServer
) -> None:
    visit = Visit(browser, made_up)
    page = go(visit, f"/runs/{WAITS}")
    assert headline(page) == "Round 13 of 20 waits for ghent"
    service.error = UnavailableError("E-NET-01", "expected a coordinator, found none: start it (coordinator serve)")
    page.locator("#away").wait_for()
    assert "has not answered since" in page.locator("#away").inner_text()
    assert page.locator("#away time").get_attribute("datetime")
    assert headline(page) == "Round 13 of 20 waits for ghent"
    assert "aarhus" in page.locator("#members").inner_text()
    service.error = None
    page.locator("#away").wait_for(state="detached")
    assert (visit.elsewhere, visit.complaints) == ([], [])
    visit.context.close()


SCREENS = {
    "light": {"viewport": {"width": 1200, "height": 900}},
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 375, "height": 800}},
    "small": {"viewport": {"width": 320, "height": 600}, "color_scheme": "dark"},
}
PATHS = ("/", f"/runs/{WAITS}", f"/runs/{FEDMR}", f"/compare?a={FEDAVG}&b={FEDMR}", "/compare")


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_keeps_anybody_from_using_it_and_it_fits_the_screen(
    browser: Any, made_up: PageServer, screen: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    visit = Visit(browser, made_up, **SCREENS[screen])
    for path in PATHS:
        page = go(visit, path)
        found = Axe().run(page).response["violations"]
        assert [(v["id"], v["nodes"][0]["html"]) for v in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= SCREENS[screen]["viewport"]["width"]
    assert (visit.elsewhere, visit.complaints) == ([], [])
    visit.context.close()


@pytest.mark.slow
def test_a_model_is_downloaded_with_its_card_and_two_runs_are_compared(
    browser: Any, world: World, tmp_path: Path
) -> None:
    people = Federation(world)
    people.come()
    run = world.finished(world.submit(manifest(rounds=2)).id)
    other = world.finished(world.submit(manifest("fedmr", {"mu1": 1e-4, "mu2": 0.5}, rounds=2), "other").id)
    people.leave()
    with shown_for(world.home, tmp_path / "page") as server:
        visit = Visit(browser, server)
        page = go(visit, f"/runs/{run.id}")
        with page.expect_download() as downloading:
            page.get_by_role("link", name="Download the model").click()
        file = tmp_path / "model.safetensors"
        downloading.value.save_as(file)
        assert downloading.value.suggested_filename == f"{run.id}.safetensors"
        with safe_open(file, framework="pt") as opened:
            assert run.model_digest in opened.metadata()["consilium"]
        with page.expect_download() as downloading:
            page.get_by_role("link", name="Its model card").click()
        downloading.value.save_as(tmp_path / "card.md")
        assert run.manifest_digest in (tmp_path / "card.md").read_text()
        with page.expect_download() as downloading:
            page.get_by_role("link", name="ONNX").click()
        downloading.value.save_as(tmp_path / "model.onnx")
        assert run.model_digest in {p.value for p in onnx.load(tmp_path / "model.onnx").metadata_props}
        page = go(visit, "/compare")
        page.get_by_label("Run A").select_option(run.id)
        page.get_by_label("Run B").select_option(other.id)
        page.get_by_role("button", name="Compare").click()
        page.locator("#differences").wait_for()
        assert {run.id, other.id} <= {link.inner_text() for link in page.locator("#columns a").all()}
        assert page.locator("#curves-1 .plot path").count() == 2
        assert (visit.elsewhere, visit.complaints) == ([], [])
        visit.context.close()


@pytest.mark.slow
def test_the_keyboard_alone_finds_a_run_and_aborts_it(browser: Any, world: World, tmp_path: Path) -> None:
    assert world.server is not None
    record_run(world.server.store, "run-k", [0.1, 0.2], agreed=manifest(rounds=3), finished=False, reason="E-X: few")
    with shown_for(world.home, tmp_path / "page") as server:
        visit = Visit(browser, server)
        page = visit.page

        def tab_to(text: str) -> None:
            for _ in range(60):
                page.keyboard.press("Tab")
                if page.evaluate("document.activeElement.textContent").strip() == text:
                    assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
                    return
            raise AssertionError(f"the keyboard does not reach {text}")

        tab_to("run-k")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Failed after 1 of 3 rounds").wait_for()
        tab_to("End this run for good")
        page.keyboard.press("Enter")
        tab_to("Abort the run")
        page.keyboard.press("Enter")
        page.get_by_text("run-k is aborted. Its model so far is kept.").wait_for()
        assert page.url.endswith("/runs/run-k")
        assert world.run("run-k").state is RunState.ABORTED
        visit.context.close()


@pytest.mark.slow
def test_without_javascript_a_run_is_aborted_all_the_same(browser: Any, world: World, tmp_path: Path) -> None:
    assert world.server is not None
    record_run(world.server.store, "run-n", [0.1, 0.2], agreed=manifest(rounds=3), finished=False, reason="E-X: few")
    with shown_for(world.home, tmp_path / "page") as server:
        visit = Visit(browser, server, java_script_enabled=False)
        page = go(visit, "/runs/run-n")
        page.get_by_text("End this run for good").click()
        page.get_by_role("button", name="Abort the run").click()
        page.get_by_text("run-n is aborted.").wait_for()
        assert world.run("run-n").state is RunState.ABORTED
        visit.context.close()


@pytest.mark.slow
def test_a_page_of_another_site_in_the_same_browser_orders_nothing(browser: Any, world: World, tmp_path: Path) -> None:
    assert world.server is not None
    record_run(world.server.store, "run-x", [0.1, 0.2], agreed=manifest(rounds=3), finished=False, reason="E-X: few")
    with shown_for(world.home, tmp_path / "page") as server:
        form = (
            f'<form id=f method=post action="http://{server.host}/abort"><input name=run value=run-x>'
            "<input name=digest><input name=token></form>"
        )
        evil = http.server.HTTPServer(("127.0.0.1", 0), site_with(form))
        threading.Thread(target=evil.serve_forever, daemon=True).start()
        visit = Visit(browser, server)
        visit.page.goto(f"http://127.0.0.1:{evil.server_port}/")
        with visit.page.expect_navigation() as order:
            visit.page.evaluate("document.getElementById('f').submit()")
        assert order.value.status in (401, 403)
        assert world.run("run-x").state is RunState.FAILED
        visit.context.close()
        evil.shutdown()
        evil.server_close()


def site_with(form: str) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f"<!doctype html>{form}".encode())

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running(tmp_path / "home", NAMES) as made:
        yield made
