"""Messages at the end of runs: signed, once, without secrets; never to where a redirect points."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coordinator.operations.webhook import SIGNATURE, Webhook, WebhookSender
from coordinator.storage.records import RunState
from fl_core.errors import ConfigError, StateError
from tests.support import until
from tests.support.coordinator import World, running
from tests.support.federations import NAMES, manifest

KEY = b"k" * 32


class Receiver:
    """A program of the operator's on loopback. answers: statuses of the next messages, 200 after them."""

    def __init__(self) -> None:
        self.got: list[tuple[bytes, str]] = []
        self.answers: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((body, self.headers[SIGNATURE]))
                self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
                self.send_header("Location", f"{receiver.url}/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                receiver.got.append((b"followed", ""))

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.operations.webhook._LOOK_S", 0.05)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


def key_file(folder: Path, key: bytes = KEY) -> Path:
    file = folder / "key"
    file.write_bytes(key)
    file.chmod(0o600)
    return file


def ended(world: World, request: str) -> str:
    run = world.submit(manifest(rounds=1), request)
    world.server.store.runs.end(run.id, RunState.FAILED, "E-RUN-03: north (secret-token) is away", RunState)
    return run.id


def test_each_end_is_told_once_signed_and_without_what_a_reason_says(tmp_path: Path, receiver: Receiver) -> None:
    with running(tmp_path / "home", NAMES) as world:
        ended(world, "before")  # there was no webhook yet
        webhook = Webhook.of(receiver.url, key_file(tmp_path))
        receiver.answers = [500, 302]
        waits, still = (0.01, 0.01, 0.01), lambda: 0.0  # no message is late, however slow the machine is
        first = WebhookSender([webhook], world.server.store.runs, world.home, "test", waits, clock=still)
        first.start()
        until(lambda: (world.home / "webhook.json").exists(), "the first look")
        run = ended(world, "one")
        until(lambda: len(receiver.got) >= 3, "two tries that failed, and one that did not")
        assert len({body for body, _ in receiver.got}) == 1
        body, signature = receiver.got[0]
        assert signature == "sha256=" + hmac.new(KEY, body, hashlib.sha256).hexdigest()
        said = json.loads(body)
        assert (said["event"], said["run"], said["code"], said["consortium"]) == ("run.failed", run, "E-RUN-03", "test")
        assert b"secret-token" not in body
        assert b"north" not in body
        until(lambda: json.loads((world.home / "webhook.json").read_bytes())["sent"] > 1, "the note")
        first.stop()
        second = ended(world, "two")  # while nobody sends
        again = WebhookSender([webhook], world.server.store.runs, world.home, "test", (0.01,))
        again.start()
        until(lambda: len(receiver.got) >= 4, "the message of the restart")
        again.stop()
        assert json.loads(receiver.got[-1][0])["run"] == second


class NeverAnswers:
    """Takes connections, reads what it is sent, and begins an answer that has no end, a byte at a time."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.over = threading.Event()
        self.asked = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self.asked += 1
                threading.Thread(target=self._drip, args=(connection,), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self.over.wait(0.02):
                connection.sendall(b"x")

    def stop(self) -> None:
        self.over.set()
        self._server.close()


def test_a_receiver_that_never_answers_delays_no_other_and_its_own_messages_are_given_up_in_time(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "coordinator.operations.webhook")
    hung = NeverAnswers()
    with running(tmp_path / "home", NAMES) as world:
        key = key_file(tmp_path)
        webhooks = [Webhook.of(url, key) for url in (hung.url, receiver.url)]
        sender = WebhookSender(webhooks, world.server.store.runs, world.home, "test", (0.01, 0.01), timeout=0.15)
        sender.start()
        told = [ended(world, f"run {k}") for k in range(4)]
        newest = world.server.store.runs.last_ended()
        until(lambda: len({body for body, _ in receiver.got}) == 4, "all messages at the receiver that answers")
        # In order; on a slow machine an answer may come after its time, and the message a second time.
        assert list(dict.fromkeys(json.loads(body)["run"] for body, _ in receiver.got)) == told
        assert hung.asked <= 1
        until(lambda: [r for r in caplog.records if r.getMessage().count(told[-1])], "the last one's try at the other")
        until(
            lambda: set(json.loads((world.home / "webhook.json").read_bytes())["receivers"].values()) == {newest},
            "the last one to be noted of both",
        )
        assert hung.asked == 1  # one connection, which it holds: no thread and no socket more for each message
        given_up = [r.getMessage() for r in caplog.records if "it is given up" in r.getMessage()]
        assert [next(run for run in told if run in text) for text in given_up] == told
        sender.stop()
    hung.stop()


def test_messages_that_waited_as_long_as_all_tries_take_are_tried_once(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.operations.webhook._LOOK_S", 60.0)
    with running(tmp_path / "home", NAMES) as world:
        runs = world.server.store.runs
        note = world.home / "webhook.json"
        note.write_text(json.dumps({"sent": 0}))
        note.chmod(0o600)
        first, *others = [ended(world, f"run {k}") for k in range(5)]
        receiver.answers = [500] * 7

        def clock() -> float:
            """Pass 25 seconds with each try."""
            return time.time() + 25 * len(receiver.got)

        webhook = Webhook.of(receiver.url, key_file(tmp_path))
        sender = WebhookSender([webhook], runs, world.home, "test", (0.01, 0.01), clock=clock)
        sender.start()
        until(lambda: json.loads(note.read_bytes())["sent"] == runs.last_ended(), "the end of all tries")
        sender.stop()
        tried = [json.loads(body)["run"] for body, _ in receiver.got]
        assert tried == [first] * 3 + others


def test_each_receiver_has_its_own_place_and_what_an_earlier_version_noted_holds(
    tmp_path: Path, receiver: Receiver
) -> None:
    with running(tmp_path / "home", NAMES) as world:
        webhook, runs = Webhook.of(receiver.url, key_file(tmp_path)), world.server.store.runs
        ended(world, "told before")
        note = world.home / "webhook.json"
        note.write_text(json.dumps({"sent": runs.last_ended()}))  # as a service wrote it that knew one receiver
        note.chmod(0o600)
        missed = ended(world, "missed")
        sender = WebhookSender([webhook], runs, world.home, "test")
        sender.start()
        until(lambda: len(receiver.got) >= 1, "what came since")
        assert json.loads(receiver.got[0][0])["run"] == missed
        until(lambda: json.loads(note.read_bytes())["sent"] == runs.last_ended(), "the note")
        sender.stop()
        assert receiver.url not in note.read_text()  # the address of some receivers is a secret
        other = Webhook.of(f"{receiver.url}/new", key_file(tmp_path))
        both = WebhookSender([webhook, other], runs, world.home, "test")
        both.start()
        last = ended(world, "last")
        until(lambda: len(receiver.got) >= 3, "one message for each")
        both.stop()
        assert [json.loads(body)["run"] for body, _ in receiver.got[1:]] == [last, last]


def test_one_receiver_twice_and_too_many_are_refused(tmp_path: Path) -> None:
    with running(tmp_path / "home", NAMES) as world:
        key = key_file(tmp_path)
        for urls in (["https://example.org/"] * 2, [f"https://example.org/{k}" for k in range(9)]):
            with pytest.raises(ConfigError, match=r"E-CFG-02.*at most 8 receivers, each once"):
                WebhookSender([Webhook.of(u, key) for u in urls], world.server.store.runs, world.home, "test")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/x",
        "ftp://127.0.0.1/x",
        "file:///etc/passwd",
        "https://me:secret@example.org/",
        "https://",
        "http://127.0.0.1.example.org/",
        "http://[::1",
        "https://example.org:99999/",
        "https://exa\nmple.org/",
        "javascript:alert(1)",
        "",
    ],
)
def test_a_url_that_leaves_this_machine_in_the_clear_or_is_none_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="E-CFG-02") as caught:
        Webhook.of(url, key_file(tmp_path))
    assert "secret" not in str(caught.value)


def test_a_key_that_is_missing_short_or_open_to_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-02.*--webhook-key"):
        Webhook.of("https://example.org/", None)
    with pytest.raises(ConfigError, match=r"E-CFG-02.*32 bytes"):
        Webhook.of("https://example.org/", key_file(tmp_path, b"short"))
    file = key_file(tmp_path)
    assert "kkkk" not in repr(Webhook.of("https://example.org/", file))
    file.chmod(0o644)
    with pytest.raises(StateError, match="E-STATE-42"):
        Webhook.of("https://example.org/", file)
