"""Composition of a run's configuration with Hydra; a misspelt group, choice or key gets the nearest valid name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coordinator.config.run_spec import AUTO, MASKING, OFF, WEIGHTS, RunSpec, SecaggSpec
from fl_core import datasets
from fl_core.aggregation import options as aggregators
from fl_core.datasets.table_schema import read_schema
from fl_core.errors import ConfigError
from fl_core.extensions import loading, registry
from fl_core.methods import build_method, programs
from fl_core.models import MODELS
from fl_core.rounds.manifest import NamedOptions
from fl_core.suggest import suggest
from fl_core.types.records import FEATURES, TrainConfig
from privacy.profiles import PROFILES, is_private, private_form

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PACKAGE = Path(__file__).parents[1]
CONFIGS = next(folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir())
"""The files that Hydra composes: inside the package in a wheel, next to it in a checkout."""
GROUPS = ("method", "data", "model", "federation", "privacy", "aggregator", "secagg", "experiment", "scale")
_NONE = "none"
_LARGE_SIDE = 64
"""Image side in pixels from which a ResNet gets ImageNet's stem, unless the run chooses one."""
_CHOSEN = {"random_features": ("kind", "width")}
"""Options that follow from data and privacy unless the run chooses them, by model; for other models, the stem."""
_PRIVATE_WIDTH = 288
"""Number of patch features in a private run, whose noise grows with it; from benchmarks/frozen/private.py."""
_CONTINUED = ("method", "data", "model", "privacy", "aggregator", "secagg")
_CLASSES = {5: (2,), 10: (2, 3, 5, 10, 20, 30, 50), 50: (2, 3, 10), 100: (3, 10)}
_RUN, _SIMULATION = "run", "simulation"
_AGGREGATORS = {_RUN: aggregators.DEFAULT, _SIMULATION: aggregators.Mean.name}
"""Default aggregators (docs/adr/0059-simulations-average-and-runs-bound-updates.md)."""
_MASKS = {_RUN: AUTO, _SIMULATION: OFF}
"""Default of secure aggregation: runs use it with three hospitals or more."""
PARTITIONS = ("hospitals6", *(f"p{silos}c{n}" for silos, classes in _CLASSES.items() for n in classes))
"""Partitions whose name is complete; names such as `federation=p7c3` are expanded."""


def _store_dataclasses() -> None:
    """Register with Hydra the choices that need no file, since they are dataclasses or names."""
    store = ConfigStore.instance().store
    store("run_spec", _defaults(RunSpec) | {"train": _defaults(TrainConfig)})
    for name, method in programs().items():
        schedule: dict[str, object] = {"train": dict(method.schedule)} if method.schedule else {}
        if method().exchanges:
            schedule["rounds"] = AUTO
        store(name, {"method": {"name": name, **_defaults(method)}, **schedule}, group="method", package="_global_")
    for name, model in MODELS.items():
        options = _defaults(model)
        auto = {key: AUTO for key in _CHOSEN.get(name, ("stem",)) if key in options}
        words = {"name": name, "weights": _NONE, "weights_source": "", **options, **auto}
        if getattr(model, "freezes", False):
            terms = {"model": words, "train": {"freeze": FEATURES}}
            store(name, terms, group="model", package="_global_")
        else:
            store(name, words, group="model")
    for name, profile in PROFILES.items():
        store(name, {"name": name, **(_defaults(profile.config) if profile.config else {})}, group="privacy")
    for name, aggregator in aggregators.AGGREGATORS.items():
        store(name, {"name": name, **_defaults(aggregator)}, group="aggregator")
    for name in MASKING:
        store(name, _defaults(SecaggSpec) | {"name": name}, group="secagg")
    for name in PARTITIONS:
        store(name, {"name": name, "partition_seed": 0}, group="federation")
    for root, chosen in _AGGREGATORS.items():
        store(root, {"defaults": [{"aggregator": chosen}, {"secagg": _MASKS[root]}, "config", "_self_"]})


def _defaults(kind: type[DataclassInstance]) -> dict[str, object]:
    defaults = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}


_store_dataclasses()

_EXTENSIBLE = {"method": "method", "model": "model", "data": "data", "federation": "partition"}


def _load_choice(group: str, word: str) -> str | None:
    """Load the extension that a word names and register it with Hydra; return its name, None if there is none."""
    name = loading.load(_EXTENSIBLE[group], word)
    if name is None:
        return None
    store, kind = ConfigStore.instance().store, registry.loaded(_EXTENSIBLE[group], name)
    options = {"name": name, **(_defaults(kind) if isinstance(kind, type) and is_dataclass(kind) else {})}
    if group == "model" and "weights" not in options:  # otherwise they are an option of the extension
        options |= {"weights": _NONE, "weights_source": ""}
    if group == "method":
        schedule = dict(getattr(kind, "schedule", {}))
        store(name, {"method": options, **({"train": schedule} if schedule else {})}, group=group, package="_global_")
    elif group == "data":
        model = getattr(kind, "model", "")
        model = model and (model if model in choices("model") else _load_choice("model", model))
        suits = {"defaults": [{"override /model": model}, "_self_"]} if model else {}
        nothing = {"image_size": None, "classes": None}
        store(name, {**suits, "data": {"name": name, **nothing}}, group=group, package="_global_")
    else:
        store(name, options | ({"partition_seed": 0} if group == "federation" else {}), group=group)
    return name


def choices(group: str, config_dir: Path | None = None) -> list[str]:
    """List the choices of a group; config_dir: a folder of the user with files for the same groups."""
    folders = [CONFIGS / group, *([config_dir / group] if config_dir else [])]
    files = {file.name for folder in folders if folder.is_dir() for file in folder.iterdir()}
    stored = {name for name in ConfigStore.instance().repo.get(group, {}) if ":" not in name}  # not an extension's
    return sorted(name.removesuffix(".yaml") for name in files | stored)


def compose_spec(
    overrides: Sequence[str], config_dir: Path | None = None, values: Mapping[str, object] | None = None
) -> RunSpec:
    """Compose and check a configuration from `group=choice`, `key=value` and `+key=value` words.

    `+key=value` adds a key that the composed files do not have; RunSpec must know it. config_dir: a folder with the
    user's own files, laid out as `configs/` (DIR/experiment/mine.yaml: experiment=mine), under names of their own. A
    method, a model, data or a federation may also be an extension (`fl_core.extensions.loading`), which is imported:
    the words come from the user of this machine. values: plain Python values that override the composed ones, instead
    of `key=value` words. Raises ConfigError, which names the nearest valid word: E-CFG-01 on a word that is no
    override, a key or a choice that does not exist, E-CFG-02 on a value of the wrong type or range; and as
    `loading.load`.
    """
    return _composed_spec(_RUN, overrides, config_dir, values or {})


def compose_simulation(
    overrides: Sequence[str], config_dir: Path | None = None, values: Mapping[str, object] | None = None
) -> RunSpec:
    """Compose as `compose_spec`, for a simulation: updates are averaged unless a word names an aggregator."""
    return _composed_spec(_SIMULATION, overrides, config_dir, values or {})


def _composed_spec(
    root: str, overrides: Sequence[str], config_dir: Path | None, values: Mapping[str, object]
) -> RunSpec:
    if config_dir is not None:
        _check_config_dir(config_dir)
    words = _validated(overrides, config_dir)
    for key in values:
        _check_first_key(key, key, overrides, config_dir, dot="__")
    words += _model_of_method(words, values)
    try:
        raw = _compose(root, words, config_dir)
    except (ConfigCompositionException, HydraException, OmegaConfBaseException) as error:
        raise ConfigError("E-CFG-01", _explain(error, root, words, config_dir)) from error
    chosen = {key: value for key, value in _merged(raw, values).items() if key not in ("experiment", "scale")}
    if chosen["name"] is not None:
        chosen["name"] = str(chosen["name"])  # name=7 is a name
    if isinstance(chosen["data"], Mapping):
        chosen["data"] = with_schema(chosen["data"])
    _move_weights(chosen)
    _choose_for_data(chosen)
    if chosen["rounds"] == AUTO:
        chosen["rounds"] = _exchanges(chosen)
    return RunSpec.from_mapping(chosen)


def _exchanges(chosen: Mapping[str, Any]) -> int:
    """Return after how many rounds the chosen method is complete under the chosen privacy; 0 if it has no such end."""
    choices = (dict(chosen[key]) for key in ("method", "privacy"))
    method, _ = private_form(*(NamedOptions(choice.pop("name"), choice) for choice in choices))
    return build_method(method.name, method.options).exchanges


def _merged(below: Mapping[str, object], above: Mapping[str, object], where: str = "") -> dict[str, object]:
    """Merge values over others with the same keys, nested by key; raises ConfigError (E-CFG-01) on another key."""
    merged = dict(below)
    for key, value in above.items():
        if key not in below:
            raise ConfigError("E-CFG-01", f"there is no key {f'{where}{key}'!r}: {_suggest(key, below)}")
        default = below[key]
        both = isinstance(default, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(default, value, f"{where}{key}.") if both else value  # type: ignore[arg-type]
    return merged


def compose_from(parent: RunSpec, overrides: Sequence[str], values: Mapping[str, object] | None = None) -> RunSpec:
    """Change a run's configuration by `key=value` words, for a run that continues it. values: as in `compose_spec`.

    A choice of a group (`method=fedmr`) replaces the whole group and nothing else. The hospitals are the present
    members, unless `silos` names them. Raises ConfigError as `compose_spec`, and on choices of several groups at once.
    """
    words = _validated(overrides)
    keys = [*(word.partition("=")[0] for word in words), *_leaves(values or {})]
    if weights := [key for key in keys if key.startswith("model.weights")]:
        raise ConfigError(
            "E-CFG-08",
            f"{weights[0]} cannot be used with --from, which starts from the model of the earlier run: leave it out",
        )
    if several := sorted({"experiment", "scale"} & set(keys)):
        raise ConfigError(
            "E-CFG-01", f"--from takes only single keys, and {several[0]}= replaces many: set each key by itself"
        )
    raw = asdict(parent) | {"silos": None}
    groups = [f"{g}={raw[g]['name']}" for g in _CONTINUED if g not in keys and raw[g]["name"] in choices(g)]
    changed = asdict(compose_spec([*groups, *words], values=values))
    for key in keys:
        group = key.partition(".")[0]
        if group in _CONTINUED and key != group and raw[group]["name"] != changed[group]["name"]:
            raise ConfigError("E-CFG-01", f"{key}= needs {group}={raw[group]['name']}: add it")
        *path, last = key.split(".")
        to, of = raw, changed
        for step in path:
            to, of = to[step], of[step]
        to[last] = of[last]
    if "rounds" not in keys:
        raw["rounds"] = max(raw["rounds"], _exchanges(raw))
    return RunSpec.from_mapping(raw)


def words_of(spec: RunSpec) -> list[str]:
    """Return the shortest list of words that compose a configuration; empty if none do, as with weights of a file."""
    plain = _plain(asdict(spec))
    groups = [f"{group}={plain[group]['name']}" for group in (*_CONTINUED, "federation")]
    try:
        differ = _different(_plain(asdict(compose_spec(groups))), plain)
        words = [*groups, *(f"{key}={written(value)}" for key, value in differ.items())]
        return words if compose_spec(words) == spec else []
    except ConfigError:  # an extension of another machine, or an unknown federation
        return []


def _plain(value: object) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _different(defaults: Mapping[str, Any], wanted: Mapping[str, Any], where: str = "") -> dict[str, object]:
    different: dict[str, object] = {}
    for key, value in wanted.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(key), Mapping):
            different |= _different(defaults[key], value, f"{where}{key}.")
        elif key not in defaults or defaults[key] != value:
            different[f"{where}{key}"] = value
    return different


def written(value: object) -> str:
    """Write a value in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w.-]*", value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _move_weights(chosen: dict[str, object]) -> None:
    """Move the starting weights out of the model's options, which define the model itself."""
    model = dict(chosen["model"])  # type: ignore[call-overload]
    if "weights_source" not in model:
        return
    chosen["model"] = model
    file, source = model.pop("weights", _NONE), model.pop("weights_source", "")
    if "weights" in getattr(MODELS.get(model["name"]), "__dataclass_fields__", ()):
        model["weights"] = _NONE
    if not isinstance(file, str) or not isinstance(source, str) or not file.strip():
        raise ConfigError(
            "E-CFG-02",
            f"expected model.weights=FILE and a text of its source, found {file!r} and {source!r}: correct them",
        )
    if source and file == _NONE:
        raise ConfigError("E-CFG-02", "model.weights_source needs model.weights=FILE: add it")
    chosen |= {"weights_file": "" if file == _NONE else file, "weights_source": source}


def _model_of_method(words: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Choose the model that suits a method, unless a model, its weights or an experiment is named."""
    given, options = dict(word.lstrip("+").split("=", 1) for word in words), values.get("model")
    model = getattr(programs().get(given.get("method", "")), "suitable_model", "")
    has_weights = "model.weights" in given or (isinstance(options, Mapping) and "weights" in options)
    return [f"model={model}"] if model and not has_weights and not {"model", "experiment"} & given.keys() else []


def _choose_for_data(chosen: dict[str, object]) -> None:
    """Resolve `auto` in the model's options.

    stem: ImageNet's for larger images (CIFAR's needs ten times the memory)   kind: patches for images
    width: fewer patch features in a private run.
    """
    model, data = chosen["model"], chosen["data"]
    if not isinstance(model, Mapping):
        return
    side = _side(data) if isinstance(data, Mapping) else 0
    if model.get("stem") == AUTO:
        chosen["model"] = {**model, "stem": "imagenet" if side >= _LARGE_SIDE else "cifar"}
    if model.get("kind") == AUTO:
        model = chosen["model"] = {**model, "kind": "patches" if side else "cosine"}
    if model.get("width") == AUTO:
        choice = dict(chosen["privacy"])  # type: ignore[call-overload]
        few = model["kind"] == "patches" and is_private(NamedOptions(choice.pop("name"), choice))
        chosen["model"] = {**model, "width": _PRIVATE_WIDTH if few else _defaults(MODELS[str(model["name"])])["width"]}


def _side(data: Mapping[str, object]) -> int:
    """Return the image side in pixels; 0 for other examples, or data sets without a fixed size."""
    if isinstance(size := data.get("image_size"), int):
        return size
    try:
        shape = datasets.schema_of(str(data.get("name"))).shape
    except ConfigError:  # reported when the run is created
        return 0
    return shape[-1] if len(shape) == 3 else 0


def _compose(root: str, words: Sequence[str], config_dir: Path | None) -> Mapping[str, object]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        raw = OmegaConf.to_container(compose(root, overrides=[*words, *_search_path(config_dir)]), resolve=True)
    assert isinstance(raw, dict)
    return {str(k): v for k, v in raw.items()}


def _search_path(config_dir: Path | None) -> list[str]:
    if config_dir is None:
        return []
    place = str(config_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{place}']"]


def _check_config_dir(folder: Path) -> None:
    """Refuse a missing folder, and files under built-in names, which would never be read."""
    if not folder.is_dir():
        raise ConfigError("E-CFG-02", f"--config-dir: there is no folder of configurations at {folder}: check the path")
    for group in GROUPS:
        names = {file.stem for file in (folder / group).glob("*.yaml")}
        if taken := sorted(names & set(choices(group))):
            raise ConfigError(
                "E-CFG-02",
                f"--config-dir: expected names of your own in {folder / group}, found {taken[0]}.yaml, which has the "
                "name of a built-in file: rename it",
            )


def _validated(overrides: Sequence[str], config_dir: Path | None = None) -> list[str]:
    return [checked for word in overrides for checked in _validate_override(word, config_dir, overrides)]


def _validate_override(word: str, config_dir: Path | None, beside: Sequence[str]) -> list[str]:
    """Check that a word is `key=value`, that its first key exists, and that a group has this choice.

    beside: all words; a misspelt key may be one of the groups that they choose.
    """
    match = re.fullmatch(r"(\+{0,2}|~)([\w./@]+)=(.*)", word, re.DOTALL)
    if match is None:
        raise ConfigError("E-CFG-01", f"expected KEY=VALUE, found {word!r}")
    prefix, key, value = match.groups()
    if key == "model.body" and re.fullmatch(r"[^\['\"]*,.*", value):
        word = f"{prefix}{key}=[{value}]"
    if prefix == "~":
        raise ConfigError("E-CFG-01", f"keys can be changed or added, not removed: write {key}={value}")
    _check_first_key(key, key.split(".")[0], beside, config_dir)
    if key not in GROUPS:
        return [f"++{word.removeprefix(prefix)}" if prefix else word]  # also if the key exists already
    if value in (valid := choices(key, config_dir)):
        return [f"{key}={value}"]  # every group has a choice already, so + cannot add one
    if key == "federation" and (short := _federation(value)):
        return short
    if key in _EXTENSIBLE and (loaded := _load_choice(key, value)):
        return [f"{key}={loaded}"]
    near = difflib.get_close_matches(value, valid, n=1)
    hint = f"did you mean {key}={near[0]}? " if near else ""
    raise ConfigError("E-CFG-01", f"there is no {key}={value}: {hint}valid: {', '.join(valid)}")


_OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "step_size"), "lr"),
    **dict.fromkeys(("num_epochs", "n_epochs", "local_epochs"), "epochs"),
    **dict.fromkeys(("num_rounds", "n_rounds", "communication_rounds"), "rounds"),
    **dict.fromkeys(("random_state", "random_seed"), "seed"),
    "wd": "weight_decay",
}
"""Names that keys have in other libraries."""


def _suggest(word: str, valid: Collection[str]) -> str:
    """Name the valid keys, the nearest one first, as `suggest`; knows the names of keys in other libraries."""
    other = _OTHER_NAMES.get(word, word)
    return suggest(other if other in valid else word, valid)


def _check_first_key(
    key: str, first: str, beside: Sequence[str], config_dir: Path | None = None, dot: str = "."
) -> None:
    """Raise ConfigError (E-CFG-01) on a key that does not exist; names the nearest one, also inside groups.

    dot: the user's separator between a group and its key.
    """
    if first in WEIGHTS:
        raise ConfigError("E-CFG-01", f"there is no key {key!r}: write model{dot}weights=FILE")
    if first in (keys := {*GROUPS, *(f.name for f in fields(RunSpec))}):
        return
    wanted, inner = _OTHER_NAMES.get(first, first), _inner_keys(beside, config_dir)
    written_as = {wanted.replace("__", "."), wanted.replace("_", ".", 1)}  # Python's train__lr, train_lr
    near = [path for path, name in inner.items() if wanted == name or path in written_as]
    if not near and not difflib.get_close_matches(wanted, keys, n=1):
        ends = {name: path for path, name in inner.items()} | {path: path for path in inner}
        near = [ends[end] for end in difflib.get_close_matches(first, list(ends), n=1, cutoff=0.75)]
    if near:
        paths = " or ".join(f"{path.replace('.', dot)}=..." for path in near)
        raise ConfigError("E-CFG-01", f"there is no key {first!r}: did you mean {paths}?")
    raise ConfigError("E-CFG-01", f"there is no key {first!r}: {_suggest(first, keys)}")


def _inner_keys(beside: Sequence[str], config_dir: Path | None) -> dict[str, str]:
    """List the keys inside the groups that words choose: path -> last name."""
    chosen = [word for word in beside if word.partition("=")[0] in GROUPS]
    try:
        composed = _compose(_RUN, [w for word in chosen for w in _validate_override(word, config_dir, ())], config_dir)
    except (ConfigError, HydraException, OmegaConfBaseException):  # reported when it is its turn
        return {}
    paths = ((path, path.rpartition(".")[2]) for path in _leaves(composed))
    return {path: name for path, name in paths if "." in path and name != "name"}


def _leaves(values: Mapping[str, object], where: str = "") -> list[str]:
    """List the paths of the values in nested mappings."""
    return [
        leaf
        for key, value in values.items()
        for leaf in (_leaves(value, f"{where}{key}.") if isinstance(value, Mapping) else [f"{where}{key}"])
    ]


def _federation(value: str) -> list[str]:
    """Expand a partition without a file, such as `p7c3` or `centers-1-2`; return empty if it is none."""
    if match := re.fullmatch(r"centers((?:-\d)+)", value):
        return ["federation=centers", f"federation.centers=[{','.join(match[1].split('-')[1:])}]"]
    if re.fullmatch(r"(p\d+c\d+|clients\d+|(dirichlet|persilo|label|iid|map|users)-\d)[\w.+-]*(@\d+)?", value):
        base = value.partition("@")[0]  # another draw of a partition with a file keeps that file's settings
        return [f"federation={base if base in choices('federation') else 'hospitals6'}", f"federation.name={value}"]
    return []


def unreadable_word(error: Exception) -> str:
    """Describe the word that Hydra's grammar did not accept, and how to write the value."""
    message = " ".join(str(error.__cause__ or error).split("\n")[0].split())
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'", message)
    if ambiguous is not None:
        return f"expected one value, found {ambiguous[1]!r}: a list is written [A,B], and a number with a point, 0.1"
    grammar = re.match(r"(?:Lexer\w+Exception|mismatched input|no viable alternative|extraneous input)", message)
    if grammar is None:
        return message
    word = message.partition("Exception: ")[2] or message
    how = "quote names with accents or special characters, as in 'data.classes=[\"A (b)\",c]'"
    return f"expected KEY=VALUE, found {word!r}: {how}"


def _explain(error: Exception, root: str, words: Sequence[str], config_dir: Path | None) -> str:
    """Turn Hydra's report of a bad key into one line with the nearest valid key."""
    text = str(error.__cause__ or error)
    match = re.search(r"Key '([^']+)' is not in struct\s+full_key: (\S+)", text)
    if match is None:
        return unreadable_word(error)
    beside: object = _compose(root, [word for word in words if word.split("=")[0] in GROUPS], config_dir)
    for step in match[2].split(".")[:-1]:
        beside = beside.get(step) if isinstance(beside, dict) else None
    valid = sorted(beside) if isinstance(beside, dict) else []
    return f"there is no key {match[2]!r}: {_suggest(match[1], valid)}"


# ---- the schema of a table -------------------------------------------------------------------------------------------


def with_schema(data: Mapping[str, object]) -> Mapping[str, object]:
    """Replace data.schema=FILE by the columns that the file declares, and set its classes if none are named.

    Raises DataError (E-DATA-02, E-DATA-07) on an invalid file.
    """
    file = data.get("schema")
    if not isinstance(file, str):
        return data
    schema = read_schema(Path(file).expanduser())
    return {
        **data,
        "classes": data.get("classes") or list(schema.space),
        **({"multi_label": True} if schema.multi_label else {}),
        "schema": [asdict(column) for column in schema.columns],
    }
