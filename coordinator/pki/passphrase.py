"""The passphrase of the authority's key: from a file, from an environment variable, or typed at a terminal.

A stolen key file alone can then sign nothing. A service keeps the passphrase in memory while it runs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from getpass import getpass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_core.errors import ConfigError, StateError
from service_core.pki import certificates
from service_core.storage import private_files

MIN_BYTES = 12


@dataclass(slots=True)
class PassphraseSource:
    """The source of a passphrase: a file, an environment variable, or else the terminal, which is asked once."""

    file: Path | None = None
    variable: str | None = None
    _typed: bytes = field(default=b"", repr=False)

    @property
    def named(self) -> bool:
        """Whether a file or a variable contains it."""
        return self.file is not None or self.variable is not None

    def read(self, question: str, repeat: bool = False) -> bytes:
        """Return the passphrase; raises StateError: E-STATE-47 if there is none, E-STATE-42, E-STATE-43.

        repeat: ask twice, for a new one.
        """
        if self.file is not None:
            return private_files.read_private(self.file).rstrip(b"\r\n")
        if self.variable is not None:
            return os.environ.get(self.variable, "").encode()
        if not self._typed:
            if not sys.stdin.isatty():
                raise StateError(
                    "E-STATE-47",
                    "the authority's key needs its passphrase, and there is no terminal to ask for it: give "
                    "--ca-passphrase-file FILE or --ca-passphrase-env NAME",
                )
            sys.stderr.write("")  # erases the line of `still_working`: the prompt goes to the terminal directly
            typed = getpass(f"{question}: ")
            if repeat and getpass("once more: ") != typed:
                raise ConfigError("E-CFG-02", "the two passphrases differ: nothing was changed. Try again")
            self._typed = typed.encode()
        return self._typed

    def forget(self) -> None:
        """Forget a typed passphrase, so that `read` asks again."""
        self._typed = b""


SOURCE = PassphraseSource()
"""The source for this process, which uses one authority."""


def unlock(pem: bytes, where: Path) -> ec.EllipticCurvePrivateKey:
    """Decrypt the authority's key; raises StateError (E-STATE-47) without its passphrase, otherwise as `load_key`."""
    if b"ENCRYPTED" not in pem:
        return certificates.load_key(pem, str(where))
    passphrase = SOURCE.read(f"passphrase of {where}")
    try:
        key = serialization.load_pem_private_key(pem, passphrase or None)
    except (ValueError, TypeError):
        SOURCE.forget()
        raise StateError(
            "E-STATE-47", f"this is not the passphrase of {where}: nothing was signed. Try again"
        ) from None
    return certificates.load_key(certificates.key_to_pem(key), str(where))  # type: ignore[arg-type]  # which checks it


def lock(pem: bytes, passphrase: bytes) -> bytes:
    """Encrypt a key (PKCS 8, PEM); raises ConfigError (E-CFG-02) on a passphrase that is too short."""
    if len(passphrase) < MIN_BYTES:
        raise ConfigError(
            "E-CFG-02",
            f"expected a passphrase of at least {MIN_BYTES} bytes, found {len(passphrase)}: choose a longer one",
        )
    return certificates.load_key(pem, "the authority's key").private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase),
    )
