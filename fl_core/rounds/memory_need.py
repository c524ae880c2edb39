"""The memory that a run takes at least, counted from its description before anything of it is built or fetched."""

from __future__ import annotations

import torch

from fl_core.methods import build_written
from fl_core.models import describe
from fl_core.rounds.manifest import NamedOptions
from fl_core.training import memory
from fl_core.types.records import Schema, TrainConfig

_FLOAT = 4


def require_memory(
    method: NamedOptions,
    model: NamedOptions,
    schema: Schema,
    train: TrainConfig,
    device: torch.device = memory.CPU,
    disclose: bool = False,
) -> None:
    """Raise RefusedError (E-RUN-38) where a model surely cannot be trained on a device; ConfigError as `describe`.

    A lower bound: weights with buffers, gradients, what the optimizer keeps, what was received, what will be sent, and
    what the method keeps beside the model. Activations, the data and torch itself come on top. Where the model trains
    on a GPU, what is received and sent lies in the machine's memory. Nothing is allocated.
    """
    facts = describe(model.name, schema, model.options)
    gradients = _FLOAT * facts.parameters
    kept = {"adam": 2 * gradients}.get(train.optimizer, gradients if train.momentum else 0)
    own = _FLOAT * build_written(method.name, method.options).own_numbers(len(schema.classes), facts.feature_dim)
    training, carried = facts.state_bytes + gradients + kept, 2 * facts.state_bytes + own
    on = {device: training, memory.CPU: carried} if device.type == "cuda" else {memory.CPU: training + carried}
    what = f"{model.name} with {facts.parameters:,} parameters, trained by {method.name} (data and activations apart)"
    for place, need in on.items():
        memory.require(
            need, place, what, "choose a smaller model or smaller options of it, or free memory there", disclose
        )
