"""A PACS under a test's command: DICOMweb on loopback, with studies that a test makes up, and faults that it orders."""

from __future__ import annotations

import json
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

TAGS = {
    **{"StudyInstanceUID": "0020000D", "SeriesInstanceUID": "0020000E", "SOPInstanceUID": "00080018"},
    **{"AccessionNumber": "00080050", "PatientID": "00100020", "StudyDate": "00080020"},
    **{"StudyDescription": "00081030", "Modality": "00080060", "SeriesDescription": "0008103E"},
    **{"SeriesNumber": "00200011", "NumberOfSeriesRelatedInstances": "00201209"},
}
CT = "1.2.840.10008.5.1.4.1.1.2"


def dicom(uid: str, *, seed: int = 0, side: int = 8, shade: int = 0, without: str = "", **tags: Any) -> bytes:
    """Write a small image as DICOM; without: a tag of its pixels that it lacks."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CT
    meta.MediaStorageSOPInstanceUID = uid
    made = FileDataset(None, Dataset(), file_meta=meta, preamble=b"\0" * 128)
    made.SOPInstanceUID, made.SOPClassUID = uid, CT
    for name, value in tags.items():
        setattr(made, name, value)
    made.Rows = made.Columns = side
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = 8
    made.HighBit, made.PixelRepresentation = 7, 0
    pixels = np.random.default_rng(seed).integers(0, 96, (side, side)) + shade
    made.PixelData = pixels.astype(np.uint8).tobytes()
    if without:
        delattr(made, without)
    file = BytesIO()
    made.save_as(file, enforce_file_format=True)
    return file.getvalue()


@dataclass
class Series:
    facts: dict[str, str]
    instances: dict[str, bytes | Callable[[Any], None]] = field(default_factory=dict)
    """By number; a function answers the request itself."""


@dataclass
class Study:
    facts: dict[str, str]
    series: dict[str, Series] = field(default_factory=dict)


class FakePacs:
    """Answers searches and retrieves; counts them in `asked`.

    most: results in one page   user: user:password that it wants   before: is called with each request, and may answer
    it by returning True.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.studies: dict[str, Study] = {}
        self.asked: list[str] = []
        self.most, self.user = 1000, ""
        self.before: Callable[[Any], bool] = lambda _: False
        self.ignores_filters = False
        self._tls, self._server, self.port = tls, None, 0
        self.start()

    def start(self) -> None:
        pacs = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout, wbufsize = 60, -1  # what is written in two pieces waits for an acknowledgement

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                with suppress(ConnectionError, ssl.SSLError):
                    pacs._answer(self)

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}/dicom-web"

    def add(self, study: str, series: str, uid: str, data: Any = None, **facts: str) -> None:
        """Add an object. facts: of its study and series."""
        held = self.studies.setdefault(study, Study({"StudyInstanceUID": study}))
        held.facts |= {k: v for k, v in facts.items() if "Series" not in k and k != "Modality"}
        one = held.series.setdefault(series, Series({"SeriesInstanceUID": series}))
        one.facts |= {k: v for k, v in facts.items() if "Series" in k or k == "Modality"}
        one.instances[uid] = (
            dicom(uid, seed=len(self.asked) + len(held.series) + len(one.instances)) if data is None else data
        )

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        if self.before(request):
            return None
        if self.user and request.headers.get("Authorization") != f"Basic {b64encode(self.user.encode()).decode()}":
            return send(request, 401)
        split = urlsplit(request.path)
        words, query = split.path.strip("/").split("/")[1:], parse_qs(split.query)
        if words == ["studies"]:
            return self._page(request, [s.facts for s in list(self.studies.values()) if self._wanted(s, query)], query)
        study = self.studies.get(words[1]) if len(words) > 1 else None
        if study is None:
            return send(request, 404)
        if words[2:] == ["series"]:
            rows = [{**s.facts, "NumberOfSeriesRelatedInstances": str(len(s.instances))} for s in study.series.values()]
            return self._page(request, rows, query)
        series = study.series[words[3]]
        if words[4:] == ["instances"]:
            return self._page(request, [{"SOPInstanceUID": uid} for uid in series.instances], query)
        data = series.instances.get(words[5])
        if data is None:
            return send(request, 404)
        return data(request) if callable(data) else send_object(request, data)

    def _wanted(self, study: Study, query: Mapping[str, list[str]]) -> bool:
        asked = query.get("AccessionNumber", [])
        return self.ignores_filters or not asked or study.facts.get("AccessionNumber", "") in asked

    def _page(
        self, request: BaseHTTPRequestHandler, rows: list[dict[str, str]], query: Mapping[str, list[str]]
    ) -> None:
        offset, limit = int(query.get("offset", ["0"])[0]), min(int(query["limit"][0]), self.most)
        page = rows[offset : offset + limit]
        if not page:
            return send(request, 204)
        body = [{TAGS[name]: {"vr": "LO", "Value": [value]} for name, value in row.items()} for row in page]
        more = {"Warning": "299 more"} if offset + limit < len(rows) else {}
        return send(request, 200, json.dumps(body).encode(), "application/dicom+json", **more)


def send(request: Any, status: int, body: bytes = b"", kind: str = "text/plain", **headers: str) -> None:
    request.send_response(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
        if not (status == 204 and name == "Content-Length"):
            request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)


def send_object(request: Any, data: bytes) -> None:
    body = b"--here\r\nContent-Type: application/dicom\r\n\r\n" + data + b"\r\n--here--\r\n"
    send(request, 200, body, 'multipart/related; type="application/dicom"; boundary="here"')


@contextmanager
def pacs(tls: ssl.SSLContext | None = None) -> Iterator[FakePacs]:
    made = FakePacs(tls)
    try:
        yield made
    finally:
        made.stop()
