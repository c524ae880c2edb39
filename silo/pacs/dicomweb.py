"""DICOMweb client for a PACS (PS3.18: QIDO-RS, WADO-RS). Every response is limited in bytes, results and seconds.

Objects are stored as the bytes that the PACS sent, never parsed. A DICOMweb library would parse each object in this
process, without limits, and would write different bytes.
"""

from __future__ import annotations

import json
import mmap
import re
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from fl_core.errors import ConfigError, UnavailableError
from service_core.console import printable
from service_core.storage.private_files import read_private
from silo.cancellation import CancelToken
from silo.pacs.reference import PacsReference

SILENCE_S, RESPONSE_S, LISTING_S = 60.0, 900.0, 6 * 3600.0
"""Timeouts: silence on the connection, one response, and the PACS's total response time for a whole list."""
OBJECT_BYTES, PAGE_BYTES, HEAD_BYTES = 512 << 20, 32 << 20, 64 << 10
MAX_RESULTS = 1_000_000
PAGE, FEWEST = 500, 100
"""Requested page size. A page of fewer than FEWEST results is the last, unless it has a Warning header."""
_BLOCK = 1 << 16
_UID = re.compile(r"[0-9][0-9.]{0,63}")
_BUSY, _AWAY = (408, 429), (502, 503, 504)
_OBJECT = 'multipart/related; type="application/dicom"; transfer-syntax=*'
_STUDY, _SERIES, _INSTANCE = "0020000D", "0020000E", "00080018"
_OF_STUDY = {"AccessionNumber": "00080050", "PatientID": "00100020", "StudyDate": "00080020"}
_OF_STUDY |= {"StudyDescription": "00081030", "StudyInstanceUID": _STUDY}
_OF_SERIES = {"Modality": "00080060", "SeriesDescription": "0008103E", "SeriesNumber": "00200011"}
_OF_SERIES |= {"NumberOfSeriesRelatedInstances": "00201209", "SeriesInstanceUID": _SERIES}
Facts = Mapping[str, str]
Rows = tuple[list[Any], bool]
T = TypeVar("T")
Files = AbstractContextManager[tuple[IO[bytes], IO[bytes]]]


class LeftOutError(Exception):
    """The PACS lists a study or object but does not deliver it, or not in a usable form."""


class BusyError(UnavailableError):
    """The PACS is busy (HTTP 408, 429): retry later."""


class _CutOffError(HTTPException):
    """A truncated response; a retry may succeed."""


class Patiently(Protocol):
    """Call `ask`, with or without retries. otherwise: returns whether the PACS answers other requests."""

    def __call__(self, ask: Callable[[], T], otherwise: Callable[[], bool] | None = None) -> T: ...


class Instance(NamedTuple):
    """A listed object. facts: attributes of its study and series by DICOM keyword, empty if missing."""

    study: str
    series: str
    uid: str
    facts: Facts


class PacsClient:
    """One connection to a PACS, for one list at a time. Cancelling `stop` ends every call.

    patiently: calls a request for a page or an object, and retries it.

    Raises UnavailableError (E-DATA-21) if the PACS does not answer. Raises ConfigError (E-DATA-22) if it denies access,
    is not trusted, or exceeds the limits of a list.
    """

    def __init__(self, reference: PacsReference, stop: CancelToken, patiently: Patiently) -> None:
        self._reference, self._stop, self._patiently = reference, stop, patiently
        address = urlsplit(reference.url)
        self._path, self._host = quote(address.path, safe="/%"), address.hostname or ""
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "consilium", **_authorization(reference)}
        self._tls = _trusted(reference.ca) if address.scheme == "https" else None
        self._connection = HTTPConnection(self._host, address.port or (80 if self._tls is None else 443))
        self._socket: socket.socket | None = None
        self._left, self._seconds = MAX_RESULTS, 0.0

    def close(self) -> None:
        self._connection.close()

    # ---- the list --------------------------------------------------------------------------------------------------

    def studies(self, accession: str = "") -> Iterator[Facts]:
        """List the studies that match the reference. Filters again here, because a PACS may ignore filters."""
        reference, (first, last) = self._reference, self._reference.dates
        filters = {"StudyDate": reference.date, "StudyDescription": reference.description, "AccessionNumber": accession}
        if len(reference.modalities) == 1:  # DICOM has no OR for several: `series` filters them
            filters["ModalitiesInStudy"] = reference.modality
        results = self._results("/studies", filters, _OF_STUDY, "StudyInstanceUID")
        while True:
            try:
                if (facts := next(results, None)) is None:
                    return
            except LeftOutError as error:
                raise _no_list(self._host, str(error)) from None
            wanted = not facts["StudyDate"] or first <= facts["StudyDate"] <= last
            wanted &= not facts["StudyDescription"] or _fits(facts["StudyDescription"], reference.description)
            if wanted and (not accession or facts["AccessionNumber"] in ("", accession)):
                yield facts

    def series(self, study: str) -> list[Facts]:
        """List the series that the reference selects in a study; raises LeftOutError if the study is gone."""
        path = f"/studies/{_checked(study)}/series"
        listed = list(self._results(path, {}, _OF_SERIES, "SeriesInstanceUID"))
        wanted, rule = self._reference.modalities, self._reference.series
        chosen = [s for s in listed if not wanted or s["Modality"] in ("", *wanted)]
        chosen.sort(key=lambda s: (_number(s["SeriesNumber"], 1 << 31), s["SeriesInstanceUID"]))
        if self._reference.wanted_series:
            return [s for s in chosen if _fits(s["SeriesDescription"], self._reference.wanted_series)]
        if rule == "largest":
            chosen.sort(key=lambda s: -_number(s["NumberOfSeriesRelatedInstances"], 0))
        return chosen if rule == "all" else chosen[:1]

    def instances(self, study: Facts, series: Facts) -> Iterator[Instance]:
        """List the objects of a series; raises LeftOutError if the series is gone."""
        of = _checked(study["StudyInstanceUID"]), _checked(series["SeriesInstanceUID"])
        path = f"/studies/{of[0]}/series/{of[1]}/instances"
        for facts in self._results(path, {}, {"uid": _INSTANCE}, "uid"):
            yield Instance(*of, facts["uid"], {**study, **series})

    def _results(self, path: str, filters: Mapping[str, str], tags: Mapping[str, str], name: str) -> Iterator[Facts]:
        """Page through the results of a search, without duplicates. A page with nothing new ends the search."""
        query = [(field, value) for field, value in filters.items() if value]
        query += [("includefield", tag) for tag in tags.values()]
        seen, offset, more = set[str](), 0, True
        while more:
            page = f"{path}?{urlencode([*query, ('limit', PAGE), ('offset', offset)])}"
            rows, warned = self._patiently(partial(self._page, page), None if path == "/studies" else self._answers)
            self._left -= len(rows)
            if self._left < 0 or self._seconds > LISTING_S:
                raise ConfigError(
                    "E-DATA-22",
                    f"the PACS has more than {MAX_RESULTS} results, or needs more than {LISTING_S / 3600:g} hours "
                    "to list them: ask for fewer (modality, date, description, accessions)",
                )
            read = [{key: _text(row, tag) for key, tag in tags.items()} for row in rows]
            fresh = {facts[name]: facts for facts in read if facts[name] not in seen}
            seen |= set(fresh)
            yield from fresh.values()
            offset, more = offset + len(rows), bool(fresh) and (len(rows) >= FEWEST or warned)

    def _answers(self) -> bool:
        """Return whether the PACS answers a minimal search."""
        try:
            self._page("/studies?limit=1")
        except (UnavailableError, LeftOutError):
            self._stop.raise_if_cancelled()
            return False
        return True

    def _page(self, path: str) -> Rows:
        began = time.monotonic()
        with self._asked(path, "application/dicom+json") as response:
            if response.status == 204:
                return [], False
            body = bytearray()
            for block in _blocks(response, PAGE_BYTES):
                body += block
            warned = response.headers.get("Warning") is not None
        try:
            rows = json.loads(bytes(body) or b"[]")
        except (ValueError, RecursionError):
            rows = None
        if not isinstance(rows, list):
            raise _no_list(self._host, "something else")
        self._seconds += time.monotonic() - began  # excludes time when the PACS was unavailable
        return rows, warned

    # ---- objects ---------------------------------------------------------------------------------------------------

    def retrieve(self, instance: tuple[str, str, str], open_files: Callable[[], Files]) -> None:
        """Write an object (study, series, UID) with the bytes that the PACS sends; raises LeftOutError.

        open_files: opens two empty files for each attempt, one for the whole response and one for the object.
        """
        study, series, uid = map(_checked, instance)
        path = f"/studies/{study}/series/{series}/instances/{uid}"
        self._patiently(partial(self._retrieve, path, open_files), self._answers)

    def _retrieve(self, path: str, open_files: Callable[[], Files]) -> None:
        with open_files() as (aside, into), self._asked(path, _OBJECT) as response:
            for block in _blocks(response, OBJECT_BYTES + HEAD_BYTES):
                aside.write(block)
            aside.flush()
            if not aside.tell():
                raise LeftOutError("the PACS gave nothing")
            with mmap.mmap(aside.fileno(), 0, access=mmap.ACCESS_READ) as data:
                start, end = _part(data, response.headers.get("Content-Type", ""))
                for at in range(start, end, _BLOCK):
                    into.write(data[at : min(at + _BLOCK, end)])

    # ---- one request -----------------------------------------------------------------------------------------------

    @contextmanager
    def _asked(self, path: str, accept: str) -> Iterator[HTTPResponse]:
        """Send a request and yield the response. Reconnects once if the PACS has closed an idle connection."""
        late, connection = threading.Event(), self._connection

        def cut() -> None:
            late.set()
            if (open_socket := self._socket) is not None:
                with suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(RESPONSE_S, cut)
        timer.daemon = True
        timer.start()
        answered = done = False
        try:
            with self._stop.on_cancel(cut):
                fresh = connection.sock is None
                try:
                    response = self._send(path, accept, late)
                except (HTTPException, OSError):
                    if fresh or late.is_set():
                        raise
                    connection.close()
                    response = self._send(path, accept, late)
                self._require_usable(response, listing="/instances/" not in path)
                answered = True
                yield response
                if late.is_set():
                    raise _CutOffError("cut off")
                if response.length == 0:
                    response.read()  # lets http.client reuse the connection
                done = response.isclosed()
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                "E-DATA-22",
                f"the certificate of {self._host} cannot be trusted: {error.verify_message}. Renew it, or name the "
                "hospital's own authority with ca=FILE",
            ) from None
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise _away(self._host, "the connection was closed") from None
            raise ConfigError(
                "E-DATA-22",
                f"the TLS connection to {self._host} failed: {error.reason}. Check the address and port of the PACS",
            ) from None
        except (HTTPException, OSError) as error:
            if answered and isinstance(error, OSError):
                raise  # the caller failed to write to disk; the PACS did not fail
            self._stop.raise_if_cancelled()
            why = f"cut off after {RESPONSE_S:g} s" if late.is_set() else str(error) or type(error).__name__
            raise _away(self._host, printable(why[:200])) from None
        finally:
            timer.cancel()
            if not done:
                connection.close()

    def _send(self, path: str, accept: str, late: threading.Event) -> HTTPResponse:
        self._stop.raise_if_cancelled()
        if self._connection.sock is None:
            self._connect(late)
        self._connection.request("GET", f"{self._path}{path}", headers={**self._headers, "Accept": accept})
        return self._connection.getresponse()

    def _connect(self, late: threading.Event) -> None:
        """Connect. Another thread can shut the socket down even before the TLS handshake."""
        self._socket = opened = socket.create_connection((self._connection.host, self._connection.port), SILENCE_S)
        if self._tls is not None:
            opened = self._tls.wrap_socket(opened, server_hostname=self._host, do_handshake_on_connect=False)
            self._socket = opened
        self._connection.sock = opened
        if late.is_set():  # the cut came before there was a socket
            raise _CutOffError("cut off")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(opened, ssl.SSLSocket):
            opened.do_handshake()

    def _require_usable(self, response: HTTPResponse, listing: bool) -> None:
        status, of = response.status, self._host
        if 300 <= status < 400:
            to = "the same host"
            with suppress(ValueError):
                to = printable((urlsplit(response.headers.get("Location", "")).hostname or to)[:100])
            text = f"{of} redirects to {to}. Redirects are not followed: use that"
            raise ConfigError("E-DATA-22", f"{text} address if it belongs to the hospital")
        if status in (401, 403):
            remedy = "correct the file named by credentials=FILE (user:password), or ask the administrators of the PACS"
            raise ConfigError("E-DATA-22", f"{of} refuses access (HTTP {status}): {remedy}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise LeftOutError("compressed by HTTP, which the request did not allow")
        if status in (404, 410):
            raise LeftOutError(f"the PACS does not have it any more (HTTP {status})")
        if status in _BUSY:
            raise BusyError("E-DATA-21", f"the PACS {of} is busy (HTTP {status})")
        if status in _AWAY or (listing and status >= 500):
            raise _away(of, f"HTTP {status}")
        if status not in (200, 204, 206):
            raise LeftOutError(f"the PACS refuses to send it (HTTP {status})")


def _away(host: str, why: str) -> UnavailableError:
    return UnavailableError("E-DATA-21", f"the PACS {host} did not answer: {why}. It will be asked again")


def _no_list(host: str, found: str) -> ConfigError:
    return ConfigError(
        "E-DATA-22",
        f"the answer from {host} is no list of results in JSON: {found}. Check that the address is that of "
        "DICOMweb, for instance https://pacs.example/dicom-web",
    )


def _authorization(reference: PacsReference) -> dict[str, str]:
    """Read the credentials; raises StateError (E-STATE-42, E-STATE-43) as `read_private`, ConfigError (E-CFG-02)."""
    if not reference.credentials:
        return {}
    credentials = read_private(Path(reference.credentials), "password").decode(errors="replace").strip()
    if credentials.startswith("Bearer ") and credentials.isascii() and credentials.isprintable():
        return {"Authorization": credentials}
    if ":" not in credentials or not credentials.isprintable():
        raise ConfigError(
            "E-CFG-02", f"{reference.credentials} must contain user:password or Bearer TOKEN: write one of them"
        )
    return {"Authorization": f"Basic {b64encode(credentials.encode()).decode()}"}


def _trusted(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise ConfigError("E-CFG-02", f"cannot read an authority in PEM format from {ca}: {error}") from None


def _blocks(response: HTTPResponse, most: int) -> Iterator[bytes]:
    """Stream a response body; raises _CutOffError if it ends early, LeftOutError if it is longer than `most` bytes."""
    size = 0
    try:
        while block := response.read1(_BLOCK):
            size += len(block)
            if size > most:
                raise LeftOutError(f"more than {most >> 20} MiB")
            yield block
    except (HTTPException, OSError) as error:
        raise _CutOffError(f"cut off after {size} bytes ({type(error).__name__})") from None
    if response.length:
        raise _CutOffError(f"cut off after {size} bytes")


def _part(data: mmap.mmap, kind: str) -> tuple[int, int]:
    """Find the first part of a multipart response, or the whole body if a server sends the object bare."""
    media, *parameters = (word.strip() for word in kind.split(";"))
    if media.lower() == "application/dicom":
        return 0, len(data)
    values = (word.partition("=")[2].strip('"') for word in parameters if word.lower().startswith("boundary="))
    if media.lower() != "multipart/related" or not (mark := next(values, "").encode()):
        raise LeftOutError("neither DICOM nor a multipart answer with a boundary")
    head = data.find(b"--" + mark, 0, HEAD_BYTES)
    start = data.find(b"\r\n\r\n", max(head, 0), head + HEAD_BYTES) + 4
    end = data.find(b"\r\n--" + mark, start)
    if head < 0 or start < 4 or end < 0:
        raise _CutOffError("a multipart answer without its end")
    return start, end


def _text(row: object, tag: str) -> str:
    """Return the first value of a tag in a result; empty if it is missing or not one printable line."""
    with suppress(TypeError, KeyError, IndexError):
        value = row[tag]["Value"][0]  # type: ignore[index]
        text = str(value).strip() if isinstance(value, str | int) else ""
        return text if text.isprintable() and len(text) <= 256 else ""
    return ""


def _checked(uid: str) -> str:
    if not is_uid(uid):
        raise LeftOutError("no valid number (UID)")
    return uid


def is_uid(text: str) -> bool:
    """Return whether a text is shaped like a DICOM UID, which makes it a safe file name."""
    return _UID.fullmatch(text) is not None


def _fits(text: str, pattern: str) -> bool:
    return not pattern or fnmatch(text.lower(), pattern.lower())


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() else otherwise
