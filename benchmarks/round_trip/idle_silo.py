"""A hospital that does not train: the real service, with one function in the place of a task's arithmetic."""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import argparse  # noqa: E402
from collections.abc import Collection, Mapping  # noqa: E402
from functools import cache  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from fl_core.aggregation import adaptive_guards  # noqa: E402
from fl_core.rounds.silo_round import SiloRound, SiloRuntime, run_silo_round  # noqa: E402
from fl_core.types.enums import TaskKind  # noqa: E402
from fl_core.types.interfaces import LocalData  # noqa: E402
from fl_core.types.metric_parts import GLOBAL_PARTS  # noqa: E402
from fl_core.types.values import Bundle, Part, PartSpec, RoundContext, State  # noqa: E402
from silo.cli import foreground  # noqa: E402
from silo.settings import SiloSettings  # noqa: E402
from silo.storage.home import Home  # noqa: E402

CHANGE = 1e-4
"""What a number of an update is; small, so that twenty rounds of it leave a model that is still one."""


def idle(
    bench: SiloRuntime, msg: State, state: State | None, data: LocalData, context: RoundContext, kind: TaskKind
) -> SiloRound:
    """Answer a bundle of the run's layout at once; a census, which comes before the rounds, is answered as ever."""
    if kind.census:
        return run_silo_round(bench, msg, state, data, context, kind)
    del data
    own = set(bench.layout) - adaptive_guards.groups(bench.guards)
    parts = own & set(GLOBAL_PARTS) if kind is TaskKind.EVALUATE else own
    bundle = constant_update(bench.layout, parts, context.round * context.n_silos + context.silo)
    measured = {name: bundle[name] for name in parts & set(GLOBAL_PARTS)}
    if bench.masking is not None:
        size = list(bench.masking.check.sizes.values())[context.silo].train
        bundle = {name: part if name in GLOBAL_PARTS else _of_size(part, size) for name, part in bundle.items()}
    for guard in adaptive_guards.guards_for_round(bench.guards, msg):
        bundle = guard.outgoing(bundle, context.silo, context.round)
    if bench.masking is not None:
        bundle = bench.masking.flat(bundle, kind, context, msg)
    return SiloRound(bundle, {} if state is None else state, measured)


def constant_update(layout: Mapping[str, PartSpec], parts: Collection[str], number: int) -> Bundle:
    """Make some parts of a layout: nearly constant tensors of weight 1, no test examples.

    Those of two numbers differ, as any two do that were trained: equal ones would be one object, in one file.
    """
    bundle: Bundle = {name: _part(name, _frozen(layout[name])) for name in parts}
    return {name: part if name in GLOBAL_PARTS else _signed(part, number) for name, part in bundle.items()}


def _of_size(part: Part, size: float) -> Part:
    return Part({name: size * value for name, value in part.total.items()}, size * part.weight)


_Frozen = tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[int, ...]]


def _frozen(spec: PartSpec) -> _Frozen:
    return tuple(sorted(spec.shapes.items())), spec.weight_shape


def _signed(part: Part, number: int) -> Part:
    """Put a number of its own in the place of a part's first."""
    name = min(part.total, key=lambda name: part.total[name].numel())
    own = part.total[name].clone()
    own.view(-1)[0] = CHANGE / (2 + number)
    return Part({**part.total, name: own}, part.weight)


@cache
def _part(name: str, spec: _Frozen) -> Part:
    """Make a part once: its tensors are the same in every round."""
    shapes, weight = spec
    if name in GLOBAL_PARTS:
        return Part({key: torch.zeros(shape) for key, shape in shapes}, torch.zeros(weight))
    return Part({key: torch.full(shape, CHANGE) for key, shape in shapes}, torch.ones(weight))


def main() -> None:
    """Serve a home until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--data", required=True)
    words = parser.parse_args()
    foreground.serve(SiloSettings(Home(words.home), words.data, device="cpu"), as_json=True, run_round=idle)


if __name__ == "__main__":
    main()
