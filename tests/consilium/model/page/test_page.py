"""The page for images: byte by byte, and in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from consilium.model import inputs, model_file
from consilium.model.page.site import MAX_SHOWN, PredictionPage
from consilium.model.predictor import Prediction, Predictor, calibrated
from consilium.web.serve import PageServer
from fl_core.datasets.image_loader import ImageLoader
from tests.support import until
from tests.support.exported import Exported, exported_without
from tests.support.pages import Browser, Visit, chromium, request, send

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def predictor(made: Exported) -> Predictor:
    model, loader = model_file.load(made.model), ImageLoader(cache_bytes=0)
    return Predictor(
        model, calibrated(model, inputs.from_reference(made.hospital, "test", model.facts, None, loader), 0.9, 0.1)
    )


@pytest.fixture
def page(predictor: Predictor, tmp_path: Path) -> PredictionPage:
    (tmp_path / "page").mkdir(mode=0o700)
    return PredictionPage(predictor, tmp_path / "page")


@pytest.fixture
def server(page: PredictionPage) -> Iterator[PageServer]:
    with PageServer(page.site(), page.folder) as found:
        yield found


def image(made: Exported, place: str) -> Path:
    return sorted((made.images / place).iterdir())[0]


def upload(browser: Browser, body: bytes, **other: str | None) -> tuple[int, str]:
    """Send a file as drop.js does."""
    token = re.search(r'data-session="([^"]+)"', browser.get().text)[1]  # type: ignore[index]
    usual: dict[str, str | None] = {
        "Origin": f"http://{browser.server.host}",
        "Content-Type": "application/octet-stream",
        "Content-Length": str(len(body)),
        "X-Token": token,
        "X-Name": "a%20name.png",
    }
    answer = send(browser.server, request("POST", "/classify", browser.headers(**{**usual, **other}), body))
    return answer.status, answer.text


def test_an_image_is_classified_shown_and_deleted(made: Exported, page: PredictionPage, server: PageServer) -> None:
    browser, file = Browser(server).open(), image(made, "new/3")
    assert upload(browser, file.read_bytes())[0] == 204
    text = browser.get().text
    assert "a name.png" in text
    assert "1 image classified" in text
    seen = browser.get("/files/seen/1")
    assert seen.body.startswith(b"\x89PNG")
    assert [f.name for f in page.folder.iterdir()] == [server.file.name]


def test_an_answer_that_nobody_taught_is_marked_and_its_class_too(made: Exported, tmp_path: Path) -> None:
    (tmp_path / "page").mkdir(mode=0o700)
    page = PredictionPage(Predictor(model_file.load(exported_without(made, tmp_path, "3"))), tmp_path / "page")
    with PageServer(page.site(), page.folder) as server:
        browser = Browser(server).open()
        for digit, marked in (("4", False), ("3", True)):
            assert upload(browser, image(made, f"new/{digit}").read_bytes())[0] == 204
            text = browser.get().text
            assert f"<strong>{digit}</strong>" in text
            assert ("not trained: no hospital had 3" in text) == marked
        assert "3 (not trained: no hospital had it)" in text


def test_of_several_labels_each_that_nobody_taught_is_marked() -> None:
    several = Prediction("a.png", (0.9, 0.8, 0.7), "nevus, scar", labels=("nevus", "scar"))
    assert several.answers_among(("scar", "burn")) == ["scar"]
    assert Prediction("a.png", (0.9, 0.1), "nevus").answers_among(("nevus",)) == ["nevus"]
    assert Prediction("a.png", problem="broken").answers_among(("nevus",)) == []


def test_a_file_that_is_no_image_says_so_and_shows_nothing(page: PredictionPage, server: PageServer) -> None:
    browser = Browser(server).open()
    status, text = upload(browser, b"<svg onload=alert(1)>")
    assert status == 422
    assert "not an image in a supported format" in text
    assert "No image yet" in browser.get().text
    assert [f.name for f in page.folder.iterdir()] == [server.file.name]


REFUSED = [
    ({"X_Token": None}, 403),
    ({"X_Token": "x" * 43}, 403),
    ({"Origin": "http://evil.example"}, 403),
    ({"Sec_Fetch_Site": "cross-site"}, 403),
    ({"Content_Type": "multipart/form-data"}, 415),
    ({"Content_Length": None, "Transfer_Encoding": "chunked"}, 411),
    ({"Content_Length": str(1 << 40)}, 413),
    ({"Content_Length": "9" * 30}, 413),
    ({"Cookie": "consilium-1=x"}, 401),
]


@pytest.mark.parametrize(("headers", "status"), REFUSED, ids=str)
def test_a_file_of_anybody_else_is_refused_before_it_is_read(
    made: Exported, server: PageServer, headers: dict[str, str | None], status: int
) -> None:
    browser = Browser(server).open()
    changed = {name.replace("_", "-"): value for name, value in headers.items()}
    found, _ = upload(browser, b"" if "Transfer-Encoding" in changed else image(made, "new/3").read_bytes(), **changed)
    assert found in (status, 400) if "Content-Length" in changed else found == status
    assert "No image yet" in browser.get().text


def test_names_of_files_are_no_markup(made: Exported, server: PageServer) -> None:
    browser = Browser(server).open()
    name = "%3Cscript%3Ealert(1)%3C%2Fscript%3E%E2%80%AE%00.png"
    assert upload(browser, image(made, "new/3").read_bytes(), **{"X-Name": name})[0] == 204
    text = browser.get().text
    assert "<script>alert" not in text
    assert "\u202e" not in text


def test_the_oldest_answers_make_room(made: Exported, page: PredictionPage) -> None:
    for _ in range(MAX_SHOWN + 3):
        page.take("x.png", image(made, "new/3"))
    assert len(page.facts()["shown"]) == MAX_SHOWN  # type: ignore[arg-type]
    assert page.site().download("seen/1") is None


# ---- in a browser ----------------------------------------------------------------------------------------------------

DROP = """
async ([files, selector]) => {
  const transfer = new DataTransfer();
  for (const [name, bytes] of files) transfer.items.add(new File([new Uint8Array(bytes)], name));
  const zone = document.querySelector(selector);
  for (const kind of ["dragenter", "dragover", "drop"])
    zone.dispatchEvent(new DragEvent(kind, {bubbles: true, cancelable: true, dataTransfer: transfer}));
}
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def test_images_are_dropped_chosen_and_forgotten(browser, made: Exported, server: PageServer) -> None:
    visit = Visit(browser, server)
    tab = visit.page
    assert tab.inner_text("h1") == "Drop images here: nothing leaves this machine"
    dropped = [["three.png", list(image(made, "new/3").read_bytes())], ["broken.png", list(b"none")]]
    tab.evaluate(DROP, [dropped, "#drop"])
    tab.wait_for_selector("#answers tbody tr:has-text('three.png')")
    until(lambda: "Not classified: broken.png" in tab.inner_text("#drop [role=status]"))
    until(lambda: tab.evaluate("document.querySelector('img.seen').naturalWidth") == 8)  # once it is loaded

    tab.set_input_files("#files", [image(made, "unknown"), image(made, "new/5")])
    tab.wait_for_selector("#answers tbody tr:nth-child(3)")
    until(lambda: "3 images classified" in tab.inner_text("h1"))
    tab.click("#forget")
    tab.wait_for_selector("text=All answers are deleted.")
    assert "No image yet" in tab.inner_text("#answers")
    assert visit.elsewhere == []
    assert [text for text in visit.complaints if "422" not in text] == []
    visit.context.close()


def test_the_page_has_no_violations_of_accessibility(
    browser, made: Exported, server: PageServer, page: PredictionPage
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.take("three.png", image(made, "new/3"))
    page.take("nine.png", image(made, "unknown"))
    for screen in ({"viewport": {"width": 1100, "height": 900}}, {"viewport": {"width": 375, "height": 812}}):
        visit = Visit(browser, server, **screen, bypass_csp=True)
        assert Axe().run(visit.page).response["violations"] == []
        visit.context.close()
