"""Check that a model's gradients can be bounded per example."""

from __future__ import annotations

from fl_core.errors import ConfigError
from fl_core.tensors import nn


def validate(model: nn.Module) -> None:
    """Raise ConfigError (E-PRIV-14) on a module that mixes the examples of a batch, works in place or is recurrent.

    BatchNorm is refused in every form: frozen parameters do not stop its batch statistics, and its buffers leave
    unnoised.
    """
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                "E-PRIV-14",
                f"{where} normalises by batch statistics, which mixes examples: choose model.norm=group, or a model "
                "with frozen normalisation",
            )
        if getattr(module, "track_running_stats", False):
            raise ConfigError(
                "E-PRIV-14", f"{where} keeps running statistics of the data: set track_running_stats=False"
            )
        if isinstance(module, nn.RNNBase):
            raise ConfigError(
                "E-PRIV-14",
                f"{where} is recurrent, and per-example gradients of such layers are not supported: choose another "
                "model for a private run",
            )
        if getattr(module, "inplace", False):
            raise ConfigError(
                "E-PRIV-14",
                f"{where} is an in-place operation, which per-example gradients do not allow: set inplace=False",
            )
