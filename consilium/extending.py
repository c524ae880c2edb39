"""The parts for your own methods, models, data sets and partitions; docs/extending explains their use."""

from service_core.progress import still_working

with still_working("loads PyTorch"):
    from fl_core.datasets.augmentation import Augmentation
    from fl_core.errors import ConfigError, DataError
    from fl_core.extensions.user_data import ArrayData
    from fl_core.extensions.user_partition import OwnPartition
    from fl_core.methods.fedavg import FedAvg
    from fl_core.models import ModelOptions
    from fl_core.models.split_model import HeadOptions, SplitModel
    from fl_core.types.enums import Capability, Coupling
    from fl_core.types.interfaces import LocalData
    from fl_core.types.records import Schema
    from fl_core.types.values import (
        AS_SCHEDULED,
        Bundle,
        ClassSums,
        ExampleSums,
        LocalResult,
        Losses,
        LossFn,
        Part,
        PartRule,
        RoundContext,
        SgdOptions,
        State,
    )
    from fl_core.validate import Count, NonNegative, Positive, PositiveCount, UnitInterval

__all__ = [
    "AS_SCHEDULED",
    "ArrayData",
    "Augmentation",
    "Bundle",
    "Capability",
    "ClassSums",
    "ConfigError",
    "Count",
    "Coupling",
    "DataError",
    "ExampleSums",
    "FedAvg",
    "HeadOptions",
    "LocalData",
    "LocalResult",
    "LossFn",
    "Losses",
    "ModelOptions",
    "NonNegative",
    "OwnPartition",
    "Part",
    "PartRule",
    "Positive",
    "PositiveCount",
    "RoundContext",
    "Schema",
    "SgdOptions",
    "SplitModel",
    "State",
    "UnitInterval",
]
