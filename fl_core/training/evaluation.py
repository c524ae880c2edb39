"""A silo's measurements of a model, as weighted sums like every other part of an update.

| part            | total                              | weight                                                   |
|-----------------|------------------------------------|----------------------------------------------------------|
| metrics         | correct answers per class (C,),    | test examples per class (C,), of the model received      |
|                 | or per label over those who looked |                                                          |
| clinical        | confusion matrix, histograms of    | test examples (), or answers about labels, of the model  |
|                 | scores: training/clinical.py       | received; 0 where the silo withholds them; only in runs  |
|                 |                                    | with metrics=clinical                                    |
| personal        | a, a^2 (and what rounding cut off) | 1 per silo, 0 without test examples                      |
| personal_public | PM(L), PM(V) and their squares     | 1 per silo, 0 without public examples of its classes     |
| personal_ga     | GA and its square                  | 1 per silo, 0 where the public test set has no example   |
| own             | correct answers per class (C,) of  | test examples per class (C,), 0 without an own model     |
|                 | its own model and of the received  |                                                          |
| paired          | n d and n^2 v of delong.py         | n: test examples () whose scores were compared           |
| by_hospital     | 1 for each silo that lets its own  | the same; in evaluations of runs that ask for it         |
|                 | numbers be shown beside the sums   |                                                          |

a is a personal model's accuracy on its silo's own test split; mean and standard deviation over silos follow from the
sums (`personal_scores`). With counts n_kc of silo k's training examples, on the public test set,

    acc = sum_c a_k(c) correct_c / sum_c a_k(c) count_c     PM(L): a_k(c) = n_kc / n_k    PM(V): a_k(c) = [n_kc > 0]
    GA of a method whose model is personal (`Traits.ga_is_personal`): a_k(c) = 1

PA: Fan, Yao et al., "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data", NeurIPS 2023.
PM(L), PM(V): Dai, Chen, Li, Heinecke, Sun and Xu, "Tackling Data Heterogeneity in Federated Learning with Class
Prototypes", AAAI 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fl_core.tensors import Tensor, nn, torch
from fl_core.training.clinical import answers, clinical_metrics, clinical_part, no_clinical_part
from fl_core.training.delong import paired_auc
from fl_core.types.enums import Split
from fl_core.types.interfaces import LocalData
from fl_core.types.metric_parts import (
    BY_HOSPITAL,
    CLINICAL_PART,
    METRICS,
    OWN,
    PAIRED,
    PERSONAL,
    PERSONAL_GA,
    PERSONAL_PUBLIC,
)
from fl_core.types.records import HospitalResult, OwnModels
from fl_core.types.targets import FOUND, NOT_FOUND, UNKNOWN, class_counts, has_class, is_multi_label
from fl_core.types.values import BatchSums, Bundle, ClassSums, Examples, Part, Tensors

_SCORES = {PERSONAL: ("pa",), PERSONAL_PUBLIC: ("pm_l", "pm_v"), PERSONAL_GA: ("ga",)}


def evaluate(model: nn.Module, data: LocalData, n_classes: int, split: Split = Split.TEST) -> Part:
    """Count correct answers per class on the silo's test split, as one joint query.

    Returns Part({"correct": (C,)}, weight = test examples per class (C,)). So the accuracy of a sum of parts is over
    the union of all silos' test sets, not a mean of accuracies. With several labels at once, each label is counted over
    the examples in which it is known, and a logit above 0 predicts it; such test examples must not be private.
    """
    model.eval()
    if data.multi_label:

        def by_label(x: Tensor, y: Tensor) -> Tensors:
            with torch.no_grad():
                predicted = model(x) > 0
            labelled = y != UNKNOWN
            return {"correct": ((predicted == (y == FOUND)) & labelled).sum(0), "known": labelled.sum(0)}

        counts = data.sum(BatchSums(by_label), split=split)
        return Part({"correct": counts["correct"].float()}, counts["known"].float())

    def correct(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(x)
        return (logits.argmax(1) == y).float().unsqueeze(1)

    sums = data.sum(ClassSums(correct, n_classes), bound=1.0, split=split)
    return Part({"correct": sums["sum"].squeeze(1)}, sums["count"])


def evaluate_global(model: nn.Module | None, data: LocalData, n_classes: int, clinical: bool) -> dict[str, Part]:
    """Measure the received model; None: the method has none, and the parts have weight 0.

    clinical: also compute clinical metrics in the same pass, if the test examples are not private.
    """
    if model is None:
        nothing = {METRICS: Part({"correct": torch.zeros(n_classes)}, torch.zeros(n_classes))}
        return nothing | ({CLINICAL_PART: no_clinical_part(n_classes, data.multi_label)} if clinical else {})
    if not clinical:
        return {METRICS: evaluate(model, data, n_classes)}
    part = clinical_part(model, data, n_classes)
    correct, of = answers(part.total["confusion"])
    return {METRICS: Part({"correct": correct}, of), CLINICAL_PART: part}


def consent() -> Part:
    """Create the part by which a silo allows its own numbers to be shown; apply `withheld` to it for a refusal."""
    return Part({"shown": torch.tensor(1.0)}, torch.tensor(1.0))


def no_own_parts(n_classes: int, paired: bool) -> dict[str, Part]:
    """Return the parts of a silo without a local model."""
    zeros, nothing = torch.zeros(n_classes), torch.tensor(0.0)
    parts = {OWN: Part({"own": zeros, "measured": zeros.clone()}, zeros.clone())}
    if paired:
        parts[PAIRED] = Part({"difference": nothing, "square": nothing.clone()}, nothing.clone())
    return parts


def evaluate_own(
    received: nn.Module, personal_model: nn.Module | None, data: LocalData, n_classes: int, paired: bool
) -> dict[str, Part]:
    """Measure the received model and the silo's local one on the same test images, which must not be private.

    paired: also the difference of their macro AUC, from scores that stay here.
    """
    parts = no_own_parts(n_classes, paired)
    if personal_model is None:
        return parts
    models, seen = (personal_model.eval(), received.eval()), list[tuple[Tensor, Tensor, Tensor]]()

    def answered(x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.no_grad():
            logits: list[Tensor] = [model(x) for model in models]
        if paired:  # a comparison of areas needs all scores at once
            score = torch.sigmoid if data.multi_label else partial(torch.softmax, dim=1)
            seen.append((*(score(z.cpu().double()) for z in logits), y.cpu()))  # type: ignore[arg-type]
        return logits

    def by_label(x: Tensor, y: Tensor) -> Tensors:
        known = y != UNKNOWN
        own_correct, measured = ((((z > 0) == (y == FOUND)) & known).sum(0) for z in answered(x, y))
        return {"own": own_correct, "measured": measured, "known": known.sum(0)}

    def right(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([(z.argmax(1) == y).float() for z in answered(x, y)], 1)

    if data.multi_label:
        counts = {name: v.float() for name, v in data.sum(BatchSums(by_label), split=Split.TEST).items()}
        parts[OWN] = Part({"own": counts["own"], "measured": counts["measured"]}, counts["known"])
    else:
        sums = data.sum(ClassSums(right, n_classes), bound=math.sqrt(2), split=Split.TEST)
        parts[OWN] = Part({"own": sums["sum"][:, 0].clone(), "measured": sums["sum"][:, 1].clone()}, sums["count"])
    if not seen:
        return parts
    mine, theirs, labels = (torch.cat(column) for column in zip(*seen, strict=True))
    if (areas := paired_auc(theirs, mine, labels)) is not None:
        n = float(areas.images)
        total = {"difference": torch.tensor(n * areas.difference), "square": torch.tensor(n * n * areas.variance)}
        parts[PAIRED] = Part(total, torch.tensor(n))
    return parts


def own_models(parts: Bundle) -> OwnModels | None:
    """Read the results of hospitals' local models from an update or a sum; None if it has none."""
    if OWN not in parts or float(parts[OWN].weight.sum()) <= 0:
        return None
    personal, paired = parts[OWN], parts.get(PAIRED)
    mine, theirs, of = (tuple(v.tolist()) for v in (personal.total["own"], personal.total["measured"], personal.weight))
    scores = OwnModels(mine, theirs, of)
    if paired is None or float(paired.weight) <= 0:
        return scores
    difference, square = (float(paired.total[name]) for name in ("difference", "square"))
    return replace(scores, images=float(paired.weight), difference=difference, square=square)


def shown_result(update: Bundle) -> HospitalResult | None:
    """Read the results that a silo shows under its name from a checked update; None if it does not."""
    if BY_HOSPITAL not in update or float(update[BY_HOSPITAL].weight) != 1.0:
        return None
    metrics, clinical = update[METRICS], update.get(CLINICAL_PART)
    return HospitalResult(
        tuple(metrics.total["correct"].tolist()),
        tuple(metrics.weight.tolist()),
        None if clinical is None else clinical_metrics(clinical),
        own_models(update),
    )


def withheld(part: Part) -> Part:
    """Return zeros of weight 0 in the form of a part, as from a silo without test examples."""
    return Part({name: torch.zeros_like(v) for name, v in part.total.items()}, torch.zeros_like(part.weight))


def evaluate_personal(model: nn.Module, data: LocalData, n_classes: int) -> dict[str, Part]:
    """Measure a personal model on the silo's own test split and, if there is one, on the public test set.

    Class counts are requested only if there is a public test set.
    """
    by_class, every = evaluate(model, data, n_classes), torch.ones(n_classes)
    parts = {PERSONAL: _scored(PERSONAL, [(by_class, every)])}
    public = evaluate(model, data, n_classes, Split.GLOBAL)
    counts = data.class_counts().cpu() if float(public.weight.sum()) > 0 else torch.zeros(n_classes)
    label, vote = counts / counts.sum().clamp(min=1.0), (counts > 0).float()
    return parts | {
        PERSONAL_PUBLIC: _scored(PERSONAL_PUBLIC, [(public, label), (public, vote)]),
        PERSONAL_GA: _scored(PERSONAL_GA, [(public, every)]),
    }


def weighted_accuracy(correct: Tensor, count: Tensor, weight: Tensor) -> float:
    """Return sum_c a(c) correct_c / sum_c a(c) count_c, in [0, 1] even with added noise; NaN without examples."""
    a = weight.double().cpu()
    below = float((a * count.double().cpu()).sum())
    if below <= 0:
        return math.nan
    return min(1.0, max(0.0, float((a * correct.double().cpu()).sum()) / below))


def _scored(part: str, measured: Sequence[tuple[Part, Tensor]]) -> Part:
    """Combine one silo's accuracies and their squares.

    The float32 rounding error of each square is also kept: a standard deviation is the difference of two similar
    numbers.
    """
    values = [weighted_accuracy(p.total["correct"], p.weight, a) for p, a in measured]
    total: dict[str, Tensor] = {}
    complete = not any(math.isnan(v) for v in values)
    for name, value in zip(_SCORES[part], values, strict=True):
        total[name] = torch.tensor(value if complete else 0.0, dtype=torch.float32)
        square = total[name].double().square()
        total[f"{name}_square"] = square.float()
        total[f"{name}_square_rest"] = (square - square.float().double()).float()
    return Part(total, torch.tensor(1.0 if complete else 0.0))


def personal_scores(total: Bundle) -> dict[str, float]:
    """Read means and population standard deviations over silos from the sums: pa, pa_std, pm_l, pm_l_std, pm_v, ...

    Empty if nothing personal was measured. Guarantees: within 1e-5 of the same numbers from all silos' accuracies.
    """
    scores: dict[str, float] = {}
    for part, names in _SCORES.items():
        if part not in total or (n := float(total[part].weight)) <= 0:
            continue
        for name in names:
            mean = float(total[part].total[name]) / n
            square = sum(float(total[part].total[f"{name}_square{rest}"]) for rest in ("", "_rest")) / n
            scores[name], scores[f"{name}_std"] = mean, math.sqrt(max(0.0, square - mean * mean))
    return scores


def scarce_classes(labels: Tensor, n_classes: int, least: int) -> Tensor:
    """Return the classes (C,) that have test examples, but fewer than `least`.

    For several labels at once: labels that were found, or not found, in fewer than `least` examples.
    """
    tested = class_counts(labels, n_classes)
    few = (tested > 0) & (tested < least)
    if is_multi_label(labels):
        absent = (labels == NOT_FOUND).sum(0)
        few |= (absent > 0) & (absent < least)
    return few


def scarce_class_names(labels: Tensor, classes: Sequence[str], least: int) -> list[str]:
    """Return the names of `scarce_classes`."""
    few = scarce_classes(labels, len(classes), least).tolist()
    return [name for name, some in zip(classes, few, strict=True) if some]


class WithoutScarceClasses(Examples):
    """Test examples without the classes that have fewer than `least`, for every measurement of a model."""

    def __init__(self, examples: Examples, n_classes: int, least: int) -> None:
        self._examples, labels, few = examples, examples.labels, scarce_classes(examples.labels, n_classes, least)
        gone = few.expand_as(labels) if is_multi_label(labels) else has_class(labels) & few[labels.clamp(min=0)]
        self.labels, self.groups = labels.masked_fill(gone, UNKNOWN), examples.groups

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self._examples.batch(index, augment)[0], self.labels[index]


class ConcatExamples(Examples):
    """The examples of several silos as one: the public test set of a simulation."""

    def __init__(self, parts: Sequence[Examples]) -> None:
        self.labels = torch.cat([p.labels for p in parts]) if parts else torch.zeros(0, dtype=torch.int64)
        self._parts = tuple(parts)
        self._ends = torch.tensor([len(p) for p in parts]).cumsum(0)

    def batch(self, index: Tensor, augment: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        owner = torch.searchsorted(self._ends, index, right=True).clamp(max=len(self._parts) - 1)
        x: Tensor | None = None
        for k in sorted(set(owner.tolist())) or [0]:
            mine = owner == k
            start = int(self._ends[k - 1]) if k else 0
            rows, _ = self._parts[k].batch(index[mine] - start, augment)
            x = rows.new_empty(len(index), *rows.shape[1:]) if x is None else x
            x[mine] = rows
        assert x is not None
        return x, self.labels[index]
