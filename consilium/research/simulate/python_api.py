"""Simulations from Python: takes the command line's settings as arguments, or objects in place of names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from consilium.report.curves import COLUMNS
from consilium.research.simulate import results, runner
from consilium.research.simulate.data_in_memory import DataInMemory, halves_of
from consilium.research.simulate.engine import SimulationEngine
from consilium.research.simulate.results import Result, ResultFolder
from consilium.research.simulate.round_printer import RoundPrinter, is_watched
from consilium.research.simulate.runner import tracked
from coordinator.config.hydra_config import compose_simulation
from coordinator.config.keywords import Keywords
from coordinator.config.run_spec import RunSpec
from coordinator.lead.survey_answers import SurveyAnswers
from coordinator.lead.surveys import answers_of
from fl_core import datasets
from fl_core.datasets.partition.by_class import Labels
from fl_core.errors import ConfigError
from fl_core.errors.extras import require
from fl_core.extensions import loading
from fl_core.extensions.user_data import ArrayData, Split
from fl_core.extensions.user_partition import OwnPartition, Shares
from fl_core.methods import METHODS
from fl_core.methods.fedavg import FedAvg
from fl_core.models import MODELS, ModelOptions
from fl_core.models.own import Make, maker, options_of
from fl_core.rounds.engine import Observer
from fl_core.rounds.manifest import RunManifest
from fl_core.types.records import RoundRecord
from fl_core.types.values import Examples, State
from privacy import profiles
from privacy.accounting import uncertainty
from service_core.progress import still_working

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Partition = OwnPartition | type[OwnPartition] | Callable[[Labels, Labels], Shares] | Sequence[Any]
Half = Split | Examples | Sequence[Any] | torch.utils.data.Dataset[Any]
Data = ArrayData | type[ArrayData] | tuple[Half, Half] | Mapping[str, Half]


@dataclass(frozen=True, slots=True)
class Progress:
    """Passed to `simulate(progress=...)` after each round.

        consilium.simulate("fedmr", "digits", "p5c2", progress=lambda at: print(at.done, at.rounds, at.accuracy))

    done: finished rounds   accuracy: of the model before the round, None if there is none or noise hides it.
    """

    done: int
    rounds: int
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """A finished simulation.

        result = consilium.simulate("fedmr", "digits", "p5c2", rounds=20, seed=0)
        result.curves, result.frame, result.tables["silos"]
        result.model(x).softmax(1)
        result.save("results")

    Data frames need pandas, plots matplotlib.
    """

    result: Result
    config: RunSpec

    @property
    def manifest(self) -> RunManifest:
        return self.result.manifest

    @property
    def digest(self) -> str:
        """Digest of the final model; equals the command line's for the same settings."""
        return self.result.model_digest

    @property
    def summary(self) -> dict[str, object]:
        """The summary that `coordinator simulate --json` prints."""
        return self.result.summary()

    @property
    def frame(self) -> pd.DataFrame:
        """One row per round and measure: round, measure, class, value, low, high (`results.history`)."""
        return _pandas().DataFrame(results.history(self.result), columns=list(COLUMNS))

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Further tables: "silos" (examples per silo, split and class), "classes" (last accuracy per class)."""
        frame = self.frame
        last = frame[(frame.measure == "class_accuracy") & (frame["round"] == frame["round"].max())]
        return {
            "silos": _pandas().DataFrame(results.by_silo(self.result)),
            "classes": last.drop(columns=["round", "measure"]).reset_index(drop=True),
        }

    @property
    def curves(self) -> pd.DataFrame:
        """Measures as columns and rounds as rows, without measures per class; NaN if not measured."""
        frame = self.frame[self.frame["class"] == ""]
        return frame.pivot(index="round", columns="measure", values="value").rename_axis(columns=None)

    def plot(self) -> Figure:
        """Draw accuracy by round. A notebook shows the returned figure; `.savefig(FILE)` saves it."""
        return results.draw(self.result)

    @property
    def model(self) -> nn.Module:
        """A new copy of the final global model in eval mode: x (n, *shape) -> logits (n, C).

        Raises ConfigError (E-CFG-08) for a method without a global model.
        """
        run = self.result.run
        if not run.method.has_global_model:
            raise ConfigError(
                "E-CFG-08", f"expected a method with a global model, found {self.manifest.method.name}: use another one"
            )
        return run.classifier(self.result.server).eval()

    @property
    def survey(self) -> SurveyAnswers:
        """The answers to a survey, `method="survey"`; raises ConfigError (E-CFG-08) for a method that trains."""
        return answers_of(self.manifest, self.result.server, self.result.records[0].included)

    def save(self, folder: str | Path) -> None:
        """Write the files of `coordinator simulate --out`; raises as `ResultFolder.claim`."""
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
    model: str | ModelOptions | type[ModelOptions] | nn.Module | type[nn.Module] | Make | None = None,
    *,
    data_root: str | Path | None = None,
    config_dir: str | Path | None = None,
    out: str | Path | None = None,
    engine: SimulationEngine | None = None,
    fine_tune: int = 0,
    progress: Callable[[Progress], object] | bool | None = None,
    tracker: str | Sequence[str] = (),
    **keys: object,
) -> Simulation:
    """Run a federation in this process, as `coordinator simulate` does.

        result = consilium.simulate("fedmr", "digits", "p5c2", rounds=20, seed=0, train__lr=0.1)
        result = consilium.simulate("fedavg", (train, test), my_partition, my_network, rounds=5)

    method, model: a name, "package.module:Name", a class, or an instance, which sets all options
    model also: an `nn.Module` that ends in a linear layer with one output per class (training starts from its weights),
    a class of such modules, or a function of the examples' schema (`shape`, `classes`) that returns such a module; its
    weights are drawn from the seed
    data: a name, "package.module:Name", a subclass of `ArrayData` or an instance; or train and test data, as a pair or
    a mapping, each as (x, y), a torch dataset, a MONAI dataset of dictionaries, or a Hugging Face dataset
    federation: a name, "package.module:Name", a partition, a function of the train and test labels (n,) that returns
    shares, or the shares: indices of each silo's training examples, or (train, test) indices for each silo
    keys: all other settings of the command line, `rounds=20, seed=0, train__lr=0.1` or `train={"lr": 0.1}`
    progress: called after each round, in this thread; an exception in it ends the simulation. True prints a line per
    round on stderr like the command line, False prints nothing; by default lines are printed in a terminal or notebook
    tracker: "tensorboard:DIR", "mlflow:URI" or a list of them; each closed round is logged there. A tracker that fails
    is left out with a warning.

    Raises the errors that the command line reports: FederationError with a code, mostly its subclasses ConfigError and
    DataError.
    Guarantees: the same settings give the same bits as the command line; no global state stays changed.
    """
    root, folder = _path(data_root), _path(config_dir)
    with still_working("simulates"), ExitStack() as stack:
        request = _Request(stack)
        request.choose("method", method, METHODS)
        request.choose_model(model)
        request.choose_data(data)
        for key, value in keys.items():
            request.keywords.put(key.replace("__", "."), value)
        request.choose_federation(federation, root, folder)
        spec = request.spec(folder)
        where = [tracker] if isinstance(tracker, str) else tracker
        observer: runner.MakeObserver | None = partial(_Reporter, progress) if callable(progress) else None
        if progress is True or (progress is None and is_watched()):
            observer = RoundPrinter
        observed = stack.enter_context(tracked(where, observer, lambda text: warnings.warn(text, stacklevel=2)))
        result = runner.run(spec, root, observed, engine, fine_tune, out=_path(out))
    return Simulation(result, spec)


class _Reporter(Observer):
    def __init__(self, progress: Callable[[Progress], object], manifest: RunManifest) -> None:
        self._noise, self._rounds, self._progress = profiles.result_noise(manifest), manifest.rounds, progress

    def closed(self, record: RoundRecord, server: State) -> None:
        del server
        accuracy = uncertainty.accuracy(record.correct, record.examples, self._noise.of(record.included))
        if record.kind.trains:
            self._progress(Progress(record.round + 1, self._rounds, accuracy.point))


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


# ---- objects in place of names and values ----------------------------------------------------------------------------


class _Request:
    """Collects the settings of a `simulate` call: words that choose from groups, and values that override them.

    stack: removes the registration of unnamed objects when it closes.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self.keywords = stack, Keywords()

    def choose(self, group: str, value: object, ours: Mapping[str, type] | None = None, kind: str = "") -> None:
        """Choose by name, or by an object, which is registered under a name. An instance sets all its options."""
        if value is None:
            return
        if not isinstance(value, str):
            of = value if isinstance(value, type) else type(value)
            if value is not of and is_dataclass(value):
                self.keywords.put(group, {f.name: getattr(value, f.name) for f in fields(value)})
            built_in = next((name for name, one in (ours or {}).items() if one is of), None)
            value = built_in or self._stack.enter_context(loading.registered(kind or group, of))
        self.keywords.words.append(f"{group}={value}")

    def choose_model(self, model: object) -> None:
        """Choose as in `choose`; a network, or a function of the schema, becomes a model without options."""
        network = isinstance(model, nn.Module) or (isinstance(model, type) and issubclass(model, nn.Module))
        if network or (callable(model) and not isinstance(model, type) and not hasattr(model, "build")):
            label = re.sub(r"\W", "_", getattr(model, "__name__", type(model).__name__))
            model = self._registered("model", options_of(maker(model)), label, _network_digest(model))  # type: ignore[arg-type]
        self.choose("model", model, MODELS)

    def choose_data(self, data: object) -> None:
        if halves := halves_of(data):
            in_memory = DataInMemory(*halves)
            data = self._registered("data", in_memory, "arrays", in_memory.digest)
        elif isinstance(data, ArrayData):
            data = self._registered("data", data, type(data).__name__, loading.class_digest(type(data)))
        elif not (data is None or isinstance(data, str | type)):
            raise ConfigError(
                "E-CFG-02",
                f"data: expected a name, ArrayData, (train, test) or both in a mapping, found {type(data).__name__}: "
                "convert it",
            )
        self.choose("data", data)

    def choose_federation(self, federation: object, root: Path | None, config_dir: Path | None) -> None:
        """Choose by name or partition. Shares, and shares that a function returns, become a partition."""
        is_partition = is_dataclass(federation) and hasattr(federation, "partition")
        if not (federation is None or is_partition or isinstance(federation, str | type)):
            shares: Any = federation(*self._labels(root, config_dir)) if callable(federation) else federation
            if not isinstance(shares, Sequence | np.ndarray) or not len(shares):
                raise ConfigError(
                    "E-CFG-02",
                    f"federation: expected shares of at least one silo, found {shares!r}"[:300] + ": give a list",
                )
            positions = (part for entry in shares for part in (entry if isinstance(entry, tuple) else (entry,)))
            digest = blake3(b"".join(np.asarray(part).tobytes() + b"|" for part in positions)).hexdigest()
            partition = _Partition(len(shares), lambda *_: shares)
            federation = self._registered("partition", partition, "shares", digest)
        self.choose("federation", federation, kind="partition")

    def _labels(self, root: Path | None, config_dir: Path | None) -> tuple[Labels, Labels]:
        """Return all train and test labels, in the order that partitions receive them."""
        seen: list[tuple[Labels, Labels]] = []

        def whole(train: Labels, test: Labels, n_classes: int, seed: int) -> Shares:
            del n_classes, seed
            seen.append((train, test))
            return [(np.arange(len(train)), np.arange(len(test)))]

        with loading.registered("partition", _Partition(1, whole), "memory:whole") as name:
            runner.read_silos(self.spec(config_dir, f"federation={name}"), root, datasets.load_all)
        return seen[0]

    def _registered(self, kind: str, value: object, label: str, digest: str) -> str:
        """Register an object under a name made from its digest."""
        return self._stack.enter_context(loading.registered(kind, value, f"memory:{label}_{digest[:16]}", digest))

    def spec(self, config_dir: Path | None, *more: str) -> RunSpec:
        return compose_simulation([*self.keywords.words, *more], config_dir, self.keywords.values)


@dataclass(frozen=True, eq=False)
class _Partition:
    """A partition from a function. Instances compare by identity."""

    silos: int
    partition: Callable[..., Any]


def _network_digest(network: object) -> str:
    """Hash a network's layers and weights, or the code that creates it."""
    if not isinstance(network, nn.Module):
        return loading.class_digest(network if isinstance(network, type) else type("Made", (), {"make": network}))
    hasher = blake3(repr(network).encode())
    for name, value in network.state_dict().items():
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(value.detach().cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _pandas() -> Any:  # noqa: ANN401 - pandas has no types of its own
    return require("pandas", "research", "data frames")
