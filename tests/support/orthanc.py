"""A real PACS on loopback: Orthanc with its DICOMweb plugin, from Debian's packages, which are not installed."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.support import until
from tests.support.processes import free_port

PACKAGES = ("orthanc", "orthanc-dicomweb")
USER = "ward:secret"


@cache
def missing() -> str:
    """Say why there is no Orthanc to be had here; "" if there is."""
    try:
        subprocess.run(["apt-cache", "show", *PACKAGES], capture_output=True, check=True, timeout=60)
        subprocess.run(["dpkg", "--version"], capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return f"apt has no packages {' and '.join(PACKAGES)}"
    return ""


def unpacked(folder: Path) -> Path:
    """Unpack Orthanc, and the libraries that this machine lacks for it, into a folder."""
    simulated = ["apt-get", "install", "--simulate", "--no-install-recommends", *PACKAGES]
    text = subprocess.run(simulated, capture_output=True, text=True, check=True, timeout=120).stdout
    names = {line.split()[1] for line in text.splitlines() if line.startswith("Inst ")} | set(PACKAGES)
    folder.mkdir(parents=True)
    subprocess.run(["apt-get", "download", *sorted(names)], cwd=folder, capture_output=True, check=True, timeout=300)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "root"], cwd=folder, check=True, timeout=120)
    return folder / "root"


class Orthanc:
    """One Orthanc, which can be killed and started again with what it has stored."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder, self.port = root, folder, free_port()
        user, _, password = USER.partition(":")
        settings = {
            "StorageDirectory": str(folder / "db"),
            "IndexDirectory": str(folder / "db"),
            "HttpPort": self.port,
            "DicomServerEnabled": False,
            "RemoteAccessAllowed": False,
            "AuthenticationEnabled": True,
            "RegisteredUsers": {user: password},
            "Plugins": [str(root / "usr/share/orthanc/plugins/libOrthancDicomWeb.so")],
            "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
        }
        folder.mkdir(parents=True)
        (folder / "orthanc.json").write_text(json.dumps(settings))
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/dicom-web"

    def start(self) -> None:
        libraries = [str(path.parent) for path in self._root.glob("usr/lib/*/libcivetweb.so*")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._root / "usr/sbin/Orthanc", self._folder / "orthanc.json"],
                env={**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)},
                stdout=log,
                stderr=log,
            )
        until(self._answers, (self._folder / "log").read_text()[-2000:], seconds=60, every=0.1)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with suppress(OSError):
            self._asked("/system")
            return True
        return False

    def store(self, data: bytes) -> bool:
        """Store an object; False if it is refused."""
        try:
            self._asked("/instances", data)
        except urllib.error.HTTPError:
            return False
        return True

    def _asked(self, path: str, data: bytes | None = None) -> bytes:
        headers = {"Authorization": f"Basic {b64encode(USER.encode()).decode()}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())


@contextmanager
def orthanc(folder: Path) -> Iterator[Orthanc]:
    made = Orthanc(unpacked(folder / "packages"), folder / "orthanc")
    try:
        yield made
    finally:
        made.kill()
