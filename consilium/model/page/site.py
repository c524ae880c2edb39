"""The page that classifies images: its views, uploads and downloads."""

from __future__ import annotations

import io
import itertools
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image

from consilium.model.inputs import Inputs
from consilium.model.predictor import Prediction, Predictor
from consilium.web.site import Action, Download, FileField, Parameters, Site, View
from fl_core.datasets.decoding.limits import MAX_BYTES
from fl_core.datasets.image_loader import ImageLoader
from fl_core.errors import DataError

TEMPLATES = Path(__file__).parent / "templates"
COMMAND = "consilium page MODEL"
MAX_SHOWN = 50
"""Number of answered images to keep; a new one replaces the oldest."""
SHOWN_CLASSES = 5
_SEEN = "seen/"


@dataclass(frozen=True, slots=True)
class AnsweredImage:
    """One image's answer. png: the square image that the model saw."""

    number: int
    prediction: Prediction
    png: bytes

    def likeliest(self, classes: tuple[str, ...]) -> list[tuple[str, float]]:
        ranked = sorted(zip(classes, self.prediction.probabilities, strict=True), key=lambda pair: -pair[1])
        return ranked[:SHOWN_CLASSES]


@dataclass(slots=True)
class PredictionPage:
    """The page of one model. folder: private folder for each image while it is classified."""

    predictor: Predictor
    folder: Path
    _shown: deque[AnsweredImage] = field(default_factory=lambda: deque(maxlen=MAX_SHOWN), init=False)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1), init=False)
    _changes: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _loader: ImageLoader = field(default_factory=lambda: ImageLoader(cache_bytes=0), init=False)

    def site(self) -> Site:
        return Site(
            title=f"Consilium: {self.predictor.model.facts.run or 'a model'}",
            command=COMMAND,
            templates=TEMPLATES,
            views={"/": View("home.html", lambda _: self.facts())},
            version=self.version,
            actions={"/forget": Action(lambda _: self.version(), self._forget)},
            download=self._download,
            uploads={"/classify": FileField(self.folder, MAX_BYTES, self.take)},
        )

    def version(self) -> str:
        return str(self._changes)

    def facts(self) -> Mapping[str, object]:
        with self._lock:
            shown, version = list(reversed(self._shown)), self.version()
        classes, calibration = self.predictor.model.facts.classes, self.predictor.calibration
        return {
            "headline": _headline(shown),
            "model": self.predictor.model,
            "sentence": self.predictor.model.facts.preprocessing.sentence(),
            "temperature": self.predictor.temperature,
            "calibration": calibration and calibration.facts,
            "shown": [(image, image.likeliest(classes)) for image in shown],
            "forget_digest": version,
        }

    def take(self, name: str, file: Path) -> None:
        """Classify an image and show the answer; raises DataError (E-DATA-04) on a file that is no usable image."""
        examples = self.predictor.model.facts.preprocessing.examples([file], self._loader)
        (prediction,) = self.predictor.predictions(Inputs((name,), examples))
        if prediction.problem:
            raise DataError("E-DATA-04", prediction.problem.replace(file.name, name))
        seen = _png(examples.stored(torch.zeros(1, dtype=torch.int64))[0])
        with self._lock:
            self._shown.append(AnsweredImage(next(self._numbers), prediction, seen))
            self._changes += 1

    def _forget(self, form: Parameters) -> str:
        del form
        with self._lock:
            self._shown.clear()
            self._changes += 1
        return "All answers are deleted."

    def _download(self, id: str) -> Download | None:
        with self._lock:
            image = next((s for s in self._shown if id == f"{_SEEN}{s.number}"), None)
        return None if image is None else Download(f"{image.number}.png", "image/png", image.png)


def _headline(shown: list[AnsweredImage]) -> str:
    if not shown:
        return "Drop images here: nothing leaves this machine"
    none = sum(bool(image.prediction.unknown) for image in shown)
    what = f"{len(shown)} {'image' if len(shown) == 1 else 'images'} classified"
    return f"{what}, {none} of them as none of the classes" if none else what


def _png(pixels: torch.Tensor) -> bytes:
    """Encode (C, S, S) uint8 with one or three channels."""
    values = pixels.permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(values[..., 0] if values.shape[2] == 1 else values).save(file, "PNG")
    return file.getvalue()
