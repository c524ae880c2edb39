"""Frozen features: in such a run, the examples are the outputs of the model's frozen body.

With `train.freeze=features` the body is the same function at every hospital: in eval mode, with the weights of the
run's start or seed, on batches of one public shape, padded with zeros, or on each image alone (`FrozenBody`). So an
example has the same d0 numbers in every batch and at every hospital. The part after the body (the projection of
`model.adapter`, and the head) is the run's model for methods, privacy, layouts and messages.

With `train.views=V` an example has V fixed views, drawn from its content: the same image has the same views at any
hospital and in any run. All views are one record; a step draws one of them. Sums and evaluations read the original
example.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from fl_core import rng
from fl_core.datasets.examples import TensorExamples
from fl_core.errors import ConfigError
from fl_core.models.split_model import FrozenBody, SplitModel, behind_body, body_rows
from fl_core.tensors import Tensor, nn, torch
from fl_core.training.broken_records import name_of, read_readable, require_few
from fl_core.training.local_data import eval_batch
from fl_core.types.interfaces import Method
from fl_core.types.metric_parts import METRIC_PARTS
from fl_core.types.records import FEATURES, Schema, TrainConfig
from fl_core.types.values import Examples, Layout

log = logging.getLogger(__name__)

FEW = 32
"""Examples per call of a body from a file. One may take a second, so progress is reported between calls."""


class TrainedPart(NamedTuple):
    """The trained part of a run's model, and the schema of its training examples."""

    model: nn.Module
    schema: Schema


def trained_part(network: SplitModel, schema: Schema, train: TrainConfig, owner: str) -> TrainedPart:
    """Return the trained part of a network, which shares its tensors.

    Raises ConfigError (E-CFG-08) as `behind_body`, and if the body's output is no vector.
    """
    file = network.body if isinstance(network.body, FrozenBody) else None
    if train.freeze != FEATURES:
        if file is not None:
            raise ConfigError(
                "E-CFG-08",
                f"expected train.freeze=features with {owner}, whose body is a file that is never trained, found "
                f"{train.freeze}: leave train.freeze out",
            )
        return TrainedPart(network, schema)
    model, blank = behind_body(network, owner), torch.zeros(1, 0 if file is None else file.width)
    if file is None and (blank := body_rows(network.body, torch.zeros(1, *schema.shape))).dim() != 2:
        raise ConfigError(
            "E-CFG-08",
            f"expected a body whose output is a vector with train.freeze=features, found {owner}, which gives "
            f"{tuple(blank.shape[1:])}: leave train.freeze out",
        )
    return TrainedPart(model, replace(schema, shape=tuple(blank.shape[1:]), columns=(), window=None))


def check_shared(method: Method, layout: Layout, train: TrainConfig) -> None:
    """Raise ConfigError (E-CFG-08) if a method shares only the frozen body, or takes no step that draws views."""
    if train.views > 1 and method.exact:
        raise ConfigError(
            "E-CFG-08",
            f"method {method.name}: expected train.views=1, since it sums over records as they are and takes no steps, "
            f"found {train.views}: leave train.views and train.augment out",
        )
    specs = [spec for name, spec in layout.items() if name not in METRIC_PARTS]
    if train.freeze == FEATURES and specs and not any(spec.shapes for spec in specs):
        raise ConfigError(
            "E-CFG-08",
            f"method {method.name}: only the body is shared, and train.freeze=features does not train it: set "
            "model.adapter=linear, which adds a shared trained layer",
        )


class FeatureBatch(NamedTuple):
    """Positions of examples (b,) that were read, and the features of their views (b, V, d0) on the CPU.

    done: examples processed so far, read or not.
    """

    positions: Tensor
    rows: Tensor
    done: int


class FixedViews(Examples):
    """Examples with a few fixed views each, rows (n, V, *shape); the first view is the original example.

    With a generator, one view of each example is drawn instead of an augmentation. rows: may be mapped from a file and
    is then read on access   at: the row of each example, if some rows belong to no example.
    """

    def __init__(
        self, rows: Tensor, labels: Tensor, groups: tuple[str, ...] | None = None, at: Tensor | None = None
    ) -> None:
        self.labels, self.groups, self._rows, self._at = labels.long(), groups, rows, at

    def stored(self, index: Tensor) -> Tensor:
        return self._rows[index if self._at is None else self._at[index]]

    def prepared(self, x: Tensor, augment: torch.Generator | None = None) -> Tensor:
        if augment is None:
            return x[:, 0]
        view = torch.randint(0, x.shape[1], (len(x),), generator=augment)
        return x[torch.arange(len(x), device=x.device), view.to(x.device)]

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self.prepared(self.stored(index), augment).float(), self.labels[index]


def feature_batches(
    body: nn.Module, examples: Examples, device: torch.device, views: int = 1
) -> Iterator[FeatureBatch]:
    """Pass all examples through a frozen body once, in order, a batch at a time; the body is moved to the device.

    views: V, of each example. Guarantees: views depend only on the content of their example. An example that cannot be
    read (E-DATA-04), or whose features are not finite, is logged and left out, independent of all others. Raises
    DataError (E-DATA-04) as `require_few`, if too many cannot be read. Features that are not finite never raise an
    error: otherwise a malicious body could query records without a charge.
    """
    blank, _ = examples.batch(torch.zeros(0, dtype=torch.long))
    size, body, alone = eval_batch(blank.shape[1:]), body.to(device), isinstance(body, FrozenBody)
    if alone:
        size = min(size, FEW)
    lost, n = 0, len(examples)
    for first in range(0, max(1, n), size):
        index = torch.arange(first, min(first + size, n))
        kept, x = read_readable(examples, index)
        made = list[Tensor]()
        for view in _views(examples, kept, x, views):
            blanks = 0 if alone else size - len(view)
            whole = torch.cat((view, view.new_zeros(blanks, *view.shape[1:])))
            made.append(body_rows(body, whole.to(device))[: len(kept)].float().cpu())
        rows = torch.stack(made, 1)
        finite = torch.isfinite(rows).flatten(1).all(1)
        for i in kept[~finite].tolist():
            log.warning("%s is left out: its features are not finite numbers", name_of(examples, i))
        lost += len(index) - len(kept)
        require_few(lost, n)
        yield FeatureBatch(kept[finite], rows[finite], min(first + size, n))


def in_memory(examples: Examples, batches: Iterable[FeatureBatch]) -> Examples:
    """Return the examples of some batches of features, all kept in memory."""
    kept = list(batches)
    return with_rows(examples, torch.cat([b.positions for b in kept]), torch.cat([b.rows for b in kept]))


def with_rows(examples: Examples, positions: Tensor, rows: Tensor, at: Tensor | None = None) -> Examples:
    """Return the examples at `positions` (m,) with features (m, V, d0) instead of their original values.

    at: their rows (m,); None: rows 0 to m - 1.
    """
    groups = None if examples.groups is None else tuple(examples.groups[i] for i in positions.tolist())
    if rows.shape[1] > 1 or at is not None:
        return FixedViews(rows, examples.labels[positions], groups, at)
    return TensorExamples(rows.squeeze(1), examples.labels[positions], groups)


def _views(examples: Examples, index: Tensor, x: Tensor, number: int) -> Iterator[Tensor]:
    """Yield the views (b, *shape) of the examples at `index` (b,), one after the other; the first is x."""
    yield x
    if number == 1 or not len(index):
        yield from [x] * (number - 1)
        return
    contents = [hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest() for one in x.cpu()]
    for v in range(1, number):
        drawn = [rng.stream(0, "view", content, v) for content in contents]
        ones = zip(torch.split(index, 1), drawn, strict=True)
        yield torch.cat([examples.batch(one, generator)[0] for one, generator in ones])
