"""The file under a ledger: what its connections wait for."""

from __future__ import annotations

from pathlib import Path

from privacy.ledger import key as ledger_key
from privacy.ledger.event_chain import EventChain
from privacy.ledger.ledger import Ledger

_EXTRA = 3
"""SQLite's number of the mode that also waits for the folder, so that a journal that is gone stays gone."""


def test_every_connection_of_a_ledger_waits_for_the_disk_and_its_folder(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.db")
    chain = EventChain(tmp_path / "ledger.db", ledger_key.key_path(tmp_path / "ledger.db"), lambda *_: "")
    for opened in (chain.reading, chain.transaction):
        with opened() as db:
            assert db.execute("PRAGMA synchronous").fetchone() == (_EXTRA,)
