"""What figures look at beside accuracy: local and global models, between the rounds of a simulation.

A probe trains its silos once more, with the model that they received and the batches that they drew: what it sees of
a silo whose method keeps nothing, or that is asked in every round, is what the round had, to the bit.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot

from benchmarks.paper import paper_metrics
from consilium.research.simulate import runner
from coordinator.config.run_spec import RunSpec
from fl_core.methods.shared.class_vectors import CLASSIFIER, ScaledClassifier
from fl_core.rounds.engine import Observer
from fl_core.training.evaluation import ConcatExamples
from fl_core.training.local_data import PlainLocalData
from fl_core.types import tensor_maps
from fl_core.types.enums import TaskKind
from fl_core.types.interfaces import Examples, RoundData
from fl_core.types.records import RoundRecord
from fl_core.types.values import RoundContext, State, Tensors

DRAWN = 12
"""Test images per class whose features are kept."""
TIMED = 5
ALIKE = {"fmnist": ((0, 2, 4, 6), (5, 7, 9))}
"""Classes that mean about the same: Fashion-MNIST's T-shirt, pullover, coat and shirt; sandal, sneaker and boot."""
Seen = tuple[Tensor, Tensor, Tensor]
"""Features (N, d), their labels (N,) and the class vectors (C, d) of a model."""


class Probe(Observer, ABC):
    """Observes a simulation of a spec; `found` is what it keeps of it, as JSON has it."""

    silos: ClassVar[int] = 0

    def __init__(self, spec: RunSpec, data_root: Path | None) -> None:
        run, sets = runner.prepare_simulation(spec, data_root)
        self.runtime, self.manifest, self.sets = run.silo_runtime(), run.manifest, sets[: max(1, self.silos)]
        self.data = str(spec.data["name"])
        self.tests: Examples = sets[0].public or ConcatExamples([s.test for s in sets])
        self.n_classes = len(self.manifest.schema.classes)
        self.present = [torch.bincount(s.train.labels, minlength=self.n_classes) > 0 for s in self.sets]
        self.found: dict[str, object] = {}
        self._before, self._states = run.initial_state(), dict[int, State]()
        self._context = RoundContext(len(sets), self.n_classes)

    def opened(self, context: RoundContext, kind: TaskKind, names: object) -> None:  # noqa: ARG002
        self._context = context

    def closed(self, record: RoundRecord, server: State) -> None:
        if record.kind is TaskKind.TRAIN:
            self.look(server, last=record.round == self.manifest.rounds - 1)
        self._before = server

    @abstractmethod
    def look(self, server: State, *, last: bool) -> None:
        """Note what the figure is about, after a round of training."""

    def note(self, **values: float) -> None:
        """Append to each name's list, one number per round."""
        for name, value in values.items():
            series = self.found.setdefault(name, [])
            assert isinstance(series, list)
            series.append(None if math.isnan(value) else round(value, 5))

    def global_model(self, server: State) -> nn.Module:
        method = self.runtime.method
        return method.global_model(self.runtime.reset_model(), method.broadcast(server)).eval()

    def training(self, k: int) -> Callable[[], nn.Module]:
        """Make what trains silo k as this round did, and returns its model: scratch until the next one is made."""
        method, own = self.runtime.method, self.sets[k]
        context = self._context.for_silo(k, self.manifest.seed, self.manifest.members[k].prototypes)
        data = PlainLocalData(RoundData(own.train, own.test, self.manifest.train, context))
        msg = method.broadcast(self._before)
        model = self.runtime.reset_model()
        state = self._states[k] if k in self._states else method.init_silo(model, context)

        def train() -> nn.Module:
            self.runtime.reset_model()
            self.bundle, self._states[k] = method.local(model, msg, state, data, context)
            net = method.personal(model, msg, self._states[k], data, context)
            return (net.model if isinstance(net, ScaledClassifier) else net).eval()

        self.held = sum(map(_numbers, (tensor_maps.copy_state(model), *msg.values(), *state.values())))
        return train

    def local_model(self, k: int) -> nn.Module:
        return self.training(k)()


def _numbers(tensors: Tensors) -> int:
    return sum(value.numel() for value in tensors.values())


def rows_of(model: nn.Module) -> Tensor:
    """Return a model's class vectors (C, d): those of a fixed head, or its head's weights."""
    rows = getattr(model, CLASSIFIER, None)
    return (model.head.weight if rows is None else rows).detach().clone()  # type: ignore[union-attr,operator]


def features(model: nn.Module, examples: Examples) -> tuple[Tensor, Tensor]:
    """Return the features (N, d) of all examples, and their labels (N,)."""
    index = torch.arange(len(examples))
    with torch.no_grad():
        z = torch.cat([model.features(examples.batch(part)[0]) for part in index.split(1000)])  # type: ignore[operator]
    return z, examples.labels


class Angles(Probe):
    """Mean angles in degrees after each round, of the global model and of three silos' after training.

    existing, missing: between class vectors of classes that a silo has, or lacks   features: between class means, of
    all classes in the global model, of the silo's own in a local one.
    """

    silos = 3

    def look(self, server: State, *, last: bool) -> None:  # noqa: ARG002
        local = dict[str, list[float]]()
        for k, present in enumerate(self.present):
            model = self.local_model(k)
            for name, angle in paper_metrics.classifier_angles(rows_of(model), present).items():
                local.setdefault(name, []).append(angle)
            own = features(model, self.sets[k].test)
            local.setdefault("features", []).append(paper_metrics.feature_angle(*own, self.n_classes))
        model = self.global_model(server)
        rows = rows_of(model)
        each = [paper_metrics.classifier_angles(rows, present) for present in self.present]
        seen = {name: _mean([angles[name] for angles in each]) for name in ("existing", "missing")}
        seen["features"] = paper_metrics.feature_angle(*features(model, self.tests), self.n_classes)
        self.note(**{f"global_{name}": value for name, value in seen.items()})
        self.note(**{f"local_{name}": _mean(values) for name, values in local.items()})


class Proxies(Probe):
    """How the class vectors of one silo that trains alone lie after each round: MAP, Figure 6.

    norm and moved: mean length of a class vector, and of its way in the round, of classes that the silo has and lacks;
    o_o, o_m, m_m: mean distances (`paper_metrics.proxy_statistics`).
    """

    silos = 1

    def look(self, server: State, *, last: bool) -> None:  # noqa: ARG002
        before, (present,) = getattr(self, "_rows", None), self.present
        self._rows = rows = rows_of(self.local_model(0))
        found = paper_metrics.proxy_statistics(rows, present)
        norms = torch.tensor(found["norms"])
        way = torch.full_like(norms, math.nan) if before is None else (rows - before).norm(dim=1)
        for name, values in (("norm", norms), ("moved", way)):
            self.note(**{f"{name}_observed": float(values[present].mean())})
            self.note(**{f"{name}_missing": float(values[~present].mean())})
        self.note(**{name: float(str(found[name])) for name in ("o_o", "o_m", "m_m")})


class Burden(Probe):
    """What the last round costs a silo: CPU seconds of its training, millions of numbers held and sent.

    held: the model in training, what was received and what the silo keeps; not what training itself copies.
    seconds: the least of five times, of the first silo.
    """

    silos = 1

    def look(self, server: State, *, last: bool) -> None:  # noqa: ARG002
        if self._context.round < self.manifest.rounds - 2:
            return  # two rounds: what a silo keeps is there in the second
        train, taken = self.training(0), list[float]()
        for _ in range(TIMED if last else 1):
            start = time.process_time()
            train()
            taken.append(time.process_time() - start)
        sent = sum(_numbers(part.total) for part in self.bundle.values())
        self.found |= {"seconds": round(min(taken), 5), "held": self.held / 1e6, "sent": sent / 1e6}


class Features(Probe):
    """Where features lie in the end: of the global model, and of two silos' after their training.

    points: by model, of the first test images of each class (of a silo's: of its classes): features "x" (of more than
    three numbers their first two principal components, of all models together), labels "y", and class vectors "rows"
    where features are drawn as they are
    similarity: cosines of the global model's class vectors
    alike: their mean over pairs of classes that mean about the same, minus that over all other pairs
    agreement: mean over classes that both silos hold of the cosine between their class means
    spread: mean distance of a feature of length 1 from its class's mean, in the global model
    """

    silos = 2

    def look(self, server: State, *, last: bool) -> None:
        means, seen = list[Tensor](), dict[str, Seen]()
        for k, present in enumerate(self.present):
            model = self.local_model(k)  # in every round: some methods keep a state
            if last:
                z, y = features(model, self.tests)
                means.append(paper_metrics.class_means(z, y, self.n_classes))
                held = _first(y) & present[y]
                seen[f"silo {k}"] = z[held], y[held], rows_of(model)
        if not last:
            return
        if self.runtime.method.has_global_model:
            self._global(server, seen)
        both = self.present[0] & self.present[-1]
        if len(means) > 1 and bool(both.any()):
            cosines = (normalize(means[0], dim=1) * normalize(means[1], dim=1)).sum(1)[both]
            self.found["agreement"] = round(float(cosines.mean()), 4)
        self.found["points"] = _drawn(seen)

    def _global(self, server: State, seen: dict[str, Seen]) -> None:
        model = self.global_model(server)
        (z, y), rows = features(model, self.tests), rows_of(model)
        seen["global"] = z[_first(y)], y[_first(y)], rows
        unit = normalize(z, dim=1)
        self.found["spread"] = round(
            float((unit - paper_metrics.class_means(unit, y, self.n_classes)[y]).norm(dim=1).mean()), 4
        )
        cosines = normalize(rows, dim=1) @ normalize(rows, dim=1).T
        self.found["similarity"] = [[round(v, 3) for v in row] for row in cosines.tolist()]
        if groups := ALIKE.get(self.data):
            alike = torch.zeros_like(cosines, dtype=torch.bool)
            for group in groups:
                alike[torch.tensor(group)[:, None], torch.tensor(group)] = True
            other = ~torch.eye(self.n_classes, dtype=torch.bool)
            gap = cosines[alike & other].mean() - cosines[~alike].mean()
            self.found["alike"] = round(float(gap), 4)


def _first(y: Tensor) -> Tensor:
    """Mark the first `DRAWN` examples of each class."""
    return one_hot(y).cumsum(0).gather(1, y[:, None])[:, 0] <= DRAWN


def _drawn(seen: Mapping[str, Seen]) -> dict[str, dict[str, object]]:
    together = torch.cat([z for z, _, _ in seen.values()])
    plain = together.shape[1] <= 3
    middle = together.mean(0)
    axes = torch.eye(together.shape[1]) if plain else torch.linalg.svd(together - middle, full_matrices=False)[2][:2].T
    return {
        name: {
            "x": [[round(v, 3) for v in row] for row in ((z if plain else z - middle) @ axes).tolist()],
            "y": y.tolist(),
            "rows": [[round(v, 3) for v in row] for row in rows.tolist()] if plain else [],
        }
        for name, (z, y, rows) in seen.items()
    }


def _mean(values: list[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


PROBES: Mapping[str, type[Probe]] = {"angles": Angles, "proxies": Proxies, "burden": Burden, "features": Features}
