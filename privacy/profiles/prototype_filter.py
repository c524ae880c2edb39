"""Filter of the sums that a hospital submits: it suppresses hidden classes, small classes and survey questions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fl_core.survey.answers import known_patients
from fl_core.tensors import Tensor, torch
from fl_core.training.local_data import LocalDataWrapper
from fl_core.types.enums import Split
from fl_core.types.interfaces import DataFactory, LocalData
from fl_core.types.survey import MIN_PATIENTS
from fl_core.types.targets import UNKNOWN, is_multi_label
from fl_core.types.values import BatchSums, ClassSums, MomentSums, Query, SurveySums, Tensors


@dataclass(frozen=True, slots=True)
class DisclosureLimits:
    """A hospital's limits on the sums that it submits.

    Attributes:
        hidden: positions of classes that are suppressed everywhere
        min_count: minimum examples of a class for its prototype
        min_examples: minimum examples of a class in exact sums of products (BatchSums), since a sum over one example is
            that example. Smaller classes are left out of all sums, as if the hospital had none
        noise_leaves: rows of hidden classes keep their noise, since the other silos rely on it (shared noise)
        answered: names of a survey's questions that are answered; None: all. Hidden classes suppress `classes`
        least_patients: patients in the smallest number that a survey releases without noise
        named: the data name patients   records_are_patients: the hospital declares that each record is one patient
    """

    hidden: frozenset[int] = frozenset()
    min_count: float = 0.0
    min_examples: int = 0
    noise_leaves: bool = False
    answered: frozenset[str] | None = None
    least_patients: int = MIN_PATIENTS
    named: bool = True
    records_are_patients: bool = False

    def of(self, query: SurveySums) -> SurveySums:
        """Return a survey with only the questions and numbers that these limits allow."""
        answered = frozenset(q.name for q in query.questions if query.answers(q))
        if self.answered is not None:
            answered &= self.answered
        if self.hidden:
            answered -= {"classes"}
        least = max(query.least, self.least_patients)
        query = replace(query, allowed=answered, least=least, records_are_patients=self.records_are_patients)
        return known_patients(query, self.named)


NO_LIMITS = DisclosureLimits()


class PrototypeFilter(LocalDataWrapper):
    """Leaves withheld classes out of sums over training examples."""

    def __init__(self, data: LocalData, withheld: DisclosureLimits) -> None:
        super().__init__(data)
        self._withheld = withheld
        self._hidden, self._least = sorted(withheld.hidden), withheld.min_count
        self._least_exact, self._noise_leaves = withheld.min_examples, withheld.noise_leaves

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        """Sum a query; hidden classes are rows of zeros with weight 0, as without examples."""
        if isinstance(query, SurveySums):
            return super().sum(self._withheld.of(query))
        if split is not Split.TRAIN:
            return super().sum(query, bound=bound, split=split)
        if isinstance(query, BatchSums):
            return super().sum(self._without_left_out(query), bound=bound, split=split)
        if isinstance(query, MomentSums):
            return self._moments(query)
        sums = super().sum(query, bound=bound, split=split)
        if not isinstance(query, ClassSums):
            return sums
        kept = sums["count"] >= self._least
        kept[self._hidden] = False
        return {
            name: torch.where(kept.view(-1, *[1] * (v.dim() - 1)), v, torch.zeros_like(v)) for name, v in sums.items()
        }

    def contributes(self) -> Tensor:
        """Leave out classes that some query would leave out: hidden ones, and those below either minimum."""
        shown = super().contributes() & (self.class_counts() >= max(self._least, self._least_exact))
        shown[self._hidden] = False
        return shown

    def _moments(self, query: MomentSums) -> Tensors:
        """Use zero vectors for hidden classes, so that their rows contain only noise."""
        shown = torch.ones(query.n_classes, dtype=torch.float64)
        shown[self._hidden] = 0.0
        if self._least_exact:  # a run without privacy, with the queries of private runs
            shown[self.class_counts() < self._least_exact] = 0.0

        def vectors(x: Tensor, y: Tensor) -> Tensor:
            rows = query.vectors(x, y)
            return torch.where(shown.to(y.device)[y].unsqueeze(1) > 0, rows, torch.zeros_like(rows))

        sums = super().sum(replace(query, vectors=vectors))
        return sums if self._noise_leaves or query.joint else {**sums, "b": sums["b"] * shown.unsqueeze(1)}

    def _without_left_out(self, query: BatchSums) -> BatchSums:
        """Restrict a query to classes with enough examples; only examples that the query reads are counted."""
        counts, kept = self.class_counts(), query.kept
        n_classes = len(counts)
        if kept is not None:
            query_of_counts = BatchSums(
                lambda x, y: {"n": torch.bincount(y[kept(x, y).to(y.device)], minlength=n_classes)}
            )
            counts = super().sum(query_of_counts)["n"]
        if self.multi_label:  # the sums of a label are over all records in which it is known
            counts = super().sum(BatchSums(lambda _, y: {"n": (y != UNKNOWN).sum(0)}))["n"]
        shown = counts >= self._least_exact
        shown[self._hidden] = False
        if bool((shown | (counts == 0)).all()):
            return query

        def sums(x: Tensor, y: Tensor) -> Tensors:
            if is_multi_label(y):
                return query.sums(x, torch.where(shown.to(y.device), y, UNKNOWN))
            shown_rows = shown.to(y.device)[y]
            return query.sums(x[shown_rows.to(x.device)], y[shown_rows])

        return replace(query, sums=sums)


def with_prototype_filter(factory: DataFactory, withheld: DisclosureLimits) -> DataFactory:
    surveys = withheld.answered is not None or withheld.least_patients > MIN_PATIENTS
    if not withheld.hidden and withheld.min_count <= 0 and withheld.min_examples <= 1 and not surveys:
        return factory
    return lambda data: PrototypeFilter(factory(data), withheld)
