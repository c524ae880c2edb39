"""What an audit log holds, and what somebody who can write its file does to it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from service_core.audit_log.lines import LogEntry
from service_core.audit_log.log import LOG_FILE, AuditLog
from service_core.audit_log.verification import VerificationResult, verify


def entries(home: Path) -> list[LogEntry]:
    with closing(AuditLog.existing((home / LOG_FILE).parent)) as log:
        return [line.entry for line in log.lines()]


def texts(home: Path) -> list[str]:
    with closing(AuditLog.existing((home / LOG_FILE).parent)) as log:
        return [text for _, text in log.texts()]


def verified(home: Path, *heads: object, **options: object) -> VerificationResult:
    with closing(AuditLog.existing((home / LOG_FILE).parent)) as log:
        return verify(log, heads, **options)


def tampered(home: Path, *script: str) -> None:
    """Change a log as an intruder does who knows SQLite, without its triggers."""
    with closing(sqlite3.connect(home / LOG_FILE, isolation_level=None)) as db:
        for statement in ("DROP TRIGGER IF EXISTS event_noupd", "DROP TRIGGER IF EXISTS event_nodel", *script):
            db.execute(statement)
