from __future__ import annotations

import fcntl
import logging
import os
import signal
import stat

import pytest

from fl_core.errors import FederationError, StateError, UnavailableError
from service_core.pki import certificates
from service_core.storage import private_files
from service_core.storage.private_files import Credentials, FolderLock


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_private_file_and_folder_modes(tmp_path):
    old = os.umask(0)  # the most careless umask there is
    try:
        private_files.write_private(tmp_path / "keys" / "k", b"secret")
    finally:
        os.umask(old)
    assert mode(tmp_path / "keys" / "k") == 0o600
    assert mode(tmp_path / "keys") == 0o700
    assert private_files.read_private(tmp_path / "keys" / "k") == b"secret"
    assert [p.name for p in (tmp_path / "keys").iterdir()] == ["k"]


def test_at_no_moment_readable_by_others(tmp_path, monkeypatch):
    seen = []
    write = os.fsync

    def spy(fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):
            seen.append(stat.S_IMODE(os.fstat(fd).st_mode))
        write(fd)

    monkeypatch.setattr(os, "fsync", spy)
    opened = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda *a, **k: opened.append(a) or real_open(*a, **k))
    private_files.write_private(tmp_path / "keys" / "k", b"secret")
    created = [a for a in opened if a[1] & os.O_CREAT]
    assert seen == [0o600]
    assert [a[2] for a in created] == [0o600]
    assert all(a[1] & os.O_EXCL for a in created)


@pytest.mark.parametrize("loose", [0o640, 0o604, 0o660, 0o666, 0o644])
def test_file_that_others_read_is_refused_with_the_remedy(tmp_path, loose):
    path = tmp_path / "keys" / "my key"
    private_files.write_private(path, b"secret")
    path.chmod(loose)
    with pytest.raises(StateError, match=r"chmod 600 '.*my key'") as caught:
        private_files.read_private(path)
    assert caught.value.code == "E-STATE-42"
    assert "secret" not in str(caught.value)


def test_folder_that_others_enter_is_refused_with_the_remedy(tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(StateError, match="chmod 700") as caught:
        private_files.write_private(folder / "k", b"secret")
    assert caught.value.code == "E-STATE-42"
    assert list(folder.iterdir()) == []


def test_interrupted_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "keys" / "k"
    private_files.write_private(path, b"old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnavailableError, match=r"E-STATE-63.*is full"):
        private_files.write_private(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["k"]
    (path.parent / ".k.tmp").write_bytes(b"left by a killed process")
    private_files.write_private(path, b"new")
    assert private_files.read_private(path) == b"new"


@pytest.mark.parametrize("write", [private_files.write_private, private_files.write_public])
def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file_whole(tmp_path, write):
    path = tmp_path / "keys" / "k"
    write(path, b"old")
    child = os.fork()
    if not child:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        try:
            write(path, b"new")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in path.parent.iterdir()] == ["k"]


def test_a_figure_that_cannot_be_drawn_leaves_the_old_picture_whole(tmp_path):
    class Torn:
        def savefig(self, file, **options):
            file.write(b"half")
            raise ValueError("a label that cannot be drawn")

    private_files.write_public(tmp_path / "p.png", b"old")
    with pytest.raises(ValueError, match="cannot be drawn"):
        private_files.write_figure(tmp_path / "p.png", Torn())
    assert (tmp_path / "p.png").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["p.png"]


def test_link_planted_in_place_of_the_temporary_file_is_not_followed(tmp_path):
    target = tmp_path / "elsewhere"
    target.write_bytes(b"untouched")
    folder = private_files.private_folder(tmp_path / "keys")
    (folder / ".k.tmp").symlink_to(target)
    private_files.write_private(folder / "k", b"secret")
    assert target.read_bytes() == b"untouched"


def test_missing_key_file(tmp_path):
    with pytest.raises(StateError) as caught:
        private_files.read_private(tmp_path / "none")
    assert caught.value.code == "E-STATE-43"


def test_the_key_does_not_show_in_a_repr(caplog):
    key = certificates.new_key()
    body = key.decode().splitlines()[1]
    credentials = Credentials(key, b"cert", b"ca")
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("x").warning("%s %r", credentials, {"c": credentials})
    assert body not in caplog.text
    assert "hidden" in caplog.text
    assert tuple(credentials) == (key, b"cert", b"ca")


def test_a_damaged_key_is_named_by_its_place_not_its_content():
    key = certificates.new_key()
    broken = key[:60] + b"#" + key[61:]
    with pytest.raises(FederationError) as caught:
        certificates.load_key(broken, "the file /x/ca.key")
    assert "/x/ca.key" in str(caught.value)
    assert broken[40:55].decode() not in str(caught.value)


def test_a_folder_stays_locked_when_its_lock_file_is_deleted_or_replaced(tmp_path):
    with FolderLock(tmp_path, "lock", "another service"):
        for replaced in (False, True):
            (tmp_path / "lock").unlink(missing_ok=True)
            if replaced:
                (tmp_path / "lock").write_text("12")
            assert FolderLock.is_held(tmp_path, "lock")
            with pytest.raises(StateError, match=r"E-STATE-20.*another service running in it"):
                FolderLock(tmp_path, "lock", "another service")
    assert not FolderLock.is_held(tmp_path, "lock")
    with FolderLock(tmp_path, "lock", "another service"):
        pass


def test_a_folder_is_locked_for_those_too_who_look_at_the_file_alone(tmp_path):
    """As earlier versions do, and other machines."""
    file = tmp_path / "lock"
    with FolderLock(tmp_path, "lock", "another"), file.open() as theirs, pytest.raises(BlockingIOError):
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with file.open("w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        theirs.write("4711")
        theirs.flush()
        assert FolderLock.is_held(tmp_path, "lock")
        with pytest.raises(StateError, match=r"E-STATE-20.*process 4711"):
            FolderLock(tmp_path, "lock", "another")
        assert file.read_text() == "4711"
    with FolderLock(tmp_path, "lock", "another"):
        assert file.read_text() == str(os.getpid())
