"""The contracts of models, data sets and partitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from consilium.testing.methods import run_checks
from fl_core.converter import Option
from fl_core.datasets.partition.federations import Partitioner, federation_text, parse_federation
from fl_core.extensions import loading, user_data
from fl_core.extensions.user_data import ArrayData
from fl_core.extensions.user_partition import OwnPartition
from fl_core.models import ModelOptions, SplitModel, build_model, describe
from fl_core.types import tensor_maps
from fl_core.types.records import Schema

__all__ = ["check_data", "check_model", "check_partition"]


@dataclass(frozen=True)
class ModelCase:
    """A model by name, its options, and the schema of its examples."""

    name: str
    options: Mapping[str, Option]
    schema: Schema

    def built(self, seed: int = 0) -> SplitModel:
        return build_model(self.name, self.options, self.schema, seed)

    def batch(self, n: int = 5) -> torch.Tensor:
        return torch.rand(n, *self.schema.shape, generator=torch.Generator().manual_seed(0))


def forward_is_head_of_features_with_a_row_of_logits_per_example(case: ModelCase) -> None:
    model, x = case.built().eval(), case.batch()
    z = model.features(x)
    assert z.shape == (5, model.feature_dim)
    assert model(x).shape == (5, len(case.schema.classes)) == (5, model.n_classes)
    assert torch.equal(model(x), model.head(z))


def equal_seeds_give_equal_weights_and_others_do_not(case: ModelCase) -> None:
    a, b, c = (tensor_maps.digest(tensor_maps.copy_state(case.built(seed))) for seed in (0, 0, 1))
    assert a == b
    assert a != c


def building_leaves_the_global_generator_alone(case: ModelCase) -> None:
    before = torch.random.get_rng_state()
    case.built()
    assert torch.equal(torch.random.get_rng_state(), before)


def no_module_changes_its_input(case: ModelCase) -> None:
    model, x = case.built().eval(), case.batch()
    kept = x.clone()
    model(x)
    assert torch.equal(x, kept)


def every_parameter_that_trains_gets_a_finite_gradient(case: ModelCase) -> None:
    model = case.built().train()
    loss = torch.nn.functional.cross_entropy(model(case.batch()), torch.zeros(5, dtype=torch.int64))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        assert gradient is not None, name
        assert torch.isfinite(gradient).all(), name


def examples_do_not_mix_in_evaluation(case: ModelCase) -> None:
    model, x = case.built().eval(), case.batch()
    assert torch.allclose(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)


def it_can_be_counted_without_being_built(case: ModelCase) -> None:
    facts, model = describe(case.name, case.schema, case.options), case.built()
    assert facts.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


MODEL_CHECKS: tuple[Callable[[ModelCase], None], ...] = (
    forward_is_head_of_features_with_a_row_of_logits_per_example,
    equal_seeds_give_equal_weights_and_others_do_not,
    building_leaves_the_global_generator_alone,
    no_module_changes_its_input,
    every_parameter_that_trains_gets_a_finite_gradient,
    examples_do_not_mix_in_evaluation,
    it_can_be_counted_without_being_built,
)


def check_model(model: type[ModelOptions], shape: tuple[int, ...], classes: int = 4, /, **options: Option) -> None:
    """Check your model on examples of this shape; raises AssertionError that lists every failed check."""
    with loading.registered("model", model) as name:
        case = ModelCase(name, options, Schema(shape, tuple(map(str, range(classes)))))
        run_checks(MODEL_CHECKS, case, model.__name__)


@dataclass(frozen=True)
class DataCase:
    """A data set by name, and its folder."""

    name: str
    root: Path | None


def arrays_are_what_the_class_says(case: DataCase) -> None:
    user_data.read(case.name, case.root)


def reading_repeats(case: DataCase) -> None:
    a, b = (user_data.read(case.name, case.root) for _ in range(2))
    for one, two in ((a.train, b.train), (a.test, b.test)):
        assert torch.equal(one.x, two.x)
        assert np.array_equal(one.y, two.y)


def both_splits_have_examples_and_training_has_every_class(case: DataCase) -> None:
    data = user_data.read(case.name, case.root)
    assert len(data.test.y)
    missing = sorted(set(range(len(data.classes))) - set(data.train.y.tolist()))
    assert not missing, f"no training example of {[data.classes[c] for c in missing]}"


def no_training_example_is_tested(case: DataCase) -> None:
    data = user_data.read(case.name, case.root)
    seen = {row.numpy().tobytes() for row in data.train.x}
    shared = sum(row.numpy().tobytes() in seen for row in data.test.x)
    assert not shared, f"{shared} test examples are training examples, too"


DATA_CHECKS: tuple[Callable[[DataCase], None], ...] = (
    arrays_are_what_the_class_says,
    reading_repeats,
    both_splits_have_examples_and_training_has_every_class,
    no_training_example_is_tested,
)


def check_data(data: type[ArrayData], root: Path | None = None) -> None:
    """Check your data set; raises AssertionError that lists every failed check."""
    with loading.registered("data", data) as name:
        run_checks(DATA_CHECKS, DataCase(name, root), data.__name__)


@dataclass(frozen=True)
class PartitionCase:
    """A partition by name, and train and test labels to divide."""

    name: str
    options: Mapping[str, Option]
    labels: tuple[np.typing.NDArray[np.int64], np.typing.NDArray[np.int64]]
    n_classes: int

    @property
    def partitioner(self) -> Partitioner:
        return parse_federation(federation_text({"name": self.name, **self.options}))


def the_name_of_a_partition_reads_back(case: PartitionCase) -> None:
    assert parse_federation(case.partitioner.text) == case.partitioner


def parts_of_different_silos_are_disjoint(case: PartitionCase) -> None:
    parts = case.partitioner.partition(*case.labels, case.n_classes)
    for split in ("train", "test"):
        every = np.concatenate([getattr(part, split) for part in parts])
        assert len(np.unique(every)) == len(every), f"some {split} examples are in two silos"


def equal_labels_are_divided_equally(case: PartitionCase) -> None:
    train, test = case.labels
    a, b = (case.partitioner.partition(train.copy(), test.copy(), case.n_classes) for _ in range(2))
    assert all(np.array_equal(p, q) for one, two in zip(a, b, strict=True) for p, q in zip(one, two, strict=True))


def every_silo_can_train(case: PartitionCase) -> None:
    empty = [k for k, p in enumerate(case.partitioner.partition(*case.labels, case.n_classes)) if not len(p.train)]
    assert not empty, f"silos without a training example: {empty}"


PARTITION_CHECKS: tuple[Callable[[PartitionCase], None], ...] = (
    the_name_of_a_partition_reads_back,
    parts_of_different_silos_are_disjoint,
    equal_labels_are_divided_equally,
    every_silo_can_train,
)


def check_partition(
    partition: type[OwnPartition], n_classes: int = 10, per_class: int = 60, /, **options: Option
) -> None:
    """Check your partition on shuffled labels; raises AssertionError that lists every failed check."""
    draw = np.random.default_rng(0)
    train, test = (draw.permutation(np.repeat(np.arange(n_classes), n)) for n in (per_class, per_class // 4))
    with loading.registered("partition", partition) as name:
        case = PartitionCase(name, options, (train.astype(np.int64), test.astype(np.int64)), n_classes)
        run_checks(PARTITION_CHECKS, case, partition.__name__)
