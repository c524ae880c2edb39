"""Load the hospital's data, identify their version, and detect changes during a run.

A run keeps the data that it began with. A record is broken if its source lists it and its file cannot be read or
decoded. A record that breaks during a run does not change the version: the run continues without it for good, even if
the file is repaired. Any other difference changes the data (E-DATA-10): records that were added, removed, relabelled or
moved to the other split, or that have another image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from fl_core import datasets
from fl_core.datasets import DataRequest, ImageLoader, SiloDataset
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import open_image
from fl_core.datasets.examples import fingerprint_of
from fl_core.datasets.references import FILES
from fl_core.extensions import loading
from fl_core.types.clinical import CLINICAL
from privacy.accounting.record_config import round_to_two_digits
from privacy.mechanisms.record.class_sums import PrivacyUnits
from protos.consilium.v1 import federation_pb2 as pb
from service_core.storage.digests import file_digest
from silo.storage.run_data import FileRecord, RunData


class DataSource:
    """The hospital's data, loaded with each run's label space, image size and window.

    nominal_size: as typed by the operator; None to count   loader: of image files   holds: the classes that the
    operator declares.
    """

    def __init__(
        self,
        reference: str,
        data_root: Path | None = None,
        nominal_size: float | None = None,
        loader: ImageLoader | None = None,
        holds: tuple[str, ...] = (),
    ) -> None:
        self.reference = datasets.parse(loading.load_of_reference(reference))  # the hospital's own label dictionary
        self._data_root = data_root
        self._nominal_size = nominal_size
        self.typed = nominal_size is not None
        self._holds, self._published = holds, tuple[str, ...]()
        self._loader = loader
        self._last: tuple[DataRequest, SiloDataset] | None = None
        self._contents, self._version = FileContents(), ""
        self._as_registered: Callable[[SiloDataset], SiloDataset] = lambda dataset: dataset

    def follow_ledger(self, as_registered: Callable[[SiloDataset], SiloDataset]) -> None:
        """Identify data with `as_registered`, since the ledger may use an earlier version's rule for fingerprints."""
        self._as_registered = as_registered
        if self._last is not None:
            self._last, self._version = (self._last[0], as_registered(self._last[1])), ""

    def load(self, request: DataRequest = datasets.ANY) -> SiloDataset:
        """Load data, or return the last result for the same request; raises as `fl_core.datasets.load`."""
        if self._last is None or self._last[0] != request:
            loaded = datasets.load(str(self.reference), request, data_root=self._data_root, loader=self._loader)
            self._last, self._version = (request, self._as_registered(loaded)), ""
            if request.classes is None:
                self._published = loaded.schema.classes
        return self._last[1]

    @property
    def declared_classes(self) -> tuple[str, ...]:
        """Return the classes that the operator declares, otherwise those of a published data set or table.

        Empty for folders and manifests without a declaration: only their records show the classes.
        """
        if self._holds or self.reference.source in ("folder", "manifest"):
            return self._holds
        if not self._published:
            self.load()
        return self._published

    def version(self) -> str:
        """Return the version of the last loaded data: their fingerprint, and for files a digest of the contents.

        A file that cannot be read counts as empty.
        """
        assert self._last is not None
        if not self._version:
            self._version = self._version_of(self._last[1].fingerprint, self._last[1])
        return self._version

    def _version_of(self, fingerprint: str, loaded: SiloDataset) -> str:
        paths = _paths(loaded)
        return _version(fingerprint, self._contents.digests(paths)) if paths else fingerprint

    def run_data(self) -> RunData:
        """Describe the last loaded data, for a run that begins with them."""
        version = self.version()
        assert self._last is not None
        loaded = self._last[1]
        digests = self._contents.digests(_paths(loaded))
        files = {
            record.name: FileRecord(record.size, digest) for record, digest in zip(loaded.records, digests, strict=True)
        }
        return RunData(version, files)

    def as_begun(self, began: RunData | None) -> tuple[SiloDataset, str]:
        """Return the last loaded data and their version, as a run that began with `began` sees them.

        Records that broke since then keep their entries, so that the version and the ledger's identification of the
        data stay. With any other difference, returns the present version, which differs from the run's.
        """
        version = self.version()
        assert self._last is not None
        request, loaded = self._last
        if began is None or began.version == version:
            return loaded, version
        paths, records, digests = _paths(loaded), list(loaded.records), list[str]()
        for k, (path, digest) in enumerate(zip(paths, self._contents.digests(paths), strict=True)):
            then = began.files.get(records[k].name) if records else None
            if then is None:
                return loaded, version
            if digest != then.digest and records[k].name not in began.broken and _opens(path, request):
                return loaded, version
            records[k] = records[k]._replace(size=then.size)
            digests.append(then.digest)
        fingerprint = fingerprint_of(records)
        if not records or _version(fingerprint, digests) != began.version:
            return loaded, version
        return replace(loaded, fingerprint=fingerprint, records=tuple(records)), began.version

    def refresh(self) -> bool:
        """Forget loaded data whose files have changed; return whether they have."""
        if self._last is None or not hasattr(self._last[1].train, "paths"):
            return False  # data in memory cannot change
        request, loaded = self._last
        now = datasets.check(str(self.reference), request, data_root=self._data_root)
        if now.fingerprint == loaded.fingerprint and self.version() == self._version_of(now.fingerprint, loaded):
            return False
        self._last, self._version, self._published = None, "", ()
        if self._loader is not None:
            self._loader.forget()
        return True

    def cache_text(self) -> str:
        """Describe the cache of decoded images: its place and size limit; empty if the data are no image files."""
        if self._loader is None or not hasattr(self.load().train, "paths"):
            return ""
        if self._loader.cache_bytes == 0:
            return "decoded images are not cached (--image-cache 0)"
        return (
            f"decoded images are cached in {self._loader.folder}, at most {self._loader.cache_bytes / 2**30:g} GiB, "
            "in an unnamed file that is deleted when the service ends (--image-cache 0 keeps none)"
        )

    @property
    def examples(self) -> tuple[float, float]:
        """Return the numbers of training and test examples, rounded up to two digits; 0 if the size was typed."""
        if self.typed:
            return 0.0, 0.0
        loaded = self.load()
        return float(round_to_two_digits(len(loaded.train))), float(round_to_two_digits(len(loaded.test)))

    @property
    def nominal_size(self) -> float:
        """Return the number of training units: as typed, otherwise the true one rounded up to two digits."""
        if self._nominal_size is None:
            self._nominal_size = float(round_to_two_digits(len(PrivacyUnits.of(self.load().train))))
        return self._nominal_size


def data_offer(source: DataSource) -> pb.DataOffer:
    """Describe the data to the coordinator: their source, label dictionary, classes and rounded sizes.

    Folders, manifests and tables name no classes here, since their records show them; the service adds the classes that
    the operator declares.
    """
    kind, schema = source.reference.source, source.load().schema
    shape = schema.shape if kind == "digits" else ()
    classes = () if kind in FILES else schema.classes
    train, test = source.examples
    return pb.DataOffer(
        name=kind,
        shape=shape,
        classes=classes,
        nominal_size=source.nominal_size,
        train_examples=train,
        test_examples=test,
        metrics=[CLINICAL],
        masks=True,
        labels_digest=source.load().dictionary.digest,
        coarse_labels=source.load().dictionary.is_coarse(),
    )


def _paths(loaded: SiloDataset) -> list[Path]:
    return [path for split in (loaded.train, loaded.test) for path in getattr(split, "paths", ())]


def _version(fingerprint: str, digests: Sequence[str]) -> str:
    return f"{fingerprint}:{blake3(''.join(digests).encode()).hexdigest()}"


def _opens(path: Path, request: DataRequest) -> bool:
    try:
        open_image(path, request.grey_values)
    except UnreadableError:
        return False
    return True


@dataclass(slots=True)
class BrokenRecords:
    """The names of the records that one run excludes at this hospital, since it could not read them.

    keep: stores new names; called before an update without these records leaves.
    """

    names: set[str]
    keep: Callable[[Sequence[str]], None] = lambda _: None

    def add(self, names: Collection[str]) -> None:
        if new := sorted(set(names) - self.names):
            self.keep(new)
            self.names.update(new)


_SETTLED_NS = 2_000_000_000
"""A file that is read sooner than this after its last change (ns) may change again and keep its ctime."""


UNREAD = "-"
"""Stands for the digest of a file that cannot be read."""


class _Status(NamedTuple):
    """The file system's status of a file. Any change shows, since programs cannot set ctime."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> _Status:
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


class _Known(NamedTuple):
    status: _Status
    digest: str
    settled: bool


class FileContents:
    """Digests of many files. A file is read again only if its status has changed. Not for several threads at once.

    Guarantees: edited, replaced or exchanged files are noticed, even if size and date are restored (`cp -p`, `rsync
    -t`); a file that was only touched counts as unchanged. Changes are missed only if the machine's clock is set back,
    or the disk is written below the file system.
    """

    def __init__(self) -> None:
        self._known: dict[Path, _Known] = {}

    def digests(self, paths: Iterable[Path]) -> list[str]:
        """Return the files' digests in order; UNREAD for one that cannot be read."""
        files = {path: self._file(path) for path in paths}
        self._known = {path: contents for path, contents in files.items() if contents is not None}
        return [UNREAD if contents is None else contents.digest for contents in files.values()]

    def _file(self, path: Path) -> _Known | None:
        try:
            status, earlier = _Status.of(path), self._known.get(path)
            if earlier is not None and earlier.settled and earlier.status == status:
                return earlier
            settled = time.time_ns() - status.changed_ns > _SETTLED_NS
            return _Known(status, file_digest(path), settled)
        except OSError:
            return None
