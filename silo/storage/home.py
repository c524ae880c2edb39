"""A silo's home on disk: its files, its lock, and the coordinator's addresses.

`identity/` key, certificate, authority, pinned roster    `silo.db` the database           `objects/` files by digest
`addresses.json` of the coordinator                       `serve.lock` the running service
`instance.json` the last service                          `policy.toml` the runs that the hospital takes part in
`ledger.db` the privacy ledger: uses of records, and their budgets
`served.json` the data of the last service                `features/` features from frozen models
`pacs/` images that were fetched from a PACS
`ledger.key` the secret of the ledger's chain             `ledger.json` the paths of both, if homes share them
`validation_only` exists if this hospital evaluates models and trains none
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fl_core.errors import ConfigError, StateError
from service_core.pki.identity import Address
from service_core.storage import private_files

VARIABLE = "CONSILIUM_SILO_HOME"
OBJECTS = "objects"
FEATURES = "features"
PACS = "pacs"
SERVED = "served.json"
VALIDATION_ONLY = "validation_only"
LOCK_FILE = "serve.lock"
LEDGER, LEDGER_KEY = "CONSILIUM_SILO_LEDGER", "CONSILIUM_SILO_LEDGER_KEY"
"""Environment variables for the ledger's file and its key; they override the home's own file."""


class ProcessInstance(NamedTuple):
    """Ids of a running service and of the previous one on this home; previous: empty if there was none."""

    id: str
    previous: str


class ServeOptions(NamedTuple):
    """The options of `silo serve` that other commands need.

    data_root: of named data sets, empty for the default   cwd: working folder   launcher: of the worker.
    """

    data: str
    data_root: str = ""
    cwd: str = ""
    launcher: str = "local"


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of one silo."""

    path: Path

    @classmethod
    def at(cls, path: Path | None) -> Home:
        """Return the home at a path, or in CONSILIUM_SILO_HOME, or in ~/.consilium/silo."""
        named = os.environ.get(VARIABLE)
        default = Path(named).expanduser() if named else Path.home() / ".consilium" / "silo"
        return cls(path or default)

    def make(self) -> Home:
        """Create the folder with access for its owner only; remove other users' access to it and its databases."""
        private_files.private_home(self.path)
        return self

    @property
    def database(self) -> Path:
        return self.path / "silo.db"

    @property
    def ledger(self) -> Path:
        """The path of the privacy ledger: CONSILIUM_SILO_LEDGER, else as in ledger.json, else `ledger.db` in the home.

        A hospital in several consortia has a home for each, and one ledger for all. Raises StateError (E-BUDGET-11) if
        ledger.json cannot be read.
        """
        named = os.environ.get(LEDGER) or self._ledger_location().get("ledger")
        return Path(named).expanduser() if named else self.path / "ledger.db"

    @property
    def shares_ledger(self) -> bool:
        """Tell whether the ledger lies outside of this home, so that other homes may use it too."""
        return self.ledger.absolute().parent != self.path.absolute()

    @property
    def ledger_key(self) -> Path:
        """The path of the ledger's key: CONSILIUM_SILO_LEDGER_KEY, else as in ledger.json, else next to the ledger."""
        named = os.environ.get(LEDGER_KEY) or self._ledger_location().get("key")
        ledger = self.ledger
        return Path(named).expanduser() if named else ledger.with_name(f"{ledger.stem}.key")

    def place_ledger(self, ledger: Path, key: Path | None) -> None:
        location = {"ledger": str(ledger.expanduser().absolute())}
        if key is not None:
            location["key"] = str(key.expanduser().absolute())
        private_files.write_private(self.path / "ledger.json", json.dumps(location).encode())

    def _ledger_location(self) -> dict[str, str]:
        path = self.path / "ledger.json"
        try:
            place = json.loads(path.read_text())
            if not isinstance(place, dict) or not all(isinstance(v, str) and v for v in place.values()):
                raise TypeError("it is not a table of paths")
        except FileNotFoundError:
            if not path.is_symlink():
                return {}
            place = None
        except (OSError, ValueError, TypeError, RecursionError):
            place = None
        if place is None or not set(place) <= {"ledger", "key"}:  # a second ledger would be a second budget
            raise StateError(
                "E-BUDGET-11", f"{path} does not contain the ledger's path. Set it with: silo ledger place PATH"
            )
        return {str(k): str(v) for k, v in place.items()}

    @property
    def attested(self) -> Path:
        return self.path / "attested.json"

    @property
    def policy(self) -> Path:
        return self.path / "policy.toml"

    @property
    def had_policy(self) -> Path:
        return self.path / "policy.was_here"

    @property
    def validation_only(self) -> bool:
        """Tell whether this hospital joined only to evaluate models; no message can change that later."""
        return (self.path / VALIDATION_ONLY).exists()

    def join_for(self, validation_only: bool) -> None:
        """Store whether this hospital joined only to evaluate models; a new `silo join` may change it."""
        if validation_only:
            private_files.write_private(self.path / VALIDATION_ONLY, b"")
        else:
            private_files.remove(self.path / VALIDATION_ONLY)

    @property
    def objects(self) -> Path:
        return self.path / OBJECTS

    @property
    def features(self) -> Path:
        return self.path / FEATURES

    @property
    def pacs(self) -> Path:
        """The folder of images that were fetched from a PACS."""
        return self.path / PACS

    @property
    def worker_lock(self) -> Path:
        """The lock file of a worker on another machine."""
        return self.path / "worker.lock"

    @property
    def scratch(self) -> Path:
        """The worker's folder for temporary files, emptied when a worker starts."""
        return self.path / "scratch"

    def write_addresses(self, addresses: tuple[Address, ...]) -> None:
        private_files.write_public(self.path / "addresses.json", json.dumps([str(a) for a in addresses]).encode())

    def addresses(self) -> tuple[Address, ...]:
        """Read the coordinator's addresses; raises StateError (E-STATE-44) before `silo join`."""
        path = self.path / "addresses.json"
        try:
            addresses = tuple(Address.parse(text) for text in json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, RecursionError, ConfigError):
            addresses = ()
        if not addresses:
            raise StateError("E-STATE-44", f"the coordinator's address is missing in {path}: run `silo join TOKEN`")
        return addresses

    def note_served(self, served: ServeOptions) -> None:
        private_files.write_private(self.path / SERVED, json.dumps(served._asdict()).encode())

    def served(self) -> ServeOptions | None:
        """Return the options of the last service on this home; None before the first, or if they cannot be read."""
        try:
            served = ServeOptions(**json.loads((self.path / SERVED).read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return served if all(isinstance(value, str) for value in served) else None

    def begin_instance(self) -> ProcessInstance:
        """Create the id of the starting service, and return it with the previous id on this home.

        The coordinator lets the new service replace the previous one. Guarantees: in a copy of a home, on this machine
        or another, the previous id is empty, so the copy does not replace the original's service.
        """
        path, here = self.path / "instance.json", self.path.stat()
        place = f"{_machine()} {here.st_dev} {here.st_ino}"
        try:
            last = json.loads(path.read_text())
            previous = str(last["id"]) if last["place"] == place else ""
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            previous = ""  # no service ran here before
        now = ProcessInstance(secrets.token_hex(16), previous)
        private_files.write_public(path, json.dumps({"id": now.id, "place": place}).encode())
        return now

    def locked(self) -> private_files.FolderLock:
        """Lock this home against other services; raises StateError (E-STATE-20) if one is running."""
        return private_files.FolderLock(self.path, LOCK_FILE, "another `silo serve`")

    def is_locked(self) -> bool:
        """Tell whether a service, or a command that must run alone, has locked this home."""
        return private_files.FolderLock.is_held(self.path, LOCK_FILE)


def _machine() -> str:
    """Return the operating system's id of this machine; empty without one, as in a container."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""
