"""What a process in the cage cannot do any more, as root and as an ordinary user, and what is said of missing walls."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

import pytest

from silo.operations.doctor import Examination
from silo.storage.home import Home
from silo.worker import cage
from silo.worker.cage import Walls

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="the cage is made of system calls of Linux"),
]
NOBODY = 65534
USERS = [os.geteuid(), NOBODY] if os.geteuid() == 0 else [os.geteuid()]
BEGIN = """
import ctypes, errno, json, os, signal, socket, sys
from pathlib import Path
from silo.worker import cage
folder, user = Path(sys.argv[1]), int(sys.argv[2])
listener = socket.create_server(("127.0.0.1", 0))
if user != os.geteuid():
    os.setgroups([]), os.setgid(user), os.setuid(user)
    cage._prctl(cage._DUMPABLE, 1)  # as after an exec
libc = ctypes.CDLL(None, use_errno=True)
def refused(attempt):
    try:
        attempt()
    except OSError as error:
        return True
    return False
def failed(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
"""


def inside(folder: Path, user: int, what: str, before: str = "", imports: str = "") -> object:
    """Run Python in the cage as a user; return what the expression `what` gives there. imports: while it is root."""
    folder.chmod(0o777)
    code = f"{imports}{BEGIN}{textwrap.dedent(before)}\nwalls = cage.enter([folder / 'own'])\nprint(json.dumps({what}))"
    (folder / "own").mkdir(exist_ok=True)
    (folder / "own").chmod(0o777)
    done = subprocess.run([sys.executable, "-c", code, folder, str(user)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def given(user: int) -> dict[str, bool]:
    """Ask the kernel, not the product, which walls a user could have here."""
    switched = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
    unshared = subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True, **switched)
    landlock_create_ruleset, its_version = 444, 1
    return {
        "namespace": unshared.returncode == 0,
        "seccomp": Path("/proc/sys/kernel/seccomp/actions_avail").exists(),
        "landlock": ctypes.CDLL(None).syscall(landlock_create_ruleset, None, 0, its_version) > 0,
    }


@pytest.fixture(params=USERS, ids=lambda user: "root" if user == 0 else "ordinary user")
def user(request: pytest.FixtureRequest, tmp_path: Path) -> int:
    walls = Walls(*inside(tmp_path, request.param, "walls"))
    missing = {name: why for name, why in walls._asdict().items() if why}
    if missing:
        possible = given(request.param)
        assert not [name for name in missing if possible[name]], missing
        pytest.skip(f"this machine does not give all walls: {missing}")
    return int(request.param)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Give a folder that every user can reach, unlike pytest's own."""
    with TemporaryDirectory(prefix="consilium-cage-") as folder:
        yield Path(folder)


def test_it_opens_no_socket_of_any_network(tmp_path: Path, user: int) -> None:
    families = "[getattr(socket, f'AF_{name}') for name in 'INET INET6 PACKET NETLINK CAN VSOCK'.split()]"
    kinds = "(socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW)"
    tried = inside(tmp_path, user, f"[refused(lambda: socket.socket(f, k)) for f in {families} for k in {kinds}]")
    assert tried == [True] * 18


def test_it_connects_to_nothing_even_by_a_socket_that_was_open_before(tmp_path: Path, user: int) -> None:
    before = (
        "kept, local = socket.socket(), socket.socket(socket.AF_UNIX)\nlocal_server = socket.socket(socket.AF_UNIX)"
    )
    before += "\nlocal_server.bind(str(folder / 'socket')); local_server.listen()"
    attempts = "lambda: kept.connect(listener.getsockname()), lambda: local.connect(str(folder / 'socket'))"
    assert inside(tmp_path, user, f"[refused(attempt) for attempt in ({attempts})]", before) == [True, True]


def test_it_binds_no_port_even_by_a_socket_that_was_open_before(tmp_path: Path, user: int) -> None:
    assert inside(tmp_path, user, "refused(lambda: kept.bind(('127.0.0.1', 0)))", "kept = socket.socket()") is True


def test_it_writes_below_its_folders_alone(tmp_path: Path, user: int) -> None:
    (tmp_path / "kept").write_text("as it was")
    (tmp_path / "kept").chmod(0o666)
    attempts = (
        "lambda: (folder / 'kept').write_text('x')",
        "lambda: (folder / 'kept').open('r+b')",
        "lambda: (folder / 'new').write_text('x')",
        "lambda: (folder / 'kept').unlink()",
        "lambda: os.truncate(folder / 'kept', 0)",
        "lambda: os.replace(folder / 'own' / 'file', folder / 'kept')",
        "lambda: (folder / 'new').mkdir()",
    )
    own = "(folder / 'own' / 'file').write_text('x')"
    tried = inside(tmp_path, user, f"[{own}, *(refused(attempt) for attempt in ({', '.join(attempts)}))]")
    assert tried == [1, *[True] * len(attempts)]
    assert (tmp_path / "kept").read_text() == "as it was"


def test_it_reads_no_memory_of_the_service_and_stops_it_by_no_signal(tmp_path: Path, user: int) -> None:
    """The service's place is taken by a child that runs as the same user, outside of the cage."""
    before = """
    service = os.fork()
    if not service:
        cage._prctl(cage._DUMPABLE, 1)
        os.closerange(1, 3)
        signal.alarm(20)
        signal.pause()
    """
    attempts = (
        "lambda: failed(libc.ptrace(16, service, 0, 0))",
        "lambda: Path(f'/proc/{service}/mem').open('r+b')",
        "lambda: failed(libc.process_vm_readv(service, 0, 0, 0, 0, 0))",
        "lambda: failed(libc.syscall(438, os.pidfd_open(service), 0, 0))",
        "lambda: os.kill(service, signal.SIGKILL)",
    )
    assert inside(tmp_path, user, f"[refused(attempt) for attempt in ({', '.join(attempts)})]", before) == [True] * 5


def test_it_makes_no_ring_for_calls_that_the_filter_does_not_see_and_enters_no_other_namespace(
    tmp_path: Path, user: int
) -> None:
    calls = "(425, 8, 0), (libc_unshare, 0x40000000, 0), (libc_setns, os.open('/proc/self/ns/net', os.O_RDONLY), 0)"
    before = "column = 0 if os.uname().machine == 'x86_64' else 1\n"
    before += "libc_unshare, libc_setns = (cage._REFUSED[name][column] for name in ('unshare', 'setns'))"
    assert (
        inside(tmp_path, user, f"[refused(lambda: failed(libc.syscall(*call))) for call in ({calls})]", before)
        == [True] * 3
    )


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is an ABI of x86-64")
def test_a_call_of_another_abi_is_refused(tmp_path: Path, user: int) -> None:
    what = "[libc.syscall(0x40000000 + 39), ctypes.get_errno() == errno.EPERM]"  # getpid, which nothing else refuses
    assert inside(tmp_path, user, what) == [-1, True]


def test_it_leaves_no_core_file_and_cannot_be_looked_into(tmp_path: Path, user: int) -> None:
    what = "[__import__('resource').getrlimit(4), libc.prctl(3), libc.prctl(39, 0, 0, 0, 0)]"
    assert inside(tmp_path, user, what) == [[0, 0], 0, 1]


def test_it_reads_files_as_its_user_did_before(tmp_path: Path, user: int) -> None:
    """Root reads what belongs to others; the owner of a file is who it was."""
    (tmp_path / "others").write_text("x")
    if os.geteuid() == 0:
        os.chown(tmp_path / "others", 4321, 4321)
        (tmp_path / "others").chmod(0o600 if user == 0 else 0o604)
    what = "[(folder / 'others').read_text(), os.geteuid(), (folder / 'own').stat().st_uid]"
    owner = os.geteuid() if user == os.geteuid() else cage.UNMAPPED
    assert inside(tmp_path, user, what) == ["x", user, owner]


@pytest.mark.skipif(NOBODY not in USERS, reason="only root gives files to others")
@pytest.mark.parametrize(("owner", "outside"), [(0, "read"), (NOBODY, "read"), (4321, "E-POLICY-10")])
def test_a_policy_of_root_counts_in_an_ordinary_users_cage_and_a_strangers_is_refused_before(
    tmp_path: Path, owner: int, outside: str
) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy").chmod(0o755)  # whatever umask this process has: a service that ran in it set 077
    (tmp_path / "policy" / "policy.toml").write_text("")
    (tmp_path / "policy" / "policy.toml").chmod(0o644)
    os.chown(tmp_path / "policy" / "policy.toml", owner, owner)
    imports = """
from privacy.policy import Policy
from fl_core.errors import RefusedError
"".encode("utf-8-sig")
def read(folder):
    try:
        return Policy.read(folder / "policy.toml") and "read"
    except RefusedError as error:
        return error.code
"""
    seen = inside(tmp_path, NOBODY, "[first, read(folder / 'policy')]", "first = read(folder / 'policy')", imports)
    assert seen == [outside, "read"]


# ---- walls that cannot be built --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wall", "build"), [("namespace", "_leave_network"), ("seccomp", "_filter_calls")])
def test_a_wall_that_this_machine_refuses_is_named_and_the_others_stand(tmp_path: Path, wall: str, build: str) -> None:
    before = f"def refuse():\n    raise OSError('not here')\ncage.{build} = refuse"
    walls = Walls(*inside(tmp_path, USERS[-1], "walls", before))
    assert getattr(walls, wall) == "not here"
    assert walls.offline is True
    assert any("(not here)" in sentence for sentence in walls.sentences())


@pytest.mark.parametrize(
    ("wall", "build"), [("namespace", "_leave_network"), ("seccomp", "_filter_calls"), ("landlock", "_confine_writes")]
)
def test_a_wall_that_was_built_and_lets_through_what_it_must_refuse_does_not_hold(
    tmp_path: Path, wall: str, build: str
) -> None:
    walls = Walls(*inside(tmp_path, USERS[-1], "walls", f"cage.{build} = lambda *_: None"))
    assert getattr(walls, wall) == "it was tested and did not hold"


def test_without_namespace_and_filter_nobody_says_that_it_is_offline_or_opens_no_socket(tmp_path: Path) -> None:
    before = "cage._leave_network = cage._filter_calls = lambda: None"
    walls = Walls(*inside(tmp_path, USERS[-1], "walls", before))
    assert walls.offline is False
    assert "cannot open a socket" not in walls.sentences()


def test_the_doctor_says_which_walls_hold_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (check,) = Examination(Home(tmp_path / "home"), network=False).checks()["worker"]()
    walls = cage.rehearse([tmp_path / "home"])
    assert check.found == "; ".join(walls.sentences())
    assert (check.level.value == "ok") is not any(walls)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory that programs share")
def test_it_writes_to_no_memory_that_other_programs_read(tmp_path: Path, user: int) -> None:
    with NamedTemporaryFile(dir="/dev/shm", prefix="consilium-cage-") as shared:
        Path(shared.name).chmod(0o666)
        assert inside(tmp_path, user, f"refused(lambda: open({shared.name!r}, 'r+b'))") is True
        assert inside(tmp_path, user, "open('/dev/null', 'wb').write(b'x')") == 1
