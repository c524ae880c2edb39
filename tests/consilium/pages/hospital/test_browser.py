"""The hospital's page in a real browser: a run is approved by mouse, by keyboard and without JavaScript."""

from __future__ import annotations

import http.server
import re
import threading
from contextlib import closing
from pathlib import Path
from shutil import copytree

import pytest

from consilium.pages.hospital.site import HospitalPage
from consilium.web.rendering import size
from consilium.web.serve import PageServer
from silo.cli.main import run as silo
from silo.storage.home import Home
from silo.storage.store import SiloStore
from tests.support import until
from tests.support.fake_coordinator import Hospital
from tests.support.hospital import furnished
from tests.support.pages import Visit, address_of, chromium
from tests.support.privacy import SEEDED_POLICY, TRAIN, budgeted, private

pytestmark = pytest.mark.integration

ASKS, OTHER = "fedmr-digits-7f3c", "fedavg-digits-90d2"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0def46b8"
    "0000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("furnished") / "home"
    furnished(folder)
    return folder


@pytest.fixture
def home(template, tmp_path) -> Home:
    copytree(template, tmp_path / "home")
    return Home(tmp_path / "home")


@pytest.fixture
def server(home, tmp_path):
    audit = tmp_path / "audit"
    audit.mkdir()
    (audit / "losses.png").write_bytes(PNG)
    (audit / "audit.json").write_text('{"losses": {"picture": "losses.png", "verdicts": []}}')
    page = HospitalPage(home.make(), audit)
    with PageServer(page.site(), home.path) as made:
        yield made
    page.close()


def decided(home: Home, run: str = ASKS) -> bool | None:
    store = SiloStore(home.database)
    try:
        return next(a.decided for a in store.approvals.all() if a.run_id == run)
    finally:
        store.close_database()


def button(page, name: str, run: str = ASKS):
    item = page.locator(".item").filter(has_text=run)
    return item.get_by_role("button", name=name)


@pytest.mark.slow  # over HTTP, without a browser: test_site.py
def test_a_run_is_approved_and_the_page_follows_what_happens_without_being_loaded_again(browser, server, home) -> None:
    visit = Visit(browser, server)
    page = visit.page
    assert page.get_by_role("heading", level=1).inner_text() == "No image has left this hospital"
    assert "Epsilon 4.48 of 8 is spent for each record" in page.locator("#spent").inner_text()
    assert "would rise from 4.48 to 4.83 of 8" in page.locator("#decide").inner_text()
    button(page, "Approve").click()
    assert "is approved: it may train here." in page.get_by_role("status").first.inner_text()
    assert decided(home) is True
    assert button(page, "Approve").count() == 0
    page.evaluate("window.stays = true")
    assert silo(["approve", OTHER, "--deny", "--home", str(home.path)]) == 0
    page.get_by_text("Nothing waits for you.").wait_for()
    assert page.evaluate("window.stays")
    assert "command approve" in page.locator("#log").inner_text()
    assert (visit.elsewhere, visit.complaints) == ([], [])
    visit.context.close()


@pytest.fixture
def hospital(tmp_path):
    found = Hospital(tmp_path / "home0", private(epsilon=2.0))
    yield found
    found.stop()
    found.host.stop()


def test_a_service_waits_for_the_button_trains_and_the_page_says_what_left_and_what_was_spent(
    browser, hospital, tmp_path
) -> None:
    ledger = budgeted(tmp_path / "home0", policy=SEEDED_POLICY + '[runs]\napprove = "by hand"\n')
    hospital.start()
    shown = HospitalPage(Home(tmp_path / "home0"))
    with closing(shown), PageServer(shown.site(), tmp_path / "home0") as server:
        visit = Visit(browser, server)
        page = visit.page
        assert page.get_by_role("heading", level=1).inner_text() == "Nothing has left this hospital"
        hospital.offer()
        page.locator("#decide").get_by_text("run-1, asked").wait_for()
        said = page.locator("#decide").inner_text()
        assert ledger.history(TRAIN) == []
        button(page, "Approve", "run-1").click()
        hospital.sent()
        hospital.settle()
        page.get_by_text("No image has left this hospital").wait_for()
        page.locator("#spent").get_by_text("is spent for each record in").first.wait_for()
        status = ledger.status(TRAIN)
        assert f"Epsilon {status.spent_rdp:.2f} of 8 is spent" in page.locator("#spent").inner_text()
        most = float(re.findall(r"center1/train: epsilon spent would rise from \d+\.\d\d to (\d+\.\d\d) of 8", said)[0])
        assert 0 < status.spent_rdp <= most <= 2.0
        (update,) = hospital.transfer.opened.values()
        assert f"1 update left, {size(update.size)}" in page.locator("#headline").inner_text()
        assert visit.complaints == []
        visit.context.close()


SCREENS = {
    "light": {"viewport": {"width": 1200, "height": 900}},
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 375, "height": 800}},
    "small": {"viewport": {"width": 320, "height": 600}, "color_scheme": "dark"},
}


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_serious_keeps_anybody_from_using_it_and_it_fits_the_screen(browser, server, screen) -> None:
    from axe_playwright_python.sync_playwright import Axe

    visit = Visit(browser, server, **SCREENS[screen])
    found = Axe().run(visit.page).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] != "minor"] == []
    assert [v["id"] for v in found] == []
    width = SCREENS[screen]["viewport"]["width"]
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.page.locator("img").evaluate("image => image.naturalWidth") == 1
    assert visit.complaints == []
    visit.context.close()


@pytest.mark.slow
def test_the_keyboard_alone_approves_a_run(browser, server, home) -> None:
    visit = Visit(browser, server)
    page = visit.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    wanted = button(page, "Approve").get_attribute("id")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == wanted:
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"
    page.keyboard.press("Enter")
    page.get_by_text("is approved: it may train here.").wait_for()
    assert decided(home) is True
    visit.context.close()


@pytest.mark.slow
def test_the_keyboards_place_stays_when_the_page_takes_something_new_over(browser, server, home) -> None:
    visit = Visit(browser, server)
    page = visit.page
    wanted = button(page, "Refuse").get_attribute("id")
    page.locator(f"#{wanted}").focus()
    assert silo(["approve", OTHER, "--home", str(home.path)]) == 0
    page.locator("#decided").wait_for()
    assert page.evaluate("document.activeElement.id") == wanted
    visit.context.close()


@pytest.mark.slow
def test_without_javascript_everything_works_that_a_button_does(browser, server, home) -> None:
    visit = Visit(browser, server, java_script_enabled=False)
    button(visit.page, "Refuse").click()
    assert "is refused: this hospital sends it nothing." in visit.page.locator("main").inner_text()
    assert decided(home) is False
    assert visit.elsewhere == []
    visit.context.close()


@pytest.mark.slow
def test_a_page_whose_program_has_ended_says_so_with_a_date(browser, server) -> None:
    visit = Visit(browser, server)
    visit.page.wait_for_timeout(100)
    server.stop()
    visit.page.locator("#lost").wait_for(state="visible")
    assert "You see the state of 20" in visit.page.locator("#lost").inner_text()
    visit.context.close()


@pytest.mark.slow
def test_whoever_listens_there_after_the_page_has_ended_puts_nothing_into_an_open_tab(browser, server) -> None:
    visit = Visit(browser, server)
    asked: list[str] = []

    class Heir(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            stream = self.path == "/changed"
            body = b"event: changed\ndata: new\n\n" if stream else b'<div id="headline" data-live><h1>evil</h1></div>'
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if stream else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server.stop()
    with http.server.ThreadingHTTPServer(address_of(server), Heir) as heir:
        threading.Thread(target=heir.serve_forever, daemon=True).start()
        until(lambda: visit.page.title() and asked.count("/") >= 2)
        assert "evil" not in visit.page.content()
        heir.shutdown()
    visit.context.close()


def test_nothing_that_another_site_does_in_the_same_browser_decides_or_reads_anything(browser, server, home) -> None:
    visit = Visit(browser, server)
    form = visit.page.locator("form[action='/approve']").first
    digest = form.locator("input[name=digest]").get_attribute("value")
    question = form.locator("input[name=question]").get_attribute("value")
    ours = f"http://{server.host}"
    evil = f"""<!doctype html><title>evil</title><body>
    <form id=f method=post action="{ours}/approve" target=frame><input name=digest value="{digest}">
    <input name=question value="{question}"><input name=token value=x></form><iframe name=frame></iframe>
    <iframe src="{ours}/"></iframe><img src="{ours}/files/losses.png"><script src="{ours}/static/page.js"></script>
    <script>
    window.read = [];
    const say = text => window.read.push(text);
    f.submit();
    for (const mode of ['cors', 'no-cors'])
      for (const method of ['GET', 'POST'])
        fetch('{ours}/approve', {{method, mode, credentials: 'include', body: method === 'POST' ?
          new URLSearchParams({{digest: '{digest}', question: '{question}'}}) : undefined}})
          .then(r => r.text()).then(say, () => say(''));
    new WebSocket('ws://{server.host}/changed').onopen = () => say('socket');
    new EventSource('{ours}/changed', {{withCredentials: true}}).onopen = () => say('stream');
    </script>""".encode()

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(evil)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        tab = visit.context.new_page()
        refused: list[int] = []
        tab.on("response", lambda r: refused.append(r.status) if r.url.startswith(ours) else None)
        tab.goto(f"http://127.0.0.1:{other.server_address[1]}/")
        until(lambda: tab.evaluate("window.read.length") >= 4)
        assert set(tab.evaluate("window.read")) == {""}
        assert refused
        assert set(refused) <= {401, 403, 400}
        other.shutdown()
    assert decided(home) is None
    visit.context.close()
