"""Cache PACS images in the hospital's home, and pin one image list per run.

Each selection has a folder with `UID.dcm` files named by object UID, image lists in the `manifest:` format, and an
index of fetched images. For `folder:` data with labels from a table or query, it holds only the lists.
A worker reads a list like any other list of image files, so a run on a PACS equals a run on its export.
A run keeps the list that it started with; later images are in the lists of later runs.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from fl_core.csv_reader import half_of
from fl_core.errors import ConfigError, DataError, UnavailableError
from fl_core.label_table import KEYS, PATIENT, LabelRow, LabelTable
from service_core.console import pluralize, printable
from service_core.storage.digests import Hasher, file_digest
from service_core.storage.disk import available, disk_error, disk_errors
from service_core.storage.private_files import private_folder, sync_path, write_private
from silo.cancellation import CancelToken
from silo.events import EmitEvent, event
from silo.pacs.dicomweb import BusyError, Facts, Instance, LeftOutError, PacsClient, is_uid
from silo.pacs.label_query import read_labels
from silo.pacs.reference import DICTIONARY, FOLDER, FolderReference, PacsReference, parse
from silo.storage.home import Home
from silo.worker.inspection import inspected, listed_images

T = TypeVar("T")
Progress = Callable[[int, int], None]
AGAIN_S, AGAIN_CAP_S, FRESH_S = 2.0, 60.0, 600.0
"""Seconds: first and longest pause between retries, and how long a list counts as fresh for new runs."""
TRIES = 3
"""Attempts for an object or study that fails while the PACS answers other requests; then it is left out."""
_AT_ONCE = 500
_SCHEMA = """
CREATE TABLE IF NOT EXISTS images (
    name TEXT PRIMARY KEY, study TEXT, series TEXT, label TEXT, patient TEXT, split TEXT, listed INTEGER,
    digest TEXT NOT NULL DEFAULT '', bytes INTEGER NOT NULL DEFAULT 0, reason TEXT);
CREATE TABLE IF NOT EXISTS left_out (name TEXT, kind TEXT, reason TEXT);
CREATE TABLE IF NOT EXISTS members (list TEXT, name TEXT, PRIMARY KEY (list, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lists (list TEXT PRIMARY KEY, made INTEGER);
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, list TEXT);
CREATE TABLE IF NOT EXISTS label_sources (list TEXT PRIMARY KEY, source TEXT);
"""
"""images.reason: why an image cannot be read, '' if it can, NULL if not tried yet   listed, made: number of the last
refresh that had it, not a time, because clocks may be set back."""


class Listed(NamedTuple):
    """Result of a refresh.

    left_out: counts by kind   file: lists each omitted item with its reason   labels: their source, as in `LabelTable`
    in_folder: the images are in a folder of the hospital; `studies` then counts its images.
    """

    studies: int
    images: int
    fetched: int
    left_out: Mapping[str, int]
    unlabelled: int
    unmet: int
    nameless: int
    file: Path
    labels: str = ""
    in_folder: bool = False

    def sentence(self) -> str:
        parts = [f"{pluralize(self.images, 'image')} of {self.studies} studies listed, {self.fetched} newly fetched"]
        if self.in_folder:
            parts = [f"{pluralize(self.images, 'image')} of {self.studies} in the folder listed"]
        if self.left_out:
            counts = ", ".join(f"{n} {kind}" for kind, n in sorted(self.left_out.items()))
            parts.append(f"left out: {counts} (named in {self.file})")
        if self.unlabelled:
            parts.append(f"without a label, and not {'listed' if self.in_folder else 'fetched'}: {self.unlabelled}")
        if self.unmet:
            parts.append(f"labels without an image: {self.unmet}")
        if self.labels:
            parts.append(f"labels by {self.labels}")
        if self.nameless:
            unit = "key" if self.in_folder else "study"
            parts.append(f"images without PatientID, whose {unit} counts as a patient: {self.nameless}")
        return "; ".join(parts)


@dataclass(slots=True)
class Mirror:
    """The cached images of one selection. Only one process may use it at a time.

    emit: receives an event per refresh, and while the PACS is unavailable   caged: whether to decode only in a sandbox
    patient: retry while the PACS is unavailable; otherwise raise UnavailableError (E-DATA-21).
    """

    home: Home
    reference: PacsReference | FolderReference
    emit: EmitEvent = lambda _: None
    caged: Callable[[], bool] = lambda: True
    patient: bool = True
    _looked: float = field(default=-FRESH_S, init=False)

    @classmethod
    def of(cls, home: Home, data: str, **more: object) -> Mirror | None:
        """Return the mirror of a reference, None for data that are read in place; raises as `reference.parse`."""
        reference = parse(data)
        return None if reference is None else cls(home, reference, **more)  # type: ignore[arg-type]

    @property
    def source(self) -> PacsReference | None:
        """The PACS, if the images are in one."""
        return self.reference if isinstance(self.reference, PacsReference) else None

    @property
    def folder(self) -> Path:
        return self.home.pacs / self.reference.key

    def data(self, run_id: str = "") -> str:
        """Return the reference to a run's list, or else to the newest; raises DataError (E-DATA-02) without one."""
        if (name := self._list_of(run_id) or self._list_of("")) is None:
            raise DataError(
                "E-DATA-02",
                f"there is no list of the images of {self.reference.public} in {self.folder}: run silo data fetch "
                "or silo serve",
            )
        return f"manifest:{self.folder / name}"

    @property
    def listed(self) -> bool:
        return self._list_of("") is not None

    @property
    def label_source(self) -> str:
        """Source of the newest list's labels, as in `LabelTable`; empty if there is no list."""
        if (name := self._list_of("")) is None:
            return ""
        with closing(self._open()) as db:
            row = db.execute("SELECT source FROM label_sources WHERE list = ?", (name,)).fetchone()
        return "" if row is None else str(row[0])

    def _list_of(self, run_id: str) -> str | None:
        if not (self.folder / "index.db").exists():
            return None
        with closing(self._open()) as db:
            query = "SELECT list FROM lists ORDER BY made DESC" if not run_id else "SELECT list FROM runs WHERE run = ?"
            row = db.execute(query, (run_id,) if run_id else ()).fetchone()
        return row[0] if row is not None and (self.folder / row[0]).exists() else None

    def prepare(
        self, run_id: str, stop: CancelToken, progress: Progress, under_way: Callable[[str], bool] = lambda _: True
    ) -> None:
        """Fetch all missing images of a run. A new run gets the newest list. under_way: whether a run keeps its list.

        Without a run, at startup: prepare the newest list, and make one if there is none. Only making it waits for an
        unavailable PACS: missing images of an existing list are fetched now, or when a run needs them.
        """
        if self._list_of(run_id) is None:
            if not self.listed or time.monotonic() - self._looked > FRESH_S:
                self.refresh(stop, progress, under_way)
            if run_id:
                with closing(self._open()) as db, db:
                    newest = "SELECT ?, list FROM lists ORDER BY made DESC LIMIT 1"
                    db.execute(f"INSERT OR REPLACE INTO runs {newest}", (run_id,))
        try:
            self._fetch_lost(run_id, stop, progress)
        except UnavailableError as error:
            if run_id or error.code != "E-DATA-21":
                raise
            self.emit(
                event("pacs", f"images are missing here, and will be fetched when a run needs them: {error.message}")
            )

    def _fetch_lost(self, run_id: str, stop: CancelToken, progress: Progress) -> None:
        if self.source is None:
            return
        here = {file.name for file in self.folder.iterdir()}
        with closing(self._open()) as db:
            query = "SELECT i.name, study, series, digest FROM members JOIN images i USING (name) WHERE list = ?"
            if lost := [row for row in db.execute(query, (self._list_of(run_id),)) if row[0] not in here]:
                progress(0, len(lost))
                with closing(self._client(stop, patient=bool(run_id))) as pacs:
                    for name, study, series, digest in lost:
                        with suppress(LeftOutError):  # the run omits a record without a file
                            self._retrieve(pacs, name, (study, series), digest)

    def refresh(
        self, stop: CancelToken, progress: Progress, under_way: Callable[[str], bool] = lambda _: True
    ) -> Listed:
        """List the PACS, fetch and decode new images, and write the list.

        Raises DataError (E-DATA-02) if the list would be empty, and as `PacsClient`, `read_labels`, `inspected`.
        """
        progress(0, 0)
        private_folder(self.folder)
        file, column = self.reference.table
        read = partial(read_labels, file, column, stop, self.reference.keys)
        labels = self._patiently(read, stop, "the database of labels")
        with closing(self._open()) as db:
            look = _Look(self, db, labels, stop, progress)
            if self.source is None:
                look.search_folder()
            else:
                with closing(self._client(stop)) as pacs:
                    look.search(pacs, self.source)
                    self._forget(db, under_way)
                    look.fetch(pacs, self.source)
                look.inspect()
            listed = look.write_list()
            self._forget(db, under_way)
        self._looked = time.monotonic()
        self.emit(event("pacs", f"{self.reference.public}: {listed.sentence()}", facts={"images": listed.images}))
        return listed

    # ---- files -----------------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        path = self.folder / "index.db"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path)
        db.executescript(_SCHEMA)
        return db

    def _retrieve(self, pacs: PacsClient, name: str, of: tuple[str, str], digest: str = "") -> tuple[str, int]:
        """Fetch an object into its file; return its digest and size. digest: the expected digest, empty for any."""
        part, answer = self.folder / f".{name}.part", self.folder / ".answer.part"

        @contextmanager
        def open_files() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
            with _private(answer) as aside, _private(part) as into:
                yield aside, into

        try:
            with disk_errors(self.folder):
                pacs.retrieve((*of, Path(name).stem), open_files)
                made, size = file_digest(part), part.stat().st_size
                if digest and made != digest:
                    raise LeftOutError("the PACS has another object under this number than when the run began")
                _into_place(part, self.folder / name)
        finally:
            for path in (answer, part):
                path.unlink(missing_ok=True)
        return made, size

    def _client(self, stop: CancelToken, patient: bool = True) -> PacsClient:
        assert self.source is not None
        return PacsClient(
            self.source,
            stop,
            lambda ask, otherwise=None: self._patiently(ask, stop, "the PACS", otherwise, patient),
        )

    def _patiently(
        self,
        ask: Callable[[], T],
        stop: CancelToken,
        whom: str,
        otherwise: Callable[[], bool] | None = None,
        patient: bool = True,
    ) -> T:
        """Call `ask` until it succeeds, and emit an event while waiting.

        otherwise: returns whether other requests succeed. If so, `ask` is tried TRIES times and then raises
        LeftOutError. patient: if False, here or in this mirror, wait only for a busy PACS.
        """
        pause, waits, tried = AGAIN_S, "", 0
        try:
            while True:
                try:
                    return ask()
                except UnavailableError as error:
                    if error.code != "E-DATA-21":
                        raise
                    if isinstance(error, BusyError):
                        pass
                    elif otherwise is not None and otherwise():
                        tried += 1
                        if tried == TRIES:
                            raise LeftOutError(f"asked {TRIES} times: {error.message}") from None
                    elif not (patient and self.patient):
                        raise
                    if not waits and not tried:
                        waits = f"waits for {whom}: {error.message}"
                        self.emit(event("queue", f"a run {waits}", facts={"waits": waits, "code": error.code}))
                stop.wait(pause)
                stop.raise_if_cancelled()
                pause = min(2 * pause, AGAIN_CAP_S)
        finally:
            if waits:
                self.emit(event("queue", f"{whom} is no longer waited for", facts={"waits": ""}))

    def _forget(self, db: sqlite3.Connection, under_way: Callable[[str], bool]) -> None:
        """Remove the lists of finished runs, and the images in no remaining list."""
        with db:
            over = [(run,) for (run,) in db.execute("SELECT run FROM runs") if not under_way(run)]
            db.executemany("DELETE FROM runs WHERE run = ?", over)
            kept = "SELECT list FROM runs UNION SELECT * FROM (SELECT list FROM lists ORDER BY made DESC LIMIT 1)"
            old = [name for (name,) in db.execute(f"SELECT list FROM lists WHERE list NOT IN ({kept})")]  # noqa: S608
            for table in ("members", "lists", "label_sources"):
                db.executemany(f"DELETE FROM {table} WHERE list = ?", [(name,) for name in old])  # noqa: S608
            newest = "SELECT max(listed) FROM images"
            unused = f"listed < ({newest}) AND name NOT IN (SELECT name FROM members)"  # noqa: S608 - constant
            names = [name for (name,) in db.execute(f"SELECT name FROM images WHERE {unused}")]  # noqa: S608
            db.execute(f"DELETE FROM images WHERE {unused}")  # noqa: S608 - constant
        for name in (*old, *(Path(name).with_suffix(".toml").name for name in old), *(names if self.source else ())):
            (self.folder / name).unlink(missing_ok=True)


class _Look:
    """One refresh, step by step. Stores what it lists in the index, not in memory."""

    def __init__(
        self, mirror: Mirror, db: sqlite3.Connection, labels: LabelTable, stop: CancelToken, progress: Progress
    ) -> None:
        self._mirror, self._db, self._labels, self._stop, self._progress = mirror, db, labels, stop, progress
        self._studies = self._unlabelled = self._nameless = self._fetched = 0
        earlier = "SELECT max(listed) FROM (SELECT listed FROM images UNION SELECT made FROM lists)"
        self._look = (db.execute(earlier).fetchone()[0] or 0) + 1
        with db:
            db.execute("DELETE FROM left_out")

    def search_folder(self) -> None:
        """List the labelled images of a folder. The table's most specific name for an image decides its label."""
        folder = Path(self._mirror.reference.public.removeprefix(FOLDER))
        if not folder.is_dir():
            raise DataError("E-DATA-02", f"there is no folder of images at {folder}: check the path")
        names = dict(listed_images(folder, self._mirror.caged(), self._stop))
        times = Counter(word for name in names for word in {Path(name).name, Path(name).stem})
        with self._db:
            for name, reason in names.items():
                if reason:
                    self._leave_out(name, "files that cannot be read", reason)
                elif not name.isprintable():
                    self._leave_out(printable(name), "files whose name is not valid text", "rename it")
                else:
                    self._studies += 1
                    self._add_file(name, times)

    def _add_file(self, name: str, times: Mapping[str, int]) -> None:
        path = Path(name)
        words = (path.as_posix(), path.name, path.stem, *(parent.name for parent in path.parents))
        answers = ((word, self._labels.find({self._labels.key: word})) for word in words)
        word, row = next(((word, row) for word, row in answers if row is not None), ("", None))
        if row is None:
            self._unlabelled += 1
        elif word in (path.name, path.stem) and word != path.as_posix() and times[word] > 1:
            self._leave_out(
                name, "images with the same name as another", f"write its path in place of {word} into the table"
            )
        else:
            self._nameless += not row.patient
            patient = row.patient or word
            self._insert((name, "", "", row.label, patient, row.split or half_of(patient).value, self._look))
            self._db.execute("UPDATE images SET digest = '-', reason = '' WHERE name = ?", (name,))

    def search(self, pacs: PacsClient, source: PacsReference) -> None:
        seen = set[str]()
        for accession in source.accession_numbers() or [""]:
            for study in pacs.studies(accession):
                uid = study["StudyInstanceUID"]
                if uid in seen:
                    continue
                seen.add(uid)
                self._studies += 1
                if self._labels.key != KEYS[0] and self._labels.find(study) is None:
                    self._unlabelled += 1
                    continue
                with self._db:
                    try:
                        self._add_study(pacs, study)
                    except LeftOutError as error:
                        self._leave_out(uid, "studies that the PACS lists but does not send", str(error))

    def _add_study(self, pacs: PacsClient, study: Facts) -> None:
        number = without = 0
        for series in pacs.series(study["StudyInstanceUID"]):
            if (row := self._labels.find({**study, **series})) is None:
                without += 1
                continue
            try:
                for instance in pacs.instances(study, series):
                    number += 1
                    self._add(instance, row)
            except LeftOutError as error:
                self._leave_out(series["SeriesInstanceUID"], "series that the PACS lists but does not send", str(error))
        self._unlabelled += without
        if not number and not without:
            self._leave_out(study["StudyInstanceUID"], "studies without an image", "no object in the requested series")

    def _add(self, instance: Instance, row: LabelRow) -> None:
        if not is_uid(instance.uid):
            self._leave_out(instance.uid, "objects without a valid number", f"in series {instance.series}")
            return
        name = f"{instance.uid}.dcm"
        patient = row.patient or instance.facts[PATIENT]
        self._nameless += not patient
        patient = patient or f"study:{instance.study}"
        split = row.split or half_of(patient).value
        earlier = self._db.execute("SELECT listed FROM images WHERE name = ?", (name,)).fetchone()
        if earlier is not None and earlier[0] == self._look:
            self._leave_out(instance.uid, "objects listed twice", f"again in series {instance.series}")
            return
        self._insert((name, instance.study, instance.series, row.label, patient, split, self._look))

    def _insert(self, values: tuple[str | int, ...]) -> None:
        updates = ", ".join(f"{c} = excluded.{c}" for c in ("study", "series", "label", "patient", "split", "listed"))
        columns = "INSERT INTO images (name, study, series, label, patient, split, listed) VALUES (?, ?, ?, ?, ?, ?, ?)"
        self._db.execute(f"{columns} ON CONFLICT (name) DO UPDATE SET {updates}", values)

    def _leave_out(self, name: str, kind: str, reason: str) -> None:
        self._db.execute("INSERT INTO left_out VALUES (?, ?, ?)", (name, kind, reason))

    def _listed(self, columns: str, where: str = "1") -> Iterator[tuple[str, ...]]:
        """Yield this refresh's rows in order of name. Callers may write rows meanwhile."""
        last = ""
        while True:
            query = (
                f"SELECT name, {columns} FROM images WHERE listed = ? AND name > ? AND {where} ORDER BY name LIMIT ?"  # noqa: S608
            )
            if not (rows := self._db.execute(query, (self._look, last, _AT_ONCE)).fetchall()):
                return
            yield from rows
            last = rows[-1][0]

    def fetch(self, pacs: PacsClient, source: PacsReference) -> None:
        folder, most = self._mirror.folder, int(source.cache * 2**30)
        total = self._db.execute("SELECT count(*) FROM images WHERE listed = ?", (self._look,)).fetchone()[0]
        first = self._mirror._looked < 0  # retry unreadable files: a decoder may be installed now
        here = {file.name for file in folder.iterdir()}  # one listing instead of a stat per file
        kept = "SELECT coalesce(sum(bytes), 0) FROM images WHERE coalesce(reason, '') = ''"
        size = self._db.execute(kept).fetchone()[0]
        for done, (name, study, series, digest, reason, before) in enumerate(
            self._listed("study, series, digest, reason, bytes")
        ):
            self._progress(done, total)
            if digest and (name in here or (reason and not first)):
                continue
            if size > most:
                raise ConfigError(
                    "E-CFG-02",
                    f"the PACS has more images than the limit of {source.cache:g} GiB: ask for fewer (modality, "
                    "date, description, accessions), or raise the limit (cache=GIB)",
                )
            if available(folder) < 0:
                raise disk_error(folder, full=True, cause="")
            with self._db:
                try:
                    made, bytes_ = self._mirror._retrieve(pacs, name, (study, series))
                except LeftOutError as error:
                    self._leave_out(Path(name).stem, "objects that the PACS lists but does not send", str(error))
                    self._db.execute("UPDATE images SET digest = '' WHERE name = ?", (name,))
                    continue
                change = "UPDATE images SET digest = ?, bytes = ?, reason = NULL WHERE name = ?"
                self._db.execute(change, (made, bytes_, name))
            size += bytes_ - int(before)
            self._fetched += 1

    def inspect(self) -> None:
        names = (name for name, _ in self._listed("digest", "digest <> '' AND reason IS NULL"))
        for done, (name, reason) in enumerate(inspected(self._mirror.folder, names, self._mirror.caged(), self._stop)):
            self._progress(done, max(self._fetched, done))
            with self._db:
                self._db.execute("UPDATE images SET reason = ? WHERE name = ?", (reason, name))
            if reason:
                (self._mirror.folder / name).unlink(missing_ok=True)
        with self._db:
            for name, reason in self._listed("reason", "reason <> ''"):
                self._leave_out(Path(name).stem, "objects that cannot be read", reason)

    def write_list(self) -> Listed:
        folder, hasher, images = self._mirror.folder, Hasher(), 0
        beside = self._mirror.reference.table[0].parent / DICTIONARY
        if beside.is_file():
            write_private(folder / DICTIONARY, beside.read_bytes())
        else:
            (folder / DICTIONARY).unlink(missing_ok=True)
        part = folder / ".list.part"
        with disk_errors(folder), _private(part) as file:
            hasher.update(_line(file, ("path", "label", "group", "split", "digest")))
            for row in self._listed("label, patient, split, digest", "digest <> '' AND reason = ''"):
                hasher.update(_line(file, row))
                images += 1
        kinds = dict(self._db.execute("SELECT kind, count(*) FROM left_out GROUP BY kind"))
        left = folder / "left-out.csv"
        with disk_errors(folder), _private(left) as file:
            _line(file, ("name", "kind", "reason"))
            for row in self._db.execute("SELECT * FROM left_out ORDER BY kind, name"):
                _line(file, row)
        unmet = len(set(self._labels.rows) - self._labels.met)
        counts = self._studies, images, self._fetched, kinds, self._unlabelled, unmet, self._nameless
        listed = Listed(*counts, left, self._labels.source, self._mirror.source is None)
        if not images:
            part.unlink()
            raise DataError("E-DATA-02", f"there are no images in {self._mirror.reference.public}: {listed.sentence()}")
        name = f"images-{hasher.hexdigest()[:16]}.csv"
        if self._mirror.source is None:
            where = json.dumps(self._mirror.reference.public.removeprefix(FOLDER), ensure_ascii=False)
            text = f'folder = {where}\nlabel = "label"\ngroup = "group"\nsplit = "split"\n'
            write_private((folder / name).with_suffix(".toml"), text.encode())
        _into_place(part, folder / name)
        with self._db:
            self._db.execute("INSERT OR REPLACE INTO lists VALUES (?, ?)", (name, self._look))
            self._db.execute("INSERT OR REPLACE INTO label_sources VALUES (?, ?)", (name, self._labels.source))
            chosen = "SELECT ?, name FROM images WHERE listed = ? AND digest <> '' AND reason = ''"
            self._db.execute(f"INSERT OR IGNORE INTO members {chosen}", (name, self._look))
        return listed


def _private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb+")


def _into_place(part: Path, place: Path) -> None:
    """Move a complete file to its name. Guarantees: after a power cut the name holds the old or the new file."""
    sync_path(part)
    part.replace(place)
    sync_path(place.parent)


def _line(file: IO[bytes], row: tuple[object, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerow(row)
    file.write(data := text.getvalue().encode())
    return data


def forget(home: Home, but: Mirror | None) -> None:
    """Remove the images of every selection except `but`. Folders with other names stay."""
    for folder in home.pacs.glob("*"):
        if re.fullmatch("[0-9a-f]{12}", folder.name) and folder.is_dir() and (but is None or folder != but.folder):
            shutil.rmtree(folder)


def resolved(home: Home, data: str) -> str:
    """Return the reference to read these data with; for a PACS, its newest list in the home. Loads extensions.

    Raises as `Mirror.of`, `Mirror.data` and `load_of_reference`.
    """
    if (mirror := Mirror.of(home, data)) is not None:
        return mirror.data()
    from fl_core.extensions import loading

    return loading.load_of_reference(data)
