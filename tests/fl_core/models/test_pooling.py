"""2 x 2 max pooling without gradients: torch's own is the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_core.models import build_model
from fl_core.models.small import MaxPool2
from fl_core.types.records import Schema


@pytest.mark.parametrize("shape", [(3, 4, 8, 8), (1, 16, 24, 24), (2, 3, 7, 9), (5, 2, 3), (0, 4, 6, 6), (1, 1, 2, 2)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_numbers_are_those_of_torch_however_they_are_computed(
    shape: tuple[int, ...], layout: torch.memory_format
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if x.numel():
        x[..., 0, 0], x[..., 1, 1] = float("nan"), -float("inf")
    if len(shape) == 4:
        x = x.contiguous(memory_format=layout)
    oracle, pool = nn.MaxPool2d(2), MaxPool2()
    for quiet in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with quiet():
            assert torch.equal(pool(x).nan_to_num(nan=7.0), oracle(x).nan_to_num(nan=7.0))


def test_evaluation_leaves_torchs_slow_loop_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise AssertionError("torch's own pooling")

    monkeypatch.setattr("fl_core.models.small.functional.max_pool2d", refused)
    net = build_model("lenet", {}, Schema((1, 28, 28), ("a", "b")), 0).eval()
    with torch.no_grad():
        assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 2)
    with pytest.raises(AssertionError, match="torch's own"):
        net(torch.zeros(2, 1, 28, 28))


def test_gradients_are_those_of_torch_with_ties_too() -> None:
    x = torch.randint(0, 3, (2, 3, 8, 8), generator=torch.Generator().manual_seed(1)).float()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    MaxPool2()(ours).square().sum().backward()  # type: ignore[no-untyped-call]
    nn.MaxPool2d(2)(theirs).square().sum().backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.enable_grad])
def test_an_exported_model_has_one_node_for_it(quiet: type[torch.no_grad]) -> None:
    with quiet():
        program = torch.export.export(MaxPool2(), (torch.randn(3, 2, 4, 4),))
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"] == [
        "aten.max_pool2d.default"
    ]
