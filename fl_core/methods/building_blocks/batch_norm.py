"""BatchNorm statistics of a model whose weights did not come from training, measured on a silo's examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_core.types.interfaces import LocalData
from fl_core.types.values import ExampleSums, Tensors


class _ReachedError(Exception):
    """Ends a forward pass at a layer whose input is all that is wanted."""

    def __init__(self, layer: str, rows: Tensors) -> None:
        self.layer, self.rows = layer, rows


def recompute(model: nn.Module, data: LocalData) -> None:
    """Set every layer's running mean and variance to those of its input over the training set, in place.

    One `sum` query without augmentation per layer, in the order in which the network reaches them, up to that layer:
    those before it normalise by the statistics that were just measured. Moments are sums over examples in float64,
    around the old mean, which keeps digits. Those of a single example are none: the old ones stay. Leaves the model in
    eval mode.

    Guarantees: neither the order of the examples nor how they are batched matters, up to the rounding of features.
    """
    model.eval()
    pending = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    while pending:
        reached: set[str] = set()
        sums = data.sum(ExampleSums(lambda x, _, seen=reached: _moments(model, pending, x, seen)))  # type: ignore[misc]
        if not reached:
            return  # no examples, or layers that the network does not use
        layer = pending.pop(reached.pop())
        if float(sums["examples"]) > 1:
            n = float(sums["numbers"])
            mean, square = sums["mean"] / n, sums["square"] / n
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean += mean.to(layer.running_mean)
            layer.running_var.copy_((square - mean.square()).clamp_min(0.0) * n / (n - 1))


def _moments(model: nn.Module, layers: Mapping[str, _BatchNorm], x: Tensor, reached: set[str]) -> Tensors:
    """Pass one batch to the first of the layers; return per example its numbers per channel and two moments' sums."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def stop(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, _BatchNorm)
            assert layer.running_mean is not None
            v = args[0].double().reshape(len(x), layer.num_features, -1)  # (B, channels, places)
            v = v - layer.running_mean.double().view(-1, 1)
            one = v.new_ones(len(x))
            sums = {"examples": one, "numbers": v.shape[2] * one, "mean": v.sum(2), "square": v.square().sum(2)}
            raise _ReachedError(name, sums)

        return stop

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        model(x)
    except _ReachedError as found:
        reached.add(found.layer)
        return found.rows
    finally:
        for hook in hooks:
            hook.remove()
    return {}
