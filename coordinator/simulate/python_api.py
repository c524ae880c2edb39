"""Simulations from Python: the words of the command line as arguments, and what they stand for as objects."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from coordinator.config.hydra_config import GROUPS, compose_simulation
from coordinator.config.run_spec import RunSpec
from coordinator.simulate import results, runner
from coordinator.simulate.engine import SimulationEngine
from coordinator.simulate.results import Result, ResultFolder
from coordinator.simulate.runner import tracked
from fl_core import datasets
from fl_core.datasets.partition.by_class import Labels
from fl_core.errors import ConfigError
from fl_core.extensions import loading, user_partition
from fl_core.extensions.user_data import ArrayData, Split
from fl_core.extensions.user_partition import Given, OwnPartition, Shares
from fl_core.methods import METHODS
from fl_core.methods.fedavg import FedAvg
from fl_core.models import MODELS, ModelOptions
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.types.enums import TaskKind
from fl_core.types.records import RoundRecord
from fl_core.types.values import Examples, State
from privacy import profiles
from privacy.accounting import uncertainty

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Partition = OwnPartition | type[OwnPartition] | Callable[[Labels, Labels], Shares] | Sequence[Any]
Data = ArrayData | type[ArrayData] | tuple[Split | Examples, Split | Examples]


@dataclass(frozen=True, slots=True)
class Progress:
    """What `simulate(progress=...)` is told after each round.

    done: rounds   accuracy: of the model that the round began with, None where there is none or noise hides it.
    """

    done: int
    rounds: int
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """A finished simulation."""

    result: Result
    config: RunSpec

    @property
    def manifest(self) -> RunManifest:
        return self.result.manifest

    @property
    def digest(self) -> str:
        """Return the digest of the final model: equal to the command line's for the same words."""
        return self.result.model_digest

    @property
    def summary(self) -> dict[str, object]:
        """Return what `coordinator simulate --json` prints."""
        return self.result.summary()

    @property
    def frame(self) -> pd.DataFrame:
        """Return one row per round and measure: round, measure, class, value, low, high (`results.history`)."""
        return _pandas().DataFrame(results.history(self.result), columns=list(results.COLUMNS))

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Return further tables: "silos" (examples per silo, split and class), "classes" (last accuracy per class)."""
        frame = self.frame
        last = frame[(frame.measure == "class_accuracy") & (frame["round"] == frame["round"].max())]
        return {
            "silos": _pandas().DataFrame(results.by_silo(self.result)),
            "classes": last.drop(columns=["round", "measure"]).reset_index(drop=True),
        }

    @property
    def curves(self) -> pd.DataFrame:
        """Return measures as columns and rounds as rows, without those per class; NaN where one was not measured."""
        frame = self.frame[self.frame["class"] == ""]
        return frame.pivot(index="round", columns="measure", values="value").rename_axis(columns=None)

    def plot(self) -> Figure:
        """Draw accuracy by round; a notebook shows what is returned, `.savefig(FILE)` keeps it."""
        return results.draw(self.result)

    @property
    def model(self) -> nn.Module:
        """Return a new copy of the final global model, ready to classify: x (n, *shape) -> logits (n, C), in eval mode.

        Raises ConfigError (E-CFG-08) for a method without a global model.
        """
        run = self.result.run
        if not run.method.has_global_model:
            raise ConfigError("E-CFG-08", f"expected a method with a global model, found {self.manifest.method.name}")
        return run.method.global_model(run.new_model(), run.method.broadcast(self.result.server)).eval()

    def save(self, folder: str | Path) -> None:
        """Write what `coordinator simulate --out` writes; raises as `ResultFolder.claim`."""
        place = ResultFolder(Path(folder))
        place.claim(self.config, self.manifest)
        place.write(self.result)

    def __repr__(self) -> str:
        manifest, last = self.manifest, self.result.estimates[-1]
        return f"<{manifest.name}: {manifest.rounds} rounds, accuracy {last.text()}, model {self.digest[:16]}>"


def simulate(
    method: str | FedAvg | type[FedAvg] | None = None,
    data: str | Data | None = None,
    federation: str | Partition | None = None,
    model: str | ModelOptions | type[ModelOptions] | None = None,
    *,
    data_root: str | Path | None = None,
    config_dir: str | Path | None = None,
    out: str | Path | None = None,
    engine: SimulationEngine | None = None,
    fine_tune: int = 0,
    progress: Callable[[Progress], object] | None = None,
    tracker: str | Sequence[str] = (),
    **keys: object,
) -> Simulation:
    """Run a federation in this process, as `coordinator simulate` does.

    method, model: a name, "package.module:Name", a class, or an instance, whose options are then all taken from it
    data: a name, "package.module:Name", a class or an instance below `ArrayData`, or ((x, y), (x, y)) of train and test
    federation: a name, "package.module:Name", a partition, a function of the train and test labels (n,) that returns
    shares, or the shares: positions of each silo's training examples, or (train, test) positions of each
    keys: all other words of the command line, `rounds=20, seed=0, train__lr=0.1` or `train={"lr": 0.1}`
    progress: called after each round, in this thread; what it raises ends the simulation
    tracker: "tensorboard:DIR", "mlflow:URI" or several of them, which get each round as it is closed. One that stops
    taking numbers is warned about and left out.

    Raises what the command line reports: FederationError, below all ConfigError and DataError, with its code.
    Guarantees: the same words give the same bits as the command line; no global state is left changed.
    """
    _check_keys(keys)
    root, folder = _path(data_root), _path(config_dir)
    with ExitStack() as stack:
        words = [
            *_chosen(stack, "method", method, METHODS),
            *_chosen(stack, "model", model, MODELS),
            *_data_words(stack, data),
            *(word for key, value in keys.items() for word in _words(key.replace("__", "."), value)),
        ]
        words += _federation_words(stack, federation, words, root, folder)
        spec = compose_simulation(words, folder)
        observer = None if progress is None else _observer(progress)
        where = [tracker] if isinstance(tracker, str) else tracker
        observed = stack.enter_context(tracked(where, observer, lambda text: warnings.warn(text, stacklevel=2)))
        result = runner.run(spec, root, observed, engine, fine_tune, out=_path(out), words=words)
    return Simulation(result, spec)


class _Reporter(Observer):
    def __init__(self, manifest: RunManifest, progress: Callable[[Progress], object]) -> None:
        self._noise, self._rounds, self._progress = profiles.result_noise(manifest), manifest.rounds, progress

    def closed(self, record: RoundRecord, server: State) -> None:
        del server
        found = uncertainty.accuracy(record.correct, record.examples, self._noise.of(record.included))
        if record.kind is TaskKind.TRAIN:
            self._progress(Progress(record.round + 1, self._rounds, found.point))


def _observer(progress: Callable[[Progress], object]) -> Callable[[RunManifest], Observer]:
    return lambda manifest: _Reporter(manifest, progress)


def _check_keys(keys: Mapping[str, object]) -> None:
    for key, value in keys.items():
        if key.startswith("_") or key.endswith("_"):
            raise ConfigError("E-CFG-01", f"expected keys like rounds, train__lr, found {key!r}")
        if callable(value):
            raise ConfigError("E-CFG-02", f"{key}: expected a plain value, found {type(value).__name__}")


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


# ---- words -----------------------------------------------------------------------------------------------------------


def _words(key: str, value: object) -> list[str]:
    """Write a key and its value as the command line has them; a mapping gives a word for each of its keys."""
    if isinstance(value, Mapping):
        named = [f"{key}={value['name']}"] if key in GROUPS and "name" in value else []
        inner = ((k, v) for k, v in value.items() if not (named and k == "name"))
        return [*named, *(word for k, v in inner for word in _words(f"{key}.{k}", v))]
    if key in GROUPS:
        if not isinstance(value, str):
            raise ConfigError("E-CFG-02", f"{key}: expected a name, found {value!r}")
        return [f"{key}={value}"]
    return [f"{key}={_hydra(key, value)}"]


def _hydra(key: str, value: object) -> str:
    """Write a value in Hydra's grammar, text in quotes, so that nothing in it is taken for an operator."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and not math.isnan(value)):
        return repr(value)
    if isinstance(value, str | Path):
        return _quoted(key, str(value))
    if isinstance(value, list | tuple):
        return f"[{','.join(_hydra(key, v) for v in value)}]"
    raise ConfigError("E-CFG-02", f"{key}: expected a plain value, found {value!r}"[:300])


def _quoted(key: str, text: str) -> str:
    if "${" in text:
        raise ConfigError("E-CFG-02", f"{key}: expected text, found the sign of an interpolation in {text!r}"[:300])
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + (m[2] and "\\'"), text) + "'"


def _chosen(stack: ExitStack, group: str, value: object, ours: Mapping[str, type]) -> list[str]:
    """Name a method or a model, and all options of an instance."""
    if value is None or isinstance(value, str):
        return [] if value is None else [f"{group}={value}"]
    kind = value if isinstance(value, type) else type(value)
    name = next((name for name, known in ours.items() if known is kind), None)
    name = name or stack.enter_context(loading.given(group, kind))
    if isinstance(value, type) or not is_dataclass(value):
        return [f"{group}={name}"]
    return [f"{group}={name}", *(w for f in fields(value) for w in _words(f"{group}.{f.name}", getattr(value, f.name)))]


def _data_words(stack: ExitStack, data: object) -> list[str]:
    if data is None or isinstance(data, str):
        return [] if data is None else [f"data={data}"]
    if isinstance(data, type):
        return [f"data={stack.enter_context(loading.given('data', data))}"]
    if isinstance(data, tuple) and len(data) == 2:
        data = _InMemory(*(_arrays(half) for half in data))
    if not isinstance(data, ArrayData):
        raise ConfigError("E-CFG-02", f"data: expected a name, ArrayData or (train, test), found {type(data).__name__}")
    digest = data.digest() if isinstance(data, _InMemory) else loading.class_digest(type(data))
    name = f"memory:{'arrays' if isinstance(data, _InMemory) else type(data).__name__}_{digest[:16]}"
    return [f"data={stack.enter_context(loading.given('data', data, name, digest))}"]


def _arrays(half: object) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(half, Examples):
        half = half.batch(torch.arange(len(half)))
    if not isinstance(half, tuple | list) or len(half) != 2:
        raise ConfigError("E-CFG-02", f"data: expected (x, y) of train and of test, found {type(half).__name__}")
    try:
        x, y = torch.as_tensor(half[0]), torch.as_tensor(half[1])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("E-CFG-02", f"data: expected arrays (x, y), found others: {error}") from error
    return x, y


class _InMemory(ArrayData):
    """Two pairs of arrays; as many classes as the largest label says."""

    def __init__(self, train: tuple[torch.Tensor, torch.Tensor], test: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._halves = train, test
        highest = max((int(y.max()) for _, y in self._halves if y.numel()), default=0)
        self.shape = tuple(train[0].shape[1:])  # type: ignore[misc]
        self.classes = tuple(map(str, range(max(2, min(highest, 100_000) + 1))))  # type: ignore[misc]

    def read(self, root: Path | None) -> tuple[Split, Split]:
        del root
        return self._halves

    def digest(self) -> str:
        hasher = blake3()
        for values in (v for half in self._halves for v in half):
            hasher.update(f"{values.dtype} {tuple(values.shape)}".encode())
            hasher.update(values.detach().cpu().contiguous().numpy().tobytes())
        return hasher.hexdigest()


def _federation_words(
    stack: ExitStack, federation: object, words: Sequence[str], root: Path | None, config_dir: Path | None
) -> list[str]:
    if federation is None or isinstance(federation, str):
        return [] if federation is None else [f"federation={federation}"]
    if isinstance(federation, type):
        return [f"federation={stack.enter_context(loading.given('partition', federation))}"]
    if is_dataclass(federation) and hasattr(federation, "partition"):
        name = stack.enter_context(loading.given("partition", type(federation)))
        options = [w for f in fields(federation) for w in _words(f"federation.{f.name}", getattr(federation, f.name))]
        return [f"federation={name}", *options]
    labels, n_classes = _labels(words, root, config_dir)
    shares: Any = federation(*labels) if callable(federation) else federation
    if not isinstance(shares, Sequence | np.ndarray) or not len(shares):
        raise ConfigError("E-CFG-02", f"federation: expected shares of at least one silo, found {shares!r}"[:300])
    pairs = user_partition.checked("federation", list(shares), len(shares), labels, n_classes, seed=0)
    digest = blake3(b"".join(part.tobytes() + b"|" for pair in pairs for part in pair)).hexdigest()
    given = Given(len(pairs), tuple(pairs))
    name = f"memory:shares_{digest[:16]}"
    return [f"federation={stack.enter_context(loading.given('partition', given, name, digest))}"]


def _labels(words: Sequence[str], root: Path | None, config_dir: Path | None) -> tuple[tuple[Labels, Labels], int]:
    """Return the labels of the whole data, train and test, in the order in which partitions see them."""
    probe = _Probe()
    with loading.given("partition", probe, "memory:probe"):
        spec = compose_simulation([*words, "federation=memory:probe"], config_dir)
        runner.read_silos(spec, root, datasets.load_all)
    assert probe.seen is not None
    return probe.seen


class _Probe:
    """A partition of one silo that remembers what it was asked to divide."""

    silos = 1

    def __init__(self) -> None:
        self.seen: tuple[tuple[Labels, Labels], int] | None = None

    def partition(self, train: Labels, test: Labels, n_classes: int, seed: int) -> Shares:
        del seed
        self.seen = (train, test), n_classes
        return [(np.arange(len(train)), np.arange(len(test)))]


def _pandas() -> Any:  # noqa: ANN401 - pandas has no types of its own
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError("E-CFG-08", "expected pandas, found none: pip install 'consilium-fl[tables]'") from error
    return pd
