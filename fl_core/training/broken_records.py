"""Listed records that cannot be read: they are logged, left out and counted, and the run continues without them.

Whether a record is left out depends only on its own file. So a private run without it equals the run of a hospital that
never had it: sampling rates and charges follow from the declared size, which does not change. One of ONE_IN records may
be broken; with more, the task fails, since the rest may not be the agreed data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from fl_core.datasets.checks import ONE_IN, allowed_broken
from fl_core.datasets.image_files import ImageExamples
from fl_core.errors import DataError
from fl_core.tensors import Tensor, torch
from fl_core.training.local_data import eval_batch
from fl_core.types.values import Examples, Progress

log = logging.getLogger(__name__)
UNREADABLE = "E-DATA-04"
Notice = Callable[[Sequence[int]], None]
"""Called with the positions of records that could not be read."""


def require_few(broken: int, n: int) -> None:
    """Raise DataError (E-DATA-04) if too many of n records are broken; the message does not contain the number."""
    if broken > allowed_broken(n):
        raise DataError(
            UNREADABLE,
            f"more than one example in {ONE_IN} is unreadable; this hospital's log lists them: restore them, or "
            "remove them (`silo data check`)",
        )


def read_readable(examples: Examples, index: Tensor) -> tuple[Tensor, Tensor]:
    """Read a batch, one by one if a record is broken; return the positions that were read, and their x."""
    try:
        return index, examples.batch(index)[0]
    except DataError as error:
        if error.code != UNREADABLE:
            raise
    kept, inputs = list[Tensor](), [examples.batch(index[:0])[0]]
    for one in torch.split(index, 1):
        try:
            inputs.append(examples.batch(one)[0])
            kept.append(one)
        except DataError as error:
            if error.code != UNREADABLE:
                raise
            log.warning("%s is left out: %s", name_of(examples, int(one)), error.message)
    return torch.cat([index[:0], *kept]), torch.cat(inputs)


def unreadable(
    examples: Examples, among: Sequence[int] | None = None, progress: Progress = lambda *_: None
) -> tuple[int, ...]:
    """Decode examples that lie in files, and return the positions of unreadable ones; each is named in the log.

    among: positions to check, all by default. In-memory examples are readable.
    """
    wanted = range(len(examples)) if among is None else among
    if not hasattr(examples, "paths") or not len(wanted):
        return ()
    size = eval_batch(examples.batch(torch.zeros(0, dtype=torch.long))[0].shape[1:])
    broken, done = list[int](), 0
    for index in torch.split(torch.tensor(wanted), size):
        kept, _ = read_readable(examples, index)
        broken += sorted(set(index.tolist()) - set(kept.tolist()))
        done += len(index)
        progress(done, len(wanted))
    return tuple(broken)


def without(examples: Examples, broken: Collection[int]) -> Examples:
    """Return examples without some unreadable ones; raises DataError as `require_few`."""
    require_few(len(broken), len(examples))
    return examples.without(broken) if broken and isinstance(examples, ImageExamples) else examples


def readable(examples: Examples) -> Examples:
    """Return the examples that can be read; raises as `without`."""
    return without(examples, unreadable(examples))


class EmptyWhereBroken(Examples):
    """Image files of a private run; a file that breaks during a round is read as NaN.

    A unit whose numbers are not finite adds nothing to a private sum, and the draws of all others stay the same. So the
    round continues within its charge. notice: called with the positions of broken files.
    """

    def __init__(self, examples: ImageExamples, notice: Notice) -> None:
        self.labels, self.groups, self.paths = examples.labels, examples.groups, examples.paths
        self._examples, self._notice = examples, notice

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self.prepared(self.stored(index), augment), self.labels[index]

    def prepared(self, x: Tensor, augment: torch.Generator | None = None) -> Tensor:
        """Finish the output of `stored`. Augmentation also draws for broken images, which stay NaN."""
        broken = torch.isnan(x).flatten(1).any(1) if x.is_floating_point() else torch.zeros(len(x), dtype=torch.bool)
        made = self._examples.prepared(x.nan_to_num(0.0) if x.is_floating_point() else x, augment)
        made[broken] = torch.nan
        return made

    def stored(self, index: Tensor) -> Tensor:
        """Return images as `ImageExamples.stored`; in float32 if one of them is broken."""
        try:
            return self._examples.stored(index)
        except DataError as error:
            if error.code != UNREADABLE:
                raise
        rows, broken = list[Tensor](), list[int]()
        blank = self._examples.stored(index[:0]).float()
        for one in torch.split(index, 1):
            try:
                rows.append(self._examples.stored(one).float())
            except DataError as error:
                if error.code != UNREADABLE:
                    raise
                log.warning("%s is skipped in this round: %s", name_of(self, int(one)), error.message)
                broken.append(int(one))
                rows.append(blank.new_full((1, *blank.shape[1:]), torch.nan))
        self._notice(broken)
        return torch.cat(rows)


def name_of(examples: Examples, i: int) -> str:
    paths = getattr(examples, "paths", None)
    return f"example {i + 1}" if paths is None else str(paths[i])
