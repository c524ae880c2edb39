"""References to data, federations and schemas: what they mean, and what a misspelt one answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coordinator.config.hydra_config import PARTITIONS, compose_spec
from fl_core.datasets import DATA_ROOT, SOURCES, DataRequest, federation, federation_text, load, parse, schema_of
from fl_core.errors import ConfigError, DataError
from fl_core.extensions.loading import load_of_reference
from fl_core.models import describe
from fl_core.types.columns import Column

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("reference", "canonical"),
    [
        ("digits/p5c2/3", "digits/p5c2/3"),
        ("digits/hospital2", "digits/hospitals6/2"),
        ("digits/hospitals6/0", "digits/hospitals6/0"),
        ("digits/p7c3@4/6", "digits/p7c3@4/6"),
        ("digits/dirichlet-0.5-10/9", "digits/dirichlet-0.5-10/9"),
        ("isic2019/center3", "isic2019/center3"),
        ("isic2019/clients20/7", "isic2019/clients20/7"),
        ("isic2019/clients20@2/19", "isic2019/clients20@2/19"),
        ("cifar10/p010c3/9", "cifar10/p10c3/9"),
        ("cifar10/p10c3-double@1/9", "cifar10/p10c3-double@1/9"),
        ("cifar100/dirichlet-0.30-100-two/99", "cifar100/dirichlet-0.3-100-two/99"),
        ("cinic10/map-100/99", "cinic10/map-100/99"),
        ("svhn/label-2-100/0", "svhn/label-2-100/0"),
        ("fmnist/persilo-1-20/0", "fmnist/persilo-1-20/0"),
        ("femnist/users-50@3/49", "femnist/users-50@3/49"),
        ("spiral/p5c2/0", "spiral/p5c2/0"),
        ("folder:/data/skin", "folder:/data/skin"),
        ("folder:/data/cifar10#p5c2/4", "folder:/data/cifar10#p5c2/4"),
        ("manifest:rel/list.csv", "manifest:rel/list.csv"),
    ],
)
def test_references_round_trip(reference: str, canonical: str) -> None:
    assert str(parse(reference)) == canonical
    assert parse(canonical) == parse(reference)


def test_a_home_folder_is_expanded() -> None:
    assert parse("folder:~/skin").path == Path.home() / "skin"


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("digit/p5c2/0", "did you mean 'digits/p5c2/0'"),
        ("isic2019/centre3", "did you mean 'isic2019/center3'"),
        ("isic2019/center6", "center0 to center5"),
        ("isic2019", "valid forms"),
        ("isic2019/clients20/20", "clients20/0 to 19"),
        ("cifar/p5c2/0", "did you mean 'cifar10/p5c2/0'"),
        ("cifar10/p5c2", "p5c2/0 to p5c2/4"),
        ("cifar10/persilo-0.5-10-two/0", "did you mean 'persilo-0.5-100'"),
        ("cifar10/dirichlet-0.5-10-twice/0", "did you mean 'dirichlet-0.5-10'"),
        ("isic2019/center-1", "valid forms"),
        ("foldr:/x", "did you mean 'folder:'"),
        ("folder:", "expected a path"),
        ("manifest:#p5c2/1", "expected a path"),
        ("digits/p5c2", "p5c2/0 to p5c2/4"),
        ("digits/p5c2/5", "p5c2/0 to p5c2/4"),
        ("digits/p5c2/-1", "p5c2/0 to p5c2/4"),
        ("digits/hospital6", "hospitals6/0 to hospitals6/5"),
        ("digits/p5x2/0", "did you mean 'p5c2'"),
        ("", "valid forms: digits/p5c2/3"),
    ],
)
def test_misspelt_references_are_refused(reference: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        parse(reference)
    assert caught.value.code == "E-CFG-01"


@pytest.mark.parametrize("reference", ["foldr:/x", "manifst:/x.csv", "tabel:/x.csv"])
def test_a_misspelt_kind_of_file_is_taken_for_one_and_not_for_a_package(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .(folder|manifest|table)."):
        load_of_reference(reference)


def test_a_path_without_its_kind_is_answered_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    for name in ("list.csv", "patients.csv", "patients.toml", "visits.parquet"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for path, kind in (
        (str(tmp_path / "images"), "folder"),
        ("images", "folder"),
        ("list.csv", "manifest"),
        ("patients.csv", "table"),
        ("visits.parquet", "table"),
    ):
        with pytest.raises(ConfigError, match=f"did you mean {kind}:{path}\\?"):
            parse(path)


def test_federation_names_all_silos() -> None:
    assert federation("digits", "p5c2") == [f"digits/p5c2/{k}" for k in range(5)]
    assert federation("digits", "p7c3") == [f"digits/p7c3/{k}" for k in range(7)]
    assert federation("digits", "dirichlet-0.5-10@2")[9] == "digits/dirichlet-0.5-10@2/9"
    assert federation("isic2019", "centers") == [f"isic2019/center{k}" for k in range(6)]
    assert federation("isic2019", "centers-1-2-5") == ["isic2019/center1", "isic2019/center2", "isic2019/center5"]
    assert federation("folder:/c", "p2c5") == ["folder:/c#p2c5/0", "folder:/c#p2c5/1"]
    for data, name in (("digits", "p5c2"), ("isic2019", "centers"), ("folder:/c", "iid-3")):
        assert [str(parse(reference)) for reference in federation(data, name)] == federation(data, name)


@pytest.mark.parametrize(
    ("data", "name", "match"),
    [
        ("digitz", "p5c2", "did you mean 'digits'"),
        ("folder", "p5c2", "folder:PATH"),
        ("digits", "centers", "there is no federation"),
        ("isic2019", "p5c2", "centers-1-2-5"),
        ("isic2019", "centers-1-1", "different centres"),
        ("isic2019", "centers-7", "different centres"),
    ],
)
def test_impossible_federations_are_refused(data: str, name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        federation(data, name)
    assert caught.value.code == "E-CFG-01"


def test_schema_without_the_data() -> None:
    digits = schema_of("digits")
    assert digits.shape == (1, 8, 8)
    assert digits.classes == tuple("0123456789")
    isic = schema_of("isic2019")
    assert isic.shape == (3, 200, 200)
    assert isic.classes == ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    assert schema_of("isic2019", DataRequest(image_size=64)).shape == (3, 64, 64)
    assert schema_of("folder", DataRequest(classes=["a", "b"], image_size=32)).shape == (3, 32, 32)
    assert schema_of("manifest", DataRequest(classes=["a", "b"])).classes == ("a", "b")


@pytest.mark.parametrize(
    ("name", "classes", "size", "code", "match"),
    [
        ("isic", None, None, "E-CFG-01", "isic2019"),
        ("folder", None, 32, "E-CFG-23", "label space"),
        ("manifest", ["a", "a"], 32, "E-CFG-23", "two different names"),
        ("folder", ["a"], 32, "E-CFG-23", "two different names"),
        ("folder", "ab", 32, "E-CFG-23", "two different names"),
        ("digits", None, 28, "E-CFG-23", "8 to 8 or null"),
        ("isic2019", None, 4, "E-CFG-23", "8 to 2048"),
    ],
)
def test_impossible_schemas_are_refused(name, classes, size, code, match) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        schema_of(name, DataRequest(classes=classes, image_size=size))
    assert caught.value.code == code


def test_load_refuses_the_same_settings() -> None:
    with pytest.raises(ConfigError, match="image_size"):
        load("digits/hospital0", DataRequest(image_size=28))
    with pytest.raises(ConfigError, match="two different names"):
        load("folder:/x", DataRequest(classes=["a", "a"]))


def test_a_missing_data_root_names_both_ways_to_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_ROOT, raising=False)
    with pytest.raises(DataError, match=r"(?s)--data-root.*CONSILIUM_DATA_ROOT") as caught:
        load("isic2019/center3")
    assert caught.value.code == "E-DATA-02"


def test_every_data_configuration_states_its_fields() -> None:
    files = {file.stem: yaml.safe_load(file.read_text()) for file in (CONFIGS / "data").glob("*.yaml")}
    assert set(files) == set(SOURCES)
    for name, config in files.items():
        config = config.get("data", config)
        assert set(config) - {"path", "window", "schema", "multi_label"} == {"name", "image_size", "classes"}
        assert config["name"] == name
        columns = [Column("age", "number", 0, 120)] if name == "table" else []
        schema = schema_of(
            name, DataRequest(classes=config["classes"] or ["a", "b"], image_size=config["image_size"]), columns=columns
        )
        assert (
            schema.shape == schema_of(name, DataRequest(classes=["a", "b"]), columns=columns).shape
        )  # the file repeats the default


@pytest.mark.parametrize(
    ("name", "shape", "classes", "model", "augment"),
    [
        ("mnist", (1, 28, 28), 10, "lenet", False),
        ("fmnist", (1, 28, 28), 10, "resnet18", False),
        ("emnist", (1, 28, 28), 26, "simple_cnn", False),
        ("svhn", (3, 32, 32), 10, "resnet18", False),
        ("cifar10", (3, 32, 32), 10, "resnet18", True),
        ("cifar100", (3, 32, 32), 100, "wrn28_10", True),
        ("cinic10", (3, 32, 32), 10, "resnet20", False),
        ("tinyimagenet", (3, 64, 64), 200, "resnet18", True),
        ("femnist", (1, 28, 28), 62, "simple_cnn", False),
        ("shakespeare", (80,), 80, "char_lstm", False),
        ("spiral", (2,), 5, "spiral_mlp", False),
    ],
)
def test_each_public_data_set_brings_a_model_that_takes_it_and_its_papers_augmentation(
    name, shape, classes, model, augment
) -> None:
    spec = compose_spec([f"data={name}"])
    schema = schema_of(name)
    assert (schema.shape, len(schema.classes), spec.train.augment) == (shape, classes, augment)
    assert spec.model["name"] == model
    describe(model, schema, {k: v for k, v in spec.model.items() if k != "name"})
    assert federation(name, federation_text(spec.federation))


FEDERATIONS = {
    "dirichlet": "dirichlet-0.5-10",
    "iid": "iid-10",
    "fednh": "dirichlet-0.3-100-two",
    "fedgela": "dirichlet-0.2-50",
    "persilo": "persilo-0.5-100",
    "label": "label-2-100",
    "map": "map-100",
    "users": "users-50",
    "clients20": "clients20",
    "centers": "centers-0-1-2-3-4-5",
}


def test_every_federation_configuration_names_a_federation() -> None:
    files = {file.stem: yaml.safe_load(file.read_text()) for file in (CONFIGS / "federation").glob("*.yaml")}
    assert {name: federation_text(config) for name, config in files.items()} == FEDERATIONS
    for name in PARTITIONS:
        assert federation_text({"name": name, "partition_seed": 0}) == name
        assert federation("cifar100", name)
    for name, text in FEDERATIONS.items():
        assert federation("isic2019" if name in ("centers", "clients20") else "digits", text)
    assert federation("isic2019", "centers") == federation("isic2019", FEDERATIONS["centers"])


def test_federation_configurations_by_field() -> None:
    assert federation_text({"name": "p7c3", "partition_seed": 5}) == "p7c3@5"
    assert federation_text({"name": "dirichlet", "beta": 1, "silos": 4, "partition_seed": 2}) == "dirichlet-1-4@2"
    assert federation_text({"name": "centers", "centers": [1, 5]}) == "centers-1-5"
    assert federation_text({"name": "clients20", "partition_seed": 4}) == "clients20@4"
    assert federation_text({"name": "dirichlet", "beta": 1, "silos": 4, "variant": "swap"}) == "dirichlet-1-4-swap"
    assert federation_text({"name": "dirichlet", "beta": 1, "silos": 4, "variant": None}) == "dirichlet-1-4"
    assert federation_text({"name": "label", "slots": 3, "silos": 4, "partition_seed": 1}) == "label-3-4@1"
    assert federation_text({"name": "centers-1-5"}) == "centers-1-5"
    assert federation_text({"name": "dirichlet-0.1-4", "partition_seed": 0}) == "dirichlet-0.1-4"
    for config, match in (
        ({"name": "p5c3x"}, "there is no federation"),
        ({"name": "p5c2", "silos": 5}, "no field 'silos'"),
        ({"name": "dirichlet", "beta": 1, "silos": 5, "variant": "three"}, "federation.variant"),
        ({"name": "map", "silos": 5, "beta": 1}, "no field 'beta'"),
        ({"name": "dirichlet", "silos": 5}, "federation.beta"),
        ({"name": "dirichlet", "beta": "a lot", "silos": 5}, "federation.beta"),
        ({"name": "p5c2", "partition_seed": -1}, "partition_seed"),
        ({"name": "p5c2", "partition_seed": None}, "partition_seed"),
        ({"name": "centers", "centers": []}, "centers"),
        ({}, "there is no federation"),
    ):
        with pytest.raises(ConfigError, match=match):
            federation_text(config)


@pytest.mark.parametrize("form", ["isic2019/clients{}/0", "isic2019/center{}", "digits/p{}c2/0", "digits/p5c2@{}/0"])
def test_a_number_of_thousands_of_digits_is_refused_like_any_other_wrong_reference(form: str) -> None:
    """Python itself reads no number of more than 4,300 digits."""
    with pytest.raises(ConfigError, match=r"E-CFG-01.*at most 4096 characters"):
        parse(form.format("9" * 5000))


def test_a_federation_of_thousands_of_characters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-01.*at most 4096 characters"):
        federation_text({"name": "iid-" + "9" * 5000})


def test_a_path_may_have_a_hash_sign(tmp_path: Path) -> None:
    folder = tmp_path / "study #1"
    folder.mkdir()
    ref = parse(f"folder:{folder}")
    assert (ref.path, ref.federation) == (folder, None)
    assert parse(str(ref)) == ref
    divided = parse(federation(f"folder:{folder}", "p5c2")[3])
    assert (divided.path, divided.silo) == (folder, 3)
    assert parse(str(divided)) == divided
    with pytest.raises(ConfigError, match=r"E-CFG-01.*nor is there anything at .*study #2, if # belongs to the path"):
        parse(f"folder:{tmp_path / 'study #2'}")
