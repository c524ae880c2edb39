"""The security list of both pages, item by item, over raw sockets."""

from __future__ import annotations

import re
import socket
import stat
import sys
from pathlib import Path

import pytest

from consilium.web.guard import BODY_BYTES, HEADERS, LINK_S, MAX_SESSIONS, SESSION_S, Sessions
from consilium.web.serve import PageServer
from consilium.web.site import Action, ChangedError, Download, MissingError, Site, View
from tests.support import until
from tests.support.pages import Browser, address_of, cookie_of, request, send

HOSTILE = "\x1b[2J\u202e<script>alert(1)</script>'\"&\u2066\x00" + "x" * 3000


class Thing:
    """What the page under test is about: one thing that can be approved."""

    def __init__(self, templates: Path) -> None:
        self.digest: str | None = "d1"
        self.done: list[dict[str, str]] = []
        self.version = "1"
        self.changes_meanwhile = False
        template = (
            '{% extends "base.html" %}{% from "parts.html" import button, gauge, state with context %}'
            "{% block main %}<p id='name' data-live>{{ name }}</p>"
            "{{ button('/approve', 'Approve', {'thing': name[:5]}, digest, 'b1') }}{{ gauge(0.4, 0.2) }}"
            "{{ state('good', 'fine') }}{% endblock %}"
        )
        templates.mkdir()
        (templates / "home.html").write_text(template)
        (templates / "wrong.html").write_text("{{ nothing }}")
        self.site = Site(
            title="north",
            command="silo page",
            templates=templates,
            views={
                "/": View("home.html", lambda _: {"headline": "H", "name": HOSTILE, "digest": self.digest or ""}),
                "/things/{id}": View("home.html", self._thing),
                "/wrong": View("wrong.html", lambda _: {}),
            },
            actions={"/approve": Action(lambda form: self.digest, self._do)},
            download=lambda id: Download("a\r\nb;\u202e.csv", "text/csv", b"1") if id == "known" else None,
            version=lambda: self.version,
        )

    def _thing(self, parameters):
        if parameters["id"] != "one":
            raise MissingError(f"there is no {parameters['id']}")
        return {"headline": "H", "name": parameters["id"], "digest": "d1"}

    def _do(self, form):
        if self.changes_meanwhile:
            raise ChangedError("meanwhile")
        self.done.append(dict(form))
        return "It was done."


@pytest.fixture(scope="module")
def thing(tmp_path_factory):
    return Thing(tmp_path_factory.mktemp("page") / "templates")


@pytest.fixture(scope="module")
def server(thing, tmp_path_factory):
    folder = tmp_path_factory.mktemp("private")
    folder.chmod(0o700)
    with PageServer(thing.site, folder) as made:
        yield made


@pytest.fixture(scope="module")
def browser(server):
    return Browser(server).open()


@pytest.fixture(autouse=True)
def as_it_was(thing):
    thing.digest, thing.changes_meanwhile = "d1", False
    thing.done.clear()


# ---- 1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "a website",
    "points its own name at this machine to read a page (DNS rebinding)",
    "421: only the page's own Host header is accepted",
)
@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["evil.example"],
        ["127.0.0.1"],
        ["{address}"],
        ["{address}:1"],
        ["localhost:{port}"],
        ["evil.example:{port}"],
        ["{host}", "{host}"],
        ["{host}", "evil.example"],
        ["{host}."],
        ["user@{host}"],
    ],
)
def test_any_other_host_header_than_exactly_this_one_is_misdirected(server, browser, hosts) -> None:
    address, port = address_of(server)
    values = [h.format(host=server.host, address=address, port=port) for h in hosts]
    headers = [("Host", v) for v in values] + browser.headers(Host=None)
    assert send(server, request("GET", "/", headers)).status == 421


@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "get"])
def test_other_methods_are_not_allowed(server, browser, method) -> None:
    assert send(server, request(method, "/", browser.headers())).status == 405


# ---- 2 ---------------------------------------------------------------------------------------------------------------


def test_a_form_does_what_its_button_says_and_the_page_says_so_once(server, browser, thing) -> None:
    (form,) = browser.fields("/approve")
    answer = browser.post("/approve", form)
    assert (answer.status, answer.header("location")) == (303, "/")
    assert [done["digest"] for done in thing.done] == ["d1"]
    assert "token" not in thing.done[0]
    browser.get(Sec_Fetch_Dest="empty")  # another tab looks for news
    browser.get(method="HEAD")
    assert "It was done." in browser.get().text
    assert "It was done." not in browser.get().text


@pytest.mark.fault("a website", "sends a form of ours from the same browser", "refused; nothing happens")
@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "https://{host}", "http://127.0.0.1:1", "{host}"]
)
def test_a_form_of_another_origin_does_nothing(server, browser, thing, origin) -> None:
    (form,) = browser.fields("/approve")
    answer = browser.post("/approve", form, Origin=origin and origin.format(host=server.host))
    assert (answer.status, thing.done) == (403, [])


def test_two_origins_do_nothing(server, browser, thing) -> None:
    (form,) = browser.fields("/approve")
    assert browser.post("/approve", form, origin=f"http://{server.host}").status == 403
    assert thing.done == []


@pytest.mark.parametrize("token", [None, "", "x", "token of another session", "\u00e4\ud800"])
def test_a_form_without_this_sessions_token_does_nothing(server, browser, thing, token) -> None:
    (form,) = browser.fields("/approve")
    if token is None:
        del form["token"]
    elif token.startswith("token"):
        (form,) = Browser(server).open().fields("/approve")
    else:
        form["token"] = token.encode("utf-8", "replace").decode()
    assert browser.post("/approve", form).status == 403
    assert thing.done == []


@pytest.mark.parametrize("digest", [None, "", "d2", "D1", "d1 "])
def test_a_form_about_something_that_has_changed_since_it_was_shown_conflicts(browser, thing, digest) -> None:
    (form,) = browser.fields("/approve")
    form = {k: v for k, v in {**form, "digest": digest}.items() if v is not None}
    answer = browser.post("/approve", form)
    assert (answer.status, thing.done) == (409, [])
    assert "changed since you saw it" in answer.text


def test_a_form_about_something_that_is_gone_or_changes_in_that_moment_conflicts(browser, thing) -> None:
    (form,) = browser.fields("/approve")
    thing.changes_meanwhile = True
    assert browser.post("/approve", form).status == 409
    thing.digest = None
    assert browser.post("/approve", form).status == 409
    assert thing.done == []


def test_a_get_of_a_forms_address_does_nothing(browser, thing) -> None:
    assert browser.get("/approve?digest=d1").status == 405
    assert thing.done == []


# ---- 3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("a website", "loads a page of ours in a frame or a tab", "403; nothing is shown")
@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "none, cross-site"])
def test_requests_that_another_site_causes_are_refused(server, browser, thing, site) -> None:
    headers = [*browser.headers(Sec_Fetch_Site=None), ("Sec-Fetch-Site", site)]
    assert send(server, request("GET", "/", headers)).status == 403
    (form,) = browser.fields("/approve")
    assert browser.post("/approve", form, Sec_Fetch_Site=site or " ").status == 403
    assert thing.done == []


def test_a_person_who_types_the_address_and_an_old_browser_are_let_in(browser) -> None:
    assert browser.get(Sec_Fetch_Site="none").status == browser.get(Sec_Fetch_Site=None).status == 200


# ---- 4 and 5 ---------------------------------------------------------------------------------------------------------


def test_nothing_is_shown_without_a_session(server) -> None:
    for target in ("/", "/static/page.css", "/files/known", "/changed", "/nothing", "/things/one"):
        for cookie in (None, f"{cookie_of(server)}=x", f"{cookie_of(server)}="):
            answer = Browser(server).get(target, Cookie=cookie)
            assert (answer.status, answer.header("set-cookie")) == (401, None)
            assert "silo page" in answer.text


@pytest.fixture
def fresh(thing, tmp_path):
    """A server whose link nobody used yet."""
    tmp_path.chmod(0o700)
    with PageServer(thing.site, tmp_path) as made:
        yield made


@pytest.mark.fault(
    "another user",
    "opens a page's link after the owner has already used it",
    "410: a link works once, within ten minutes",
)
def test_the_opening_link_works_once_and_goes_on_by_itself(fresh) -> None:
    target = Browser(fresh).secret_path()
    assert len(target.rpartition("/")[2]) >= 43  # 256 bits
    for method in ("HEAD", "POST"):  # use nothing up
        assert send(fresh, request(method, target, [("Host", fresh.host)])).status in (401, 405)
    first = send(fresh, request("GET", target, [("Host", fresh.host), ("Sec-Fetch-Site", "cross-site")]))
    assert (first.status, 'content="0; url=/"' in first.text) == (200, True)
    cookie = first.header("set-cookie") or ""
    assert cookie.startswith(f"consilium-{address_of(fresh)[1]}=")
    assert {part.strip().lower() for part in cookie.split(";")[1:]} == {"httponly", "path=/", "samesite=strict"}
    again = send(fresh, request("GET", target, [("Host", fresh.host)]))
    assert (again.status, again.header("set-cookie")) == (410, None)


def test_the_links_file_is_for_its_owner_alone_and_holds_a_fresh_link_once_the_last_was_used(fresh) -> None:
    before = fresh.link
    assert before in fresh.file.read_text()
    Browser(fresh).open()
    until(lambda: fresh.link != before and fresh.link in fresh.file.read_text())
    assert stat.S_IMODE(fresh.file.stat().st_mode) == 0o600
    assert before not in fresh.file.read_text()
    Browser(fresh).open()


@pytest.mark.parametrize("secret", ["x", "%00", "%F0%9F%98%80", "a" * 5000, "%ff"])
def test_a_guessed_link_opens_nothing_and_does_not_use_up_the_real_one(server, secret) -> None:
    assert send(server, request("GET", f"/open/{secret}", [("Host", server.host)])).status in (404, 410)
    Browser(server).open()


def test_a_link_is_too_old_after_ten_minutes_and_a_session_twelve_hours_after_its_last_request() -> None:
    now = 0.0
    sessions = Sessions(clock=lambda: now)
    late = sessions.new_link()
    now += LINK_S + 1
    assert sessions.enter(late) is None
    cookie = sessions.enter(sessions.new_link())
    assert cookie
    for _ in range(3):
        now += SESSION_S - 1
        assert sessions.find(cookie)
    now += SESSION_S + 1
    assert sessions.find(cookie) is None


def test_a_new_link_ends_the_one_before_and_sessions_are_bounded() -> None:
    now = 0.0
    sessions = Sessions(clock=lambda: now)
    old = sessions.new_link()
    opened = []
    for _ in range(MAX_SESSIONS + 1):
        now += 1
        opened.append(sessions.enter(sessions.new_link()) or "")
    assert sessions.enter(old) is None
    assert [bool(sessions.find(cookie)) for cookie in opened] == [False] + [True] * MAX_SESSIONS


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only 127.0.0.1 is there")
def test_each_page_has_an_address_of_its_own_on_loopback_since_browsers_send_cookies_to_every_port(
    thing, tmp_path
) -> None:
    tmp_path.chmod(0o700)
    found = set()
    for k in range(3):
        with PageServer(thing.site, tmp_path, f"{k}.html") as made:
            found.add(address_of(made)[0])
    assert all(address.startswith("127.") for address in found)
    assert "127.0.0.1" not in found
    assert len(found) > 1


# ---- 6 ---------------------------------------------------------------------------------------------------------------


def test_every_answer_carries_every_header(server, browser) -> None:
    (form,) = browser.fields("/approve")
    answers = {
        "page": browser.get(),
        "head": browser.get(method="HEAD"),
        "static": browser.get("/static/page.css"),
        "file": browser.get("/files/known"),
        "done": browser.post("/approve", form),
        "conflict": browser.post("/approve", {**form, "digest": "x"}),
        "no form": browser.post("/approve", b"token"),
        "unknown": browser.get("/nothing"),
        "no file": browser.get("/files/../../etc/passwd"),
        "failed": browser.get("/wrong"),
        "no session": browser.get(Cookie=None),
        "other host": browser.get(Host="evil.example"),
        "other method": browser.get(method="PUT"),
        "no http": send(server, b"\x16\x03\x01 nonsense\r\n\r\n"),
        "used link": send(server, request("GET", "/open/x", [("Host", server.host)])),
        "below the link": send(server, request("GET", "/open/x/y", [("Host", server.host)])),
    }
    assert [name for name, a in answers.items() if any(a.header(k) != v for k, v in HEADERS.items())] == []
    assert [name for name, a in answers.items() if a.header("server") is not None] == []
    statuses = {name: answers[name].status for name in ("failed", "no http", "no file", "below the link")}
    assert statuses == {"failed": 500, "no http": 400, "no file": 404, "below the link": 404}


def test_the_headers_say_what_the_list_asks_for() -> None:
    policy = dict(p.strip().partition(" ")[::2] for p in HEADERS["Content-Security-Policy"].split(";"))
    assert (
        policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
    )
    assert policy["require-trusted-types-for"] == "'script'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "font", "connect")} == {"'self'"}
    assert policy["form-action"] == "'self'"
    assert HEADERS["Referrer-Policy"] == "same-origin"
    assert (HEADERS["X-Frame-Options"], HEADERS["X-Content-Type-Options"]) == ("DENY", "nosniff")
    assert HEADERS["Cache-Control"] == "no-store"
    assert HEADERS["Cross-Origin-Opener-Policy"] == HEADERS["Cross-Origin-Resource-Policy"] == "same-origin"


# ---- 7 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "a lead or a hospital", "puts markup or invisible characters into its name", "escaped text on every page"
)
def test_a_hostile_name_is_text_and_nothing_of_it_is_invisible(browser) -> None:
    page = browser.get().text
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert [c for c in page if not c.isprintable() and c != "\n"] == []
    assert "\\x1b[2J\\u202e" in page
    assert "x" * 2500 not in page


def test_templates_turn_off_no_protection() -> None:
    root = Path(__file__).resolve().parents[3]
    found = list((root / "consilium").rglob("*.html"))
    assert len(found) >= 12
    bad = re.compile(
        r"\|\s*(safe|e|escape|forceescape|xmlattr|tojson)\b|autoescape|Markup|\sstyle=|\son[a-z]+=|javascript:"
    )
    assert [p.name for p in found if bad.search(p.read_text())] == []
    outside = re.compile(r"(?:src|href|action)=[\"'](?!/|#|\{\{)|https?://", re.IGNORECASE)
    assert [p.name for p in found if outside.search(p.read_text())] == []


def test_a_template_that_misses_a_name_fails_and_tells_the_browser_nothing(browser) -> None:
    answer = browser.get("/wrong")
    assert (answer.status, "nothing" in answer.text) == (500, False)


@pytest.mark.parametrize(
    ("body", "changed", "status"),
    [
        (b"a" * (BODY_BYTES + 1), {}, 413),
        (b"a=" + b"b" * (BODY_BYTES - 2), {}, 403),
        (b"token=x&token=y", {}, 400),
        (b"%ff=%fe&token=x", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"&".join(b"a%d=1" % k for k in range(100)), {}, 400),
        (b"", {}, 403),
        (b"a=b", {"Content_Type": "application/json"}, 415),
        (b"a=b", {"Content_Type": None}, 415),
    ],
)
def test_a_body_that_is_no_small_form_is_refused(browser, thing, body, changed, status) -> None:
    assert browser.post("/approve", body, **changed).status == status
    assert thing.done == []


def test_a_body_without_a_length_is_bounded_as_well(server, browser, thing) -> None:
    headers = browser.headers(
        Origin=f"http://{server.host}",
        Content_Type="application/x-www-form-urlencoded",
        Transfer_Encoding="chunked",
    )
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    assert send(server, request("POST", "/approve", headers, chunk * 2 + b"0\r\n\r\n")).status == 413
    assert thing.done == []


def test_a_file_is_given_out_by_its_known_id_alone_under_a_harmless_name(browser) -> None:
    answer = browser.get("/files/known")
    assert answer.header("content-disposition") == 'attachment; filename="a__b__.csv"'
    for id in ("unknown", "../known", "/etc/passwd", "%2e%2e%2fknown", "known/"):
        assert browser.get(f"/files/{id}").status == 404
    for path in ("/static/../guard.py", "/static/%2e%2e/guard.py", "/static//etc/passwd", "/static/"):
        assert browser.get(path).status == 404


# ---- 8 ---------------------------------------------------------------------------------------------------------------


def test_it_listens_before_the_link_is_known_and_ends_with_its_streams_and_its_file(thing, tmp_path) -> None:
    tmp_path.chmod(0o700)
    server = PageServer(thing.site, tmp_path)
    server.start()
    browser = Browser(server).open()
    with socket.create_connection(address_of(server), timeout=20) as stream:
        stream.sendall(request("GET", "/changed", browser.headers()))
        found = b""
        while b"event: changed" not in found:
            found += stream.recv(4096)
        server.stop()
        while part := stream.recv(4096):
            found += part
    assert b"text/event-stream" in found
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(address_of(server), timeout=5)
    server.stop()


def test_the_stream_says_when_something_has_changed(server, browser, thing) -> None:
    with socket.create_connection(address_of(server), timeout=20) as stream:
        stream.sendall(request("GET", "/changed", browser.headers()))
        found = b""
        while not found.endswith(b"\n\n\r\n"):
            found += stream.recv(4096)
        thing.version = "2"
        while found.count(b"event: changed") < 2:
            found += stream.recv(4096)
    versions = re.findall(rb"data: (\w+)", found)
    assert len(set(versions)) == 2
    assert f'data-version="{versions[1].decode()}"' in browser.get().text
    assert b"data: 2" not in found


def test_other_pages_and_unknown_ones(browser) -> None:
    assert browser.get("/things/one").status == 200
    answer = browser.get("/things/%3Cb%3E")
    assert (answer.status, "there is no &lt;b&gt;" in answer.text) == (404, True)
    assert browser.get("/things/one/").status == 404  # and no redirect to somewhere else
