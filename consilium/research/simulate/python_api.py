"""Simulations from Python: the words of the command line as arguments, and what they stand for as objects."""

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
    """What `simulate(progress=...)` receives after each round.

        consilium.simulate("fedmr", "digits", "p5c2", progress=lambda at: print(at.done, at.rounds, at.accuracy))

    done: rounds   accuracy: of the model that the round began with, None where there is none or noise hides it.
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

    Data frames need pandas, pictures matplotlib.
    """

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
        return _pandas().DataFrame(results.history(self.result), columns=list(COLUMNS))

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
        return run.classifier(self.result.server).eval()

    @property
    def survey(self) -> SurveyAnswers:
        """Return the answers to a survey, `method="survey"`; raises ConfigError (E-CFG-08) of a method that trains."""
        return answers_of(self.manifest, self.result.server, self.result.records[0].included)

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

    method, model: a name, "package.module:Name", a class, or an instance, whose options are then all taken from it
    model also: an `nn.Module` that ends in a linear layer of one output per class, which begins with its weights, such
    a class, or a function of the examples' schema (`shape`, `classes`) that returns such a module, drawn from the seed
    data: a name, "package.module:Name", a class or an instance below `ArrayData`; or train and test, as a pair or a
    mapping, each of them (x, y), a torch dataset, a MONAI dataset of dictionaries, or a dataset of Hugging Face
    federation: a name, "package.module:Name", a partition, a function of the train and test labels (n,) that returns
    shares, or the shares: positions of each silo's training examples, or (train, test) positions of each
    keys: all other words of the command line, `rounds=20, seed=0, train__lr=0.1` or `train={"lr": 0.1}`
    progress: called after each round, in this thread; what it raises ends the simulation. True prints a line per round
    on stderr, as the command line does, False nothing; by default lines are printed in a terminal or a notebook.
    tracker: "tensorboard:DIR", "mlflow:URI" or several of them, which get each round as it is closed. One that stops
    taking numbers is warned about and left out.

    Raises what the command line reports: FederationError, below all ConfigError and DataError, with its code.
    Guarantees: the same words give the same bits as the command line; no global state is left changed.
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


# ---- what stands for names and values --------------------------------------------------------------------------------


class _Request:
    """What a call of `simulate` asks for: words that choose from groups, and values that go over what they compose.

    stack: ends the registration of what has no name of its own.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self.keywords = stack, Keywords()

    def choose(self, group: str, value: object, ours: Mapping[str, type] | None = None, kind: str = "") -> None:
        """Choose by name, or by an object that is then registered under one; an instance brings all its options."""
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
        """Choose as `choose`; a network or a function of the schema becomes a model without options."""
        network = isinstance(model, nn.Module) or (isinstance(model, type) and issubclass(model, nn.Module))
        if network or (callable(model) and not isinstance(model, type) and not hasattr(model, "build")):
            label = re.sub(r"\W", "_", getattr(model, "__name__", type(model).__name__))
            model = self._registered("model", options_of(maker(model)), label, _network_digest(model))  # type: ignore[arg-type]
        self.choose("model", model, MODELS)

    def choose_data(self, data: object) -> None:
        if halves := halves_of(data):
            held = DataInMemory(*halves)
            data = self._registered("data", held, "arrays", held.digest)
        elif isinstance(data, ArrayData):
            data = self._registered("data", data, type(data).__name__, loading.class_digest(type(data)))
        elif not (data is None or isinstance(data, str | type)):
            raise ConfigError(
                "E-CFG-02",
                f"data: expected a name, ArrayData, (train, test) or both in a mapping, found {type(data).__name__}",
            )
        self.choose("data", data)

    def choose_federation(self, federation: object, root: Path | None, config_dir: Path | None) -> None:
        """Choose by name or by a partition; shares, and what a function of the labels returns, are made into one."""
        is_partition = is_dataclass(federation) and hasattr(federation, "partition")
        if not (federation is None or is_partition or isinstance(federation, str | type)):
            shares: Any = federation(*self._labels(root, config_dir)) if callable(federation) else federation
            if not isinstance(shares, Sequence | np.ndarray) or not len(shares):
                raise ConfigError(
                    "E-CFG-02", f"federation: expected shares of at least one silo, found {shares!r}"[:300]
                )
            positions = (part for entry in shares for part in (entry if isinstance(entry, tuple) else (entry,)))
            digest = blake3(b"".join(np.asarray(part).tobytes() + b"|" for part in positions)).hexdigest()
            partition = _Partition(len(shares), lambda *_: shares)
            federation = self._registered("partition", partition, "shares", digest)
        self.choose("federation", federation, kind="partition")

    def _labels(self, root: Path | None, config_dir: Path | None) -> tuple[Labels, Labels]:
        """Return the labels of the whole data, train and test, in the order in which partitions see them."""
        seen: list[tuple[Labels, Labels]] = []

        def whole(train: Labels, test: Labels, n_classes: int, seed: int) -> Shares:
            del n_classes, seed
            seen.append((train, test))
            return [(np.arange(len(train)), np.arange(len(test)))]

        with loading.registered("partition", _Partition(1, whole), "memory:whole") as name:
            runner.read_silos(self.spec(config_dir, f"federation={name}"), root, datasets.load_all)
        return seen[0]

    def _registered(self, kind: str, value: object, label: str, digest: str) -> str:
        """Register an object under a name of its content."""
        return self._stack.enter_context(loading.registered(kind, value, f"memory:{label}_{digest[:16]}", digest))

    def spec(self, config_dir: Path | None, *more: str) -> RunSpec:
        return compose_simulation([*self.keywords.words, *more], config_dir, self.keywords.values)


@dataclass(frozen=True, eq=False)
class _Partition:
    """A partition of a function; each is another one."""

    silos: int
    partition: Callable[..., Any]


def _network_digest(network: object) -> str:
    """Hash a network's layers and weights, or the code that makes one."""
    if not isinstance(network, nn.Module):
        return loading.class_digest(network if isinstance(network, type) else type("Made", (), {"make": network}))
    hasher = blake3(repr(network).encode())
    for name, value in network.state_dict().items():
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(value.detach().cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _pandas() -> Any:  # noqa: ANN401 - pandas has no types of its own
    return require("pandas", "research", "data frames")
