"""Training with `torch.compile`, for the model's features only, which take most of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fl_core.errors import ConfigError

BACKEND = "inductor"
MAX_VERSIONS = 64
"""Limit of compiled versions of one piece of code, for other models and shapes, in one process."""


@contextmanager
def compiled(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Run `features` of a model and of its modules compiled inside the block, and unchanged outside.

    Methods call features and head separately, so a compiled `forward` would not be used; it is compiled if no module
    has features. Torch keeps compiled code and finds it again in the next round.

    Raises ConfigError (E-CFG-08) if this machine has no compiler, or torch cannot compile the model.
    """
    if not wanted:
        yield
        return
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    with_features = [m for m in model.modules() if callable(getattr(type(m), "features", None))]
    places = [(m, "features") for m in with_features] or [(model, "forward")]
    for module, name in places:
        setattr(module, name, torch.compile(getattr(module, name), backend=BACKEND))
    try:
        # Otherwise torch stops compiling after some versions and reports this only in its log.
        with config.patch(recompile_limit=MAX_VERSIONS, fail_on_recompile_limit_hit=True):
            yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        reason = str(error).strip().splitlines()[:1]
        raise ConfigError(
            "E-CFG-08",
            f"torch.compile failed for this model on this machine: {type(error).__name__} "
            f"({reason[0][:200] if reason else 'no reason'}). Install a C++ compiler (g++) there, or leave "
            "train.compile out",
        ) from error
    finally:
        for module, name in places:
            delattr(module, name)
