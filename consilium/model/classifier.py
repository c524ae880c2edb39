"""An exported model with scikit-learn's methods: arrays, images or files in, arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from consilium.model import model_file
from consilium.model.inputs import Inputs, from_paths
from consilium.model.predictor import Prediction, Predictor
from fl_core.datasets.decoding.limits import UnreadableError
from fl_core.datasets.decoding.pixels import rgb_of
from fl_core.datasets.examples import TensorExamples
from fl_core.datasets.image_loader import ImageFormat, ImageLoader, Pixels, SquareKey, resized
from fl_core.datasets.preprocessing import normalisation
from fl_core.errors import ConfigError, DataError
from fl_core.extensions import loading

_NAMED = 3
"""Maximum number of examples that an error names."""


def load(
    file: str | Path,
    *,
    card: str | Path | None = None,
    sha256: str | None = None,
    calibration: str | Path | None = None,
    raw: bool = False,
    extensions: Sequence[str] = (),
) -> Model:
    """Load an exported model as `consilium predict` does: check it against its card, and use its calibration.

        model = consilium.load("models/first-1a2b.safetensors")
        model.predict("new-images")           # an array of class names
        model.predict_proba(["a.png", "b.dcm"])  # (2, classes)

    card: the file's model card, by default the one in its folder   sha256: of the file, instead of a card
    calibration: a file that `consilium calibrate` wrote, by default the one in the model's folder   raw: use none
    extensions: installed distributions with the method or model that the file names

    Raises StateError (E-STATE-22) if the file is no exported model or its card does not name it; ConfigError
    (E-CFG-02) if there is no such file.
    """
    place = Path(file)
    loading.load_distributions(list(extensions))
    loaded = model_file.load(place, None if card is None else Path(card), sha256)
    return Model(Predictor.of(place, loaded, None if calibration is None else Path(calibration), raw))


class Model:
    """A trained model that answers as `consilium predict` does.

        model = consilium.load("models/first-1a2b.safetensors")
        model.classes_                     # array(['melanoma', 'nevus'], ...)
        model.predict(images)              # one class name per image
        model.predict_proba(images)        # (n, classes), in the order of classes_
        model.predictions(images)[0].set   # sets of classes and more, after `consilium calibrate`

    images: a path, a folder, or a list of paths; a PIL image, or a list of them; or an array. An array of shape
    (n, height, width) or (n, height, width, 3) contains images of any size, which are treated like image files. An
    array of shape (n, *shape of the model) contains examples as an exported ONNX graph takes them: images in RGB, as
    bytes or numbers in [0, 1].
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    @property
    def classes_(self) -> NDArray[np.str_]:
        """Class names, in the order of the probabilities."""
        return np.array(self.predictor.model.facts.classes)

    @property
    def module(self) -> nn.Module:
        """The network in eval mode: prepared examples (n, *shape) -> logits (n, classes)."""
        return nn.Sequential(self.predictor.model.body, self.predictor.model.head).eval()

    def predict(self, images: object) -> NDArray[Any]:
        """Return the answer for each image (n,), as in the column "answer" of `consilium predict`.

        With a calibration, an answer may be "none of the classes". A multi-label model returns (n, classes), with 1 for
        each label that is present. Raises DataError (E-DATA-04) if an image cannot be used; see `predictions`.
        """
        answers = self._all(images)
        if self.predictor.model.facts.multi_label:
            rows = [[int(name in one.labels) for name in self.predictor.model.facts.classes] for one in answers]
            return np.array(rows, dtype=np.int64).reshape(len(answers), len(self.classes_))
        return np.array([one.answer_text for one in answers], dtype=str)

    def predict_proba(self, images: object) -> NDArray[np.float64]:
        """Return the probability of each class (n, classes); raises as `predict`."""
        rows = [one.probabilities for one in self._all(images)]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.classes_))

    def predictions(self, images: object) -> list[Prediction]:
        """Return the full prediction for each image, in order; an unusable image has a `problem` instead."""
        paths = _paths(images)
        if paths is None:
            return self.predictor.predictions(self._in_memory(images))
        loader = ImageLoader(cache_bytes=0)
        facts = self.predictor.model.facts
        if not paths:
            return []
        answers = self.predictor.predictions(from_paths(list(dict.fromkeys(paths)), facts, loader))
        if any(path.is_dir() for path in paths) or facts.columns:
            return answers
        by_name = {one.name: one for one in answers}
        return [by_name[str(path)] for path in paths]

    def _all(self, images: object) -> list[Prediction]:
        answers = self.predictions(images)
        broken = [f"{one.name} ({one.problem})" for one in answers if one.problem]
        if broken:
            more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
            raise DataError(
                "E-DATA-04",
                f"the model cannot use some images: {', '.join(broken[:_NAMED])}{more}. Leave them out, or call "
                ".predictions(images), which classifies the other images",
            )
        return answers

    def _in_memory(self, images: object) -> Inputs:
        preprocessing, shape = self.predictor.model.facts.preprocessing, self.predictor.model.facts.shape
        if self.predictor.model.facts.columns:
            raise ConfigError(
                "E-CFG-23",
                "expected the path of a table (CSV or Parquet) for a model of columns, found "
                f"{type(images).__name__}: pass a path",
            )
        arrays = [images] if isinstance(images, Image.Image) else _array(images)
        if isinstance(arrays, np.ndarray) and arrays.shape[1:] == shape:
            x = _numbers(arrays, images=preprocessing.takes_images)
            if preprocessing.takes_images:
                mean, std = normalisation(preprocessing.data)
                x = (x - torch.tensor(mean or (0.0,)).view(-1, 1, 1)) / torch.tensor(std or (1.0,)).view(-1, 1, 1)
            return Inputs(_names(len(x)), TensorExamples(x, torch.full((len(x),), -1)))
        if not preprocessing.takes_images:
            raise ConfigError(
                "E-CFG-23",
                f"expected an array of shape (n, {', '.join(map(str, shape))}), found "
                f"{getattr(arrays, 'shape', type(images).__name__)}: pass an array of this shape",
            )
        pictures = [picture(one) for one in arrays]
        names = _names(len(pictures))
        files = [Path(name) for name in names]
        return Inputs(names, preprocessing.examples(files, _Pictures(dict(zip(files, pictures, strict=True)))))

    def __repr__(self) -> str:
        facts = self.predictor.model.facts
        shape = f"{len(facts.columns)} columns" if facts.columns else " x ".join(map(str, facts.shape))
        return f"<model of {facts.run or 'a simulation'}: {facts.model}, {shape}, {len(facts.classes)} classes>"


def _names(n: int) -> tuple[str, ...]:
    return tuple(f"image {k}" for k in range(n))


def _paths(images: object) -> list[Path] | None:
    """Return the paths, or None if the images are not paths."""
    if isinstance(images, str | Path):
        return [Path(images)]
    if isinstance(images, list | tuple) and all(isinstance(one, str | Path) for one in images):
        return [Path(one) for one in images]
    return None


def _array(images: object) -> NDArray[Any] | list[Any]:
    """Return a batch as an array, or as a list if images may have different sizes."""
    if isinstance(images, torch.Tensor):
        images = images.detach().cpu().numpy()
    if isinstance(images, np.ndarray):
        if images.ndim < 2 or (images.ndim == 3 and images.shape[-1] in (3, 4)):
            raise ConfigError(
                "E-CFG-02",
                f"expected a batch of images, found an array of shape {images.shape}: pass one image as images[None]",
            )
        return images
    if isinstance(images, list | tuple):
        listed = [one.detach().cpu().numpy() if isinstance(one, torch.Tensor) else one for one in images]
        if all(isinstance(one, Image.Image | np.ndarray) for one in listed):
            return listed
    raise ConfigError(
        "E-CFG-02",
        f"expected paths, PIL images or arrays, found {type(images).__name__}: pass one of these kinds, not a mixture",
    )


def _numbers(array: NDArray[Any], *, images: bool) -> torch.Tensor:
    """Return examples as float32. Bytes of images are divided by 255; other pixels must be in [0, 1]."""
    if images and array.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(array)).float() / 255
    x = torch.from_numpy(np.ascontiguousarray(array)).float()
    if images:
        _require_shares(array)
    return x


def _require_shares(array: NDArray[Any]) -> None:
    if array.dtype.kind != "f" or (array.size and not (array.min() >= 0 and array.max() <= 1)):  # false for NaN
        raise ConfigError(
            "E-CFG-02",
            f"expected uint8 pixels or numbers in [0, 1], found other values ({array.dtype}): convert them",
        )


def picture(image: Any) -> Image.Image:  # noqa: ANN401 - an array of any type
    """Convert an array (h, w), (h, w, 1), (h, w, 3) or (h, w, 4) of bytes or numbers in [0, 1] to a PIL image.

    Also takes (h, w) as uint16, and returns a PIL image unchanged. Raises ConfigError (E-CFG-02) on other arrays.
    """
    if isinstance(image, Image.Image):
        return image
    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    if not (image.ndim == 2 or (image.ndim == 3 and image.shape[-1] in (3, 4))):
        raise ConfigError(
            "E-CFG-02",
            f"expected an image (height, width) or (height, width, 3), found an array of shape {image.shape}: convert "
            "it",
        )
    if image.dtype == np.uint16 and image.ndim == 2:
        return Image.fromarray(image)
    if image.dtype != np.uint8:
        _require_shares(image)
        image = np.rint(255 * image.astype(np.float64)).astype(np.uint8)
    return Image.fromarray(image)


class _Pictures(ImageLoader):
    """Loads images from memory as if their pixels came from files."""

    def __init__(self, pictures: dict[Path, Image.Image]) -> None:
        self._pictures = pictures

    def squares(self, wanted: Sequence[tuple[Path, SquareKey | None]], form: ImageFormat) -> Pixels:
        out = np.empty((len(wanted), form.side, form.side, 3), dtype=np.uint8)
        for k, (name, _) in enumerate(wanted):
            try:
                out[k] = resized(rgb_of(self._pictures[name]), form.side)
            except UnreadableError as error:
                error.path = name
                raise
        return out
