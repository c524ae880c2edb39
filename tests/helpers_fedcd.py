"""A silo's round of FedCD, for its tests."""

from __future__ import annotations

from dataclasses import replace

from helpers_core import FED, SCHEMA, shares

from fl_core.methods.disjoint.fedcd import FedCD
from fl_core.models import build_model
from fl_core.models.split_model import SplitModel
from fl_core.training.local_data import PlainLocalData
from fl_core.types.values import LocalResult, State, TrainConfig

TRAIN = TrainConfig(lr=0.05, batch_size=4, epochs=2)


def model_of(seed: int = 0) -> SplitModel:
    return build_model("digits_cnn", {}, SCHEMA, seed)


def played(method: FedCD, k: int = 0, server: State | None = None, t: int = 0) -> tuple[State, LocalResult]:
    """Train one silo for one round."""
    share, context = shares()[k], replace(FED, round=t).for_silo(k, 0)
    msg = method.broadcast(method.init_server(model_of(), FED) if server is None else server)
    return msg, method.local(model_of(), msg, {}, PlainLocalData(share.train, share.test, TRAIN, context), context)
