"""BatchNorm statistics of a model whose weights did not come from training, measured on a silo's examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_core.types.interfaces import LocalData
from fl_core.types.values import ExampleSums, Tensors


def recompute(model: nn.Module, data: LocalData) -> None:
    """Set every layer's running mean and variance to those of its input over the training set, in place.

    One `sum` query without augmentation, in which the layers normalise by the statistics of each batch. Moments are
    taken around the old mean, which keeps digits. A batch of one example has no statistics and is left out; without
    another batch the old ones stay. Leaves the model in eval mode.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    if not layers:
        return
    model.eval()
    momenta = {name: layer.momentum for name, layer in layers.items()}
    for layer in layers.values():
        layer.train()
        layer.momentum = 0.0  # the origin of the moments stays where it is
    sums = data.sum(ExampleSums(lambda x, _: _moments(model, layers, x)))
    model.eval()
    for name, layer in layers.items():
        if (n := float(sums[f"{name}.n"])) > 1:
            mean, square = sums[f"{name}.mean"] / n, sums[f"{name}.square"] / n
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean += mean.to(layer.running_mean)
            layer.running_var.copy_((square - mean.square()).clamp_min(0.0) * n / (n - 1))
        layer.momentum = momenta[name]


def _moments(model: nn.Module, layers: Mapping[str, _BatchNorm], x: Tensor) -> Tensors:
    """Pass one batch and return, per layer and example, the numbers per channel and their first two moments' sums."""
    rows: dict[str, Tensor] = {}
    if len(x) == 1:
        for name, layer in layers.items():
            nothing = x.new_zeros(1, layer.num_features)
            rows |= {f"{name}.n": nothing[:, 0], f"{name}.mean": nothing, f"{name}.square": nothing}
        return rows

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, _BatchNorm)
            assert layer.running_mean is not None
            v = args[0].reshape(len(x), layer.num_features, -1)  # (B, channels, places)
            v = v - layer.running_mean.view(-1, 1)
            rows[f"{name}.n"] = v.new_full((len(x),), v.shape[2])
            rows[f"{name}.mean"], rows[f"{name}.square"] = v.sum(2), v.square().sum(2)

        return note

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return rows
