"""Messages at the end of runs: signed, once, without secrets; never to where a redirect points."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Iterator
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
        first = WebhookSender(webhook, world.server.store.runs, world.home, "test", (0.01, 0.01, 0.01))
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
        again = WebhookSender(webhook, world.server.store.runs, world.home, "test", (0.01,))
        again.start()
        until(lambda: len(receiver.got) >= 4, "the message of the restart")
        again.stop()
        assert json.loads(receiver.got[-1][0])["run"] == second


def test_a_message_that_is_refused_each_time_is_given_up_and_the_next_one_is_sent(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "coordinator.operations.webhook")
    with running(tmp_path / "home", NAMES) as world:
        runs, note = world.server.store.runs, world.home / "webhook.json"
        note.write_text(json.dumps({"sent": 0}))
        note.chmod(0o600)
        first, other = ended(world, "refused"), ended(world, "taken")
        receiver.answers = [500] * 3
        sender = WebhookSender(Webhook.of(receiver.url, key_file(tmp_path)), runs, world.home, "test", (0.01, 0.01))
        sender.start()
        until(lambda: json.loads(note.read_bytes())["sent"] == runs.last_ended(), "the end of all tries")
        sender.stop()
        assert [json.loads(body)["run"] for body, _ in receiver.got] == [first] * 3 + [other]
        assert [first in r.getMessage() for r in caplog.records if "it is given up" in r.getMessage()] == [True]
        assert receiver.url not in note.read_text()  # the address of some receivers is a secret


def test_a_receiver_that_never_answers_does_not_keep_the_service_from_its_end(tmp_path: Path) -> None:
    listening = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    with listening, running(tmp_path / "home", NAMES) as world:
        webhook = Webhook.of(f"http://127.0.0.1:{listening.getsockname()[1]}", key_file(tmp_path), timeout_s=0.1)
        sender = WebhookSender(webhook, world.server.store.runs, world.home, "test", (60.0,))
        sender.start()
        ended(world, "one")
        listening.accept()[0].close()
        sender.stop()
        assert not any(thread.name == "webhook" for thread in threading.enumerate())


@pytest.mark.parametrize("noted", ["", "[]", '{"sent": "7"}', '{"sent": true}', "[" * 100_000])
def test_a_note_that_cannot_be_read_is_said_and_messages_begin_with_the_next_end(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture, noted: str
) -> None:
    caplog.set_level("WARNING", "coordinator.operations.webhook")
    with running(tmp_path / "home", NAMES) as world:
        ended(world, "told or not")
        note = world.home / "webhook.json"
        note.write_text(noted)
        note.chmod(0o600)
        sender = WebhookSender(
            Webhook.of(receiver.url, key_file(tmp_path)), world.server.store.runs, world.home, "test"
        )
        sender.start()
        last = ended(world, "last")
        until(lambda: bool(receiver.got), "the next end")
        sender.stop()
        assert [json.loads(body)["run"] for body, _ in receiver.got] == [last]
        assert "does not say what was sent" in caplog.text


def test_a_restored_database_with_fewer_events_begins_at_its_newest(tmp_path: Path, receiver: Receiver) -> None:
    with running(tmp_path / "home", NAMES) as world:
        ended(world, "told before")
        note = world.home / "webhook.json"
        note.write_text(json.dumps({"sent": 99}))
        note.chmod(0o600)
        webhook = Webhook.of(receiver.url, key_file(tmp_path))
        sender = WebhookSender(webhook, world.server.store.runs, world.home, "test")
        sender.start()
        last = ended(world, "last")
        until(lambda: bool(receiver.got), "what came since")
        sender.stop()
        assert [json.loads(body)["run"] for body, _ in receiver.got] == [last]


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
