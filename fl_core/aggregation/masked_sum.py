"""The sum of masked updates: flat blocks are added on arrival, and opened for one set of members."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from fl_core.aggregation.aggregator import Aggregator
from fl_core.aggregation.flat_blocks import WORDS, FlatLayout
from fl_core.aggregation.number_blocks import blocks
from fl_core.aggregation.round_sum import AggregationDecision, RoundSum
from fl_core.aggregation.update_check import DeclaredSize, UpdateCheck, UpdateNorms
from fl_core.errors import ProtocolError, RefusedError
from fl_core.tensors import Tensor, torch
from fl_core.types.secagg import BLOCKS, CLASSES
from fl_core.types.values import Bundle, PartSpec


def unsigned(words: Tensor) -> NDArray[np.unsignedinteger]:
    """View ring words as unsigned, for arithmetic modulo 2^32 or 2^64."""
    return words.numpy().view(np.uint32 if words.dtype == torch.int32 else np.uint64)


Unmask = Callable[[Mapping[str, Tensor], Collection[str], Collection[str]], None]
"""Removes the masks from a round's sums (words,), in place and only once. Arguments also are the names of the members
whose updates were added, and of the blocks to open; other blocks stay masked. Raises FederationError if the members do
not open this sum; then it reveals nothing."""


class MaskedSum(RoundSum):
    """The sum over a set of members, with masks or, in a simulation, without.

    Sums per class are opened if `each`, or if every member of the run sent an update: otherwise they are zeros of
    weight 0.

    Guarantees: a sum that no set of honest members can produce is not merged. Errors name no silo, since single updates
    are checked only at their silos.
    """

    def __init__(
        self, layout: FlatLayout, check: UpdateCheck, everybody: Collection[str], unmask: Unmask | None, each: bool
    ) -> None:
        """Prepare a round.

        check: of the unmasked sum, with `sizes` by member   everybody: the members of the run   unmask: None in a
        simulation without masks.
        """
        super().__init__(Aggregator({}, layout.grid), check)
        self._layout, self._everybody, self._unmask, self._each = layout, set(everybody), unmask, each
        self._words = {block: torch.zeros(layout.words(block), dtype=layout.dtype) for block in BLOCKS}
        self._added: list[str] = []
        self._total: Bundle = {}

    def measure(self, update: Bundle, name: str) -> UpdateNorms:  # noqa: ARG002
        """Check the visible properties of an update: dtype and number of its words."""
        for block, words in self._words.items():
            sent = update.get(block)
            shape = None if sent is None else PartSpec.of(sent).shapes.get(WORDS)
            if sent is None or shape != words.shape or next(blocks(sent.total, WORDS)).dtype != words.numpy().dtype:
                raise ProtocolError(
                    "E-WIRE-06", f"expected {len(words)} words of {words.dtype} as {block!r}, found something else"
                )
        return UpdateNorms({}, {})

    def add(self, update: Bundle, name: str, silo: int, measured: UpdateNorms) -> None:  # noqa: ARG002
        for block, words in self._words.items():
            sums, at = unsigned(words), 0
            for theirs in blocks(update[block].total, WORDS):
                place = sums[at : at + len(theirs)]
                np.add(place, theirs.view(sums.dtype), out=place)  # modulo 2^32 or 2^64
                at += len(theirs)
        self._added.append(name)

    def finish(self) -> AggregationDecision:
        """Open the sum of the added updates.

        Raises FederationError as `Unmask`, RefusedError (E-RUN-48) if no set of honest members can produce the sum.
        """
        open_classes = self._each or set(self._added) == self._everybody
        opened = [block for block in BLOCKS if block != CLASSES or open_classes]
        if self._unmask is not None:
            self._unmask(self._words, self._added, opened)
        self._total = self._layout.unflatten({block: self._words[block] for block in opened})
        try:
            self.check.of_sum([self.check.sizes.get(name, DeclaredSize()) for name in self._added]).check(self._total)
        except ProtocolError as error:
            raise RefusedError(
                "E-RUN-48",
                f"the sum cannot be the sum of updates of {len(self._added)} hospitals ({error.message}): nothing is "
                "merged. The sum does not show which hospital is responsible",
            ) from error
        return AggregationDecision()

    def total(self) -> Bundle:
        return self._total
