"""What the hospital's page shows and what its buttons do, over HTTP: the same as its commands."""

from __future__ import annotations

import html
import json
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from consilium.pages.hospital.site import HospitalPage
from consilium.web.serve import PageServer
from service_core.audit_log.lines import LogEntry
from service_core.audit_log.log import FOLDER, AuditLog, last_lines
from silo.cli.main import run as silo
from silo.storage.home import Home, ServeOptions
from silo.storage.store import SiloStore
from tests.support.audit_log import verified
from tests.support.fake_coordinator import enrolled, manifest
from tests.support.hospital import POLICY, RUN, asks, furnished, took_part
from tests.support.pages import Browser
from tests.support.privacy import TEST, TRAIN

ASKS = "fedmr-digits-7f3c"
HOSTILE = "\x1b]0;x\x07\u202e</td><script>alert(1)</script>\u2066 =cmd|' \x00" + "y" * 2000


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """Make one furnished home; each test works on a copy."""
    folder = tmp_path_factory.mktemp("furnished") / "home"
    furnished(folder)
    return folder


@pytest.fixture
def home(template, tmp_path) -> Home:
    import shutil

    shutil.copytree(template, tmp_path / "home")
    return Home(tmp_path / "home")


class Shown:
    """A page that is open in one browser."""

    def __init__(self, home: Home, audit: Path | None = None) -> None:
        self.page = HospitalPage(home.make(), audit)
        self.server = PageServer(self.page.site(), home.path)
        self.server.start()
        self.browser = Browser(self.server).open()

    def text(self) -> str:
        return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", self.browser.get().text)))

    def form(self, action: str, run: str) -> dict[str, str]:
        """Return the fields of a run's button, which stands below its id on the page."""
        page = self.browser.get().text
        after = page[page.index(f"{run}, asked") :]
        (fields,) = re.findall(rf'<form method="post" action="{action}">(.*?)</form>', after, re.DOTALL)[:1]
        return dict(re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', fields))

    def close(self) -> None:
        self.server.stop()
        self.page.close()


@pytest.fixture
def show():
    opened = []

    def shown(home: Home, audit: Path | None = None) -> Shown:
        opened.append(Shown(home, audit))
        return opened[-1]

    yield shown
    for one in opened:
        one.close()


def decisions(home: Home) -> dict[str, bool | None]:
    store = SiloStore(home.database)
    try:
        return {a.run_id: a.decided for a in store.approvals.all()}
    finally:
        store.close_database()


def test_the_page_shows_what_left_what_was_spent_who_is_there_and_what_waits(home, show) -> None:
    text = show(home).text()
    assert "No image has left this hospital" in text
    assert "3 updates left, 466 kB in all" in text
    assert "Each update was checked against the numbers that its run declared." in text
    assert "38,379 numbers: changes of the model's parameters" in text
    assert re.search(r"Epsilon \d\.\d\d of 8 is spent for each record", text)
    assert "center3 ◐ not confirmed" in text
    assert "1 key waits for your consent" in text
    assert "An image that cannot be read: 2 times." in text
    assert "scans/0041.png, scans/0107.png" in text
    assert "531 90" in text
    assert "skin-study-2" in text
    assert "approval run=fedmr-digits-7f3c round=1" in text
    assert "it is not running" in text
    assert "when the last session with the coordinator ended" in text


def test_the_page_says_beside_the_spending_how_many_updates_left_without_privacy(home, show) -> None:
    assert "left without noise" not in show(home).text()
    took_part(home, manifest(), "fedavg-digits-plain", rounds=4)
    shown = show(home)
    text = shown.text()
    assert "is spent for each record in private runs. From these runs alone" in text
    assert "▲ 4 updates of these records left without noise, in 1 run: no privacy bound holds for them." in text
    assert "4 updates of this hospital's records left without noise" in text
    assert "▲ no privacy" in text
    assert "epsilon 8 at delta 1e-05 for each record" in text
    assert "Other homes" not in text
    home.place_ledger(home.ledger.rename(home.path.parent / "ledger.db"), home.ledger_key)
    assert "See their pages for the updates that they sent without privacy" in show(home).text()


def test_the_commands_say_how_many_updates_left_without_privacy(home, capsys) -> None:
    took_part(home, manifest(), "fedavg-digits-plain", rounds=4)
    place = ["--home", str(home.path)]
    assert silo(["status", "--json", *place]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left"]["unprotected"] == {"updates": 4, "runs": 1, "unregistered": 0, "unknown": 0}
    assert [run["privacy"] for run in found["runs"]] == [
        f"{said}: the coordinator reads this hospital's update by itself"
        for said in ("epsilon 8 at delta 1e-05 for each record", "no privacy")
    ]
    assert silo(["status", *place]) == 0
    assert "4 updates left without noise, in 1 run: no privacy bound holds for them." in capsys.readouterr().out
    assert silo(["ledger", "show", "--json", *place]) == 0
    shown = json.loads(capsys.readouterr().out)["collections"]
    assert {c["collection"]: c["unprotected"]["updates"] for c in shown} == {TEST: 4, TRAIN: 4, "hospital": 4}
    assert silo(["ledger", "show", *place]) == 0
    assert f"{TRAIN}: 4 updates left without noise, in 1 run" in capsys.readouterr().out


def test_a_home_that_never_served_says_so_in_sentences(tmp_path, show) -> None:
    text = show(enrolled(tmp_path / "home")).text()
    assert "Nothing has left this hospital" in text
    assert "Nothing waits for you." in text
    assert "No records are registered, so private runs are refused" in text
    assert "This hospital has not served data yet" in text
    assert "There has been no session with the coordinator yet" in text
    assert "The log is empty" in text


@pytest.mark.parametrize(("action", "decided", "word"), [("/approve", True, "approved"), ("/refuse", False, "refused")])
def test_a_button_decides_as_the_command_does_and_the_log_says_that_it_was_the_page(
    home, show, action, decided, word
) -> None:
    shown = show(home)
    assert shown.browser.post(action, shown.form(action, ASKS)).status == 303
    assert decisions(home) == {ASKS: decided, "fedavg-digits-90d2": None}
    assert f"skin-study-2 ({ASKS}) is {word}" in shown.text()
    line = last_lines(home.path, 1)[0]
    assert re.fullmatch(r"user \S+, page", line.entry.who)
    assert (line.entry.what, line.entry.outcome) == ("command approve", "allowed")
    assert f"run={ASKS}" in line.entry.about
    assert ("deny=True" in line.entry.about) is not decided
    assert verified(home.path).lines > 0
    assert [f["question"] for f in shown.browser.fields(action)] == [
        shown.form(action, "fedavg-digits-90d2")["question"]
    ]


def _policy(home: Home) -> None:
    home.policy.write_text(POLICY + "min_noise = 0.01\n[prototypes]\nsubmit = false\n")


def _budget(home: Home) -> None:
    from privacy.ledger.ledger import Ledger

    Ledger(home.ledger, home.ledger_key).set_budget(TRAIN, 5.0, 1e-5, "dpo", "less")


def _decided(home: Home) -> None:
    assert silo(["approve", ASKS, "--deny", "--home", str(home.path)]) == 0


@pytest.mark.parametrize("change", [_policy, _budget, _decided])
def test_what_changed_since_it_was_shown_is_not_approved(home, show, change) -> None:
    shown = show(home)
    form = shown.form("/approve", ASKS)
    change(home)
    before = decisions(home)
    answer = shown.browser.post("/approve", form)
    assert (answer.status, decisions(home)) == (409, before)
    assert "changed since you saw it" in answer.text


def test_a_run_that_is_not_shown_cannot_be_decided_about(home, show) -> None:
    shown = show(home)
    form = shown.form("/approve", ASKS)
    for other in ({"question": shown.form("/approve", "fedavg-digits-90d2")["question"]}, {"question": ""}):
        assert shown.browser.post("/approve", {**form, **other}).status == 409
    assert set(decisions(home).values()) == {None}


@pytest.mark.fault(
    "a hospital's disk",
    "is full when a button of the hospital's page is pressed",
    "nothing is decided, and the page names the disk as the cause",
)
def test_on_a_full_disk_the_page_is_shown_and_a_button_decides_nothing_and_says_why(home, show) -> None:
    shown = show(home)
    form = shown.form("/approve", ASKS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))  # no file grows: what is written gets EFBIG
    try:
        text = shown.text()
        answer = shown.browser.post("/approve", form)
        again = shown.text()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "skin-study-2" in text
    assert answer.status == 409
    assert "E-STATE-63" in answer.text
    assert "disk" in answer.text
    assert "skin-study-2" in again
    assert set(decisions(home).values()) == {None}
    assert shown.browser.post("/approve", shown.form("/approve", ASKS)).status == 303  # and with room it works at once
    assert decisions(home)[ASKS] is True
    assert verified(home.path).lines > 0


def test_two_clicks_at_once_decide_once(home, show) -> None:
    shown = show(home)
    form = shown.form("/approve", ASKS)
    other = {**shown.form("/refuse", ASKS)}
    assert shown.browser.post("/approve", form).status == 303
    assert shown.browser.post("/refuse", other).status == 409
    assert decisions(home)[ASKS] is True


def test_the_page_and_the_command_say_the_same_of_what_would_be_spent(home, show, capsys) -> None:
    text = show(home).text()
    assert silo(["approve", "--home", str(home.path), "--json"]) == 0
    runs = {r["run"]: r["spends"] for r in json.loads(capsys.readouterr().out)["runs"]}
    sentences = re.findall(r"center1/\w+: epsilon spent would rise from \d\.\d\d to \d\.\d\d of 8", runs[ASKS])
    assert len(sentences) == 2
    assert all(sentence in text for sentence in sentences)
    assert runs["fedavg-digits-90d2"] in text


@pytest.mark.fault(
    "a lead or a hospital", "puts markup into names that a hospital's page shows", "shown as escaped text"
)
def test_hostile_names_stay_text_wherever_they_come_from(home, show) -> None:
    asks(home, replace(manifest(), name=HOSTILE[:200], lead=HOSTILE), HOSTILE)
    took_part(home, replace(manifest(), name=HOSTILE[:200]), "run" + HOSTILE)
    store = SiloStore(home.database)
    store.end_run("run" + HOSTILE, "failed", HOSTILE)
    store.record_departure(HOSTILE)
    store.close_database()
    home.note_served(ServeOptions(HOSTILE, "", ""))
    report = {
        "origin": HOSTILE,
        "classes": [HOSTILE],
        "counts": {"train": [1], "test": [1]},
        "fingerprint": HOSTILE,
        "problems": [{"code": "E", "what": HOSTILE, "count": 1, "first": [HOSTILE], "remedy": HOSTILE}],
    }
    raw = {"at": 1e9, "served": {"data": HOSTILE, "data_root": "", "cwd": ""}, "report": report}
    (home.path / "data-check.json").write_text(json.dumps(raw))
    log = AuditLog(home.path / FOLDER)
    log.append(LogEntry(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE))
    log.close()
    shown = show(home)
    answer = shown.browser.get()
    assert answer.status == 200
    assert "<script>alert" not in answer.text
    assert [c for c in answer.text if not c.isprintable() and c != "\n"] == []
    assert answer.text.count("\\u202e") > 10
    run = html.escape(HOSTILE).replace("\x1b", "\\x1b")[:20]
    assert run.split("\x07")[0] in answer.text
    assert len(shown.browser.fields("/approve")) == 3


def test_a_run_whose_name_is_shown_escaped_can_still_be_decided_about(home, show) -> None:
    asks(home, replace(manifest(), name="a\u202eb", lead="anna"), "run\u202e1")
    shown = show(home)
    assert shown.browser.post("/refuse", shown.form("/refuse", "run\\u202e1")).status == 303
    assert decisions(home)["run\u202e1"] is False


@pytest.mark.parametrize("epsilon", [1e-40, 1e-3, 0.1, 1e300])
def test_a_page_of_any_budget_is_shown(home, show, epsilon) -> None:
    from privacy.ledger.ledger import Ledger

    Ledger(home.ledger, home.ledger_key).set_budget(TRAIN, epsilon, 1e-5, "dpo", "other")
    answer = show(home).browser.get()
    assert (answer.status, f"of {epsilon:g}" in answer.text) == (200, True)


@pytest.mark.parametrize("what", ["policy", "ledger"])
def test_what_cannot_be_read_is_said_where_it_stands_and_the_rest_is_shown(home, show, what) -> None:
    if what == "policy":
        home.policy.write_text("[privasy]\n")
    else:
        home.ledger_key.unlink()
    text = show(home).text()
    assert "No image has left this hospital" in text
    assert ("E-POLICY-01" if what == "policy" else "E-BUDGET-") in text
    assert "skin-study-2" in text


def test_the_version_follows_what_is_shown_and_nothing_else(home) -> None:
    page = HospitalPage(home.make())
    try:
        seen = [page.version()]
        page.facts()
        assert page.version() == seen[0]
        for change in (_policy, _decided, _budget, lambda h: h.note_served(ServeOptions("x"))):
            change(home)
            seen.append(page.version())
        assert len(set(seen)) == len(seen)
    finally:
        page.close()


@pytest.mark.parametrize(
    ("size", "noted", "headline"),
    [
        (155_244, True, "No image has left this hospital"),
        (400_000, True, "An update that left this hospital was larger than its declared numbers"),
        (155_244, False, "Updates have left this hospital; of some, only the size is known"),
    ],
)
def test_the_headline_says_what_is_known_of_every_update(tmp_path, show, size, noted, headline) -> None:
    home = enrolled(tmp_path / "home")
    took_part(home, manifest(), RUN, size)
    if not noted:
        import sqlite3
        from contextlib import closing

        with closing(sqlite3.connect(home.database)) as db:
            db.execute("UPDATE runs SET leaves = ''")
            db.commit()
    text = show(home).text()
    assert headline in text
    assert ("No image" in text) is headline.startswith("No image")


# ---- pictures --------------------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


def test_only_pictures_that_the_audit_names_are_given_out(home, show, tmp_path) -> None:
    folder = tmp_path / "audit"
    folder.mkdir()
    (folder / "losses.png").write_bytes(PNG)
    (folder / "other.png").write_bytes(PNG)
    (folder / "text.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "home" / "identity" / "silo.pem")
    verdict = {"audit": "losses", "expected": "at most 8", "found": "0.3", "holds": True}
    named = {"picture": "losses.png", "verdicts": [verdict]}
    (folder / "audit.json").write_text(
        json.dumps(
            {
                "about": {"data": "x"},
                "losses": named,
                "text": {"picture": "text.png", "verdicts": []},
                "link": {"picture": "link.png", "verdicts": []},
                "up": {"picture": "../home/identity/silo.pem", "verdicts": []},
            }
        )
    )
    shown = show(home, folder)
    assert "losses: passed (expected at most 8, measured 0.3)" in shown.text()
    answer = shown.browser.get("/files/losses.png")
    assert (answer.status, answer.body, answer.header("content-type")) == (200, PNG, "image/png")
    for id in ("other.png", "text.png", "link.png", "../home/identity/silo.pem", "audit.json", ""):
        assert shown.browser.get(f"/files/{id}").status == 404


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": {"picture": 1, "verdicts": 3}}', '{"a": {"picture": null}}', "[" * 9999]
)
def test_a_summary_that_is_none_shows_no_pictures(home, show, tmp_path, text) -> None:
    (tmp_path / "audit.json").write_text(text)
    assert show(home, tmp_path).browser.get().status == 200


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "{",
        "[]",
        '{"at": 1}',
        '{"at": "x", "served": {}}',
        '{"served": {"data": "digits/p3c4/1"}, "at": 1}',
        "[" * 9999,
    ],
)
def test_a_kept_check_that_is_damaged_counts_as_none(home, show, raw) -> None:
    (home.path / "data-check.json").write_text(raw)
    assert "They have not been checked yet." in show(home).text()


def test_a_check_of_other_data_is_not_shown(home, show) -> None:
    home.note_served(ServeOptions("digits/p3c4/2"))
    text = show(home).text()
    assert "They have not been checked yet." in text
    assert "scans/0041.png" not in text


@pytest.mark.slow
def test_the_button_checks_the_data_in_another_process_and_the_page_shows_what_it_found(home, show) -> None:
    from tests.support import until

    shown = show(home)
    (form,) = shown.browser.fields("/data/check")
    assert shown.browser.post("/data/check", form).status == 303
    until(lambda: not shown.page.data.running)
    text = shown.text()
    assert "Ready for runs: no problems found" in text
    assert "scans/0041.png" not in text
    line = last_lines(home.path, 1)[0]
    assert (line.entry.what, line.entry.who.endswith(", page")) == ("command data check", True)


@pytest.mark.slow
def test_a_check_that_cannot_be_made_is_shown_as_the_command_says_it(home, show) -> None:
    from tests.support import until

    home.note_served(ServeOptions("folder:/nowhere"))
    shown = show(home)
    assert shown.page.data.start()
    until(lambda: not shown.page.data.running)
    assert "E-DATA-02" in shown.text()
