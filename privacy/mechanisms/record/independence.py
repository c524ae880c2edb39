"""Test whether an example's loss depends only on that example: adding or removing others must not change its gradient.

A clip per example bounds the effect of one record only if no record changes the contribution of another. So the test
inserts examples at the front, in the middle and at the end of synthetic batches, including zeros, 1e30, infinite and
NaN. It does so in train mode, at the size of the run's batches and at the smallest size, and then computes the first
loss again. Gradients of the other examples are compared as a sum with random weights; next to examples that are not
finite, rows of the layers' outputs and of their gradients are compared.

Layers that draw random numbers in training are in eval mode here; private training draws for each unit in secret. A
loss that draws numbers itself is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial

from fl_core import rng
from fl_core.errors import RefusedError
from fl_core.tensors import Tensor, nn, torch
from fl_core.types.records import Schema
from fl_core.types.values import ClassSums, Losses, LossFn, MomentSums
from privacy.mechanisms.record.model_check import validate

MAX_BATCH = 64
"""Largest batch size that is tested."""
SMALL_BATCHES = (1, 2, 3)
WORK = 64_000_000
"""Most multiplications of a forward pass over the largest batch; larger networks are tested with smaller batches."""
HEAVY = 20_000_000
"""With more multiplications per example, only one batch of two is tested, once, in float32."""
PROBES = ((torch.float64, 1e-10), (torch.float32, 1e-4))
"""Precisions, and the tolerated rounding of a gradient, relative to its largest entry (at least 1)."""


def check_independence(model: nn.Module, loss: LossFn, schema: Schema, batch_size: int = MAX_BATCH) -> None:
    """Raise RefusedError (E-PRIV-16) if an example's contribution depends on others, or if the loss draws numbers.

    The test uses synthetic examples in float64, or in float32 if the loss contains float32 models or the model is very
    large. Raises ConfigError (E-PRIV-14) if a layer of the model mixes examples. Does not change the model.
    """
    validate(model)
    twin, drawn = copy.deepcopy(model).train(), DrawDetector(loss)
    x, y = blanks(schema, 2, 0)
    with rng.torch_scope(0, "independence"):
        disable_random_layers(twin, lambda: loss(twin, x, y))
        drawn.begin()
        work = _multiplications(twin, lambda: loss(twin, x, y)) // 2
        heavy = work > HEAVY
        for dtype, tolerance in PROBES[heavy:]:
            probe = _Probe(copy.deepcopy(twin).to(dtype), loss, schema, dtype, tolerance)
            try:
                probe.observe(probe.batch(2, 0), [0, 1])
            except RuntimeError:
                if dtype is PROBES[-1][0]:
                    raise
                continue
            sizes = [2] if heavy else sorted({*SMALL_BATCHES, min(batch_size, MAX_BATCH, max(3, WORK // max(1, work)))})
            for n in sizes:
                probe.check(n, once=heavy)
            if not heavy:
                probe.check_crowded(sizes[-1])
            break
        drawn.check()


def check_rows(query: ClassSums | MomentSums, schema: Schema) -> None:
    """Raise RefusedError (E-PRIV-16) if the vector that an example adds to a sum depends on other examples."""
    base = blanks(schema, 6, 99)
    batch, kept = _inserted(base, _nonsense_examples(base, len(schema.classes)), [0, 0, 3, 3, 6])
    with torch.no_grad():
        alone, among = query.vectors(*base), query.vectors(*batch)
    if alone.shape[:1] != (6,) or among.shape[:1] != batch[1].shape:
        raise _refused(f"a query of {len(batch[1])} examples has {tuple(among.shape)} numbers")
    if not (moved := _distance(alone, among[kept])) <= PROBES[-1][1]:
        raise _refused(f"its vector in a sum changes by {moved:.1e} when other examples are added")


def blanks(schema: Schema, n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(n, *schema.shape, generator=g), torch.randint(len(schema.classes), (n,), generator=g)


_Batch = tuple[Tensor, Tensor]


@dataclass(slots=True)
class _Observed:
    """Observations of the kept examples: losses, weighted gradient, layers' rows. coupled: the gradient of all."""

    losses: Tensor
    gradient: Tensor
    coupled: Tensor
    rows: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Probe:
    """One model and loss in one precision."""

    model: nn.Module
    loss: LossFn
    schema: Schema
    dtype: torch.dtype
    tolerance: float

    def batch(self, n: int, seed: int) -> _Batch:
        x, y = blanks(self.schema, n, seed)
        return x.to(self.dtype), y

    def check(self, n: int, once: bool) -> None:
        """Raise RefusedError if one of n examples changes with its neighbours. once: insert finite ones together."""
        base, middle = self.batch(n, 99), n // 2
        stay = list(range(n))
        alone = self.observe(base, stay)
        for places in [[0, n]] if once else [[0], [middle], [n, n]]:
            batch, kept = _inserted(base, self.batch(len(places), 7 + n), places)
            self.compare("others come", alone, self.observe(batch, kept))
        batch, kept = _inserted(base, _nonsense_examples(base, len(self.schema.classes)), [0, 0, middle, middle, n])
        try:
            self.compare("others are not finite", alone, self.observe(batch, kept, finite=False))
        except (RuntimeError, ValueError, IndexError, AssertionError, ZeroDivisionError) as error:
            raise _refused(f"the loss fails when another example is not finite ({type(error).__name__})") from error
        again = self.observe(base, stay)
        self.compare("others came before", alone, again)
        if not _distance(alone.coupled, again.coupled) <= self.tolerance:
            raise _refused("the coupled term of a batch changes after other batches")

    def check_crowded(self, n: int) -> None:
        base = self.batch(1, 99)
        batch, kept = _inserted(base, self.batch(n - 1, 8), [0] * (n // 2) + [1] * (n - 1 - n // 2))
        self.compare("a whole batch comes", self.observe(base, [0]), self.observe(batch, kept))

    def observe(self, batch: _Batch, kept: Sequence[int], finite: bool = True) -> _Observed:
        index, outs = torch.tensor(kept), list[Tensor]()
        with _OutputHooks(self.model, lambda _, out: outs.append(out)):
            losses, coupled = self.loss(self.model, *batch)
        if losses.shape != (len(batch[1]),):
            raise _refused(f"there are {tuple(losses.shape)} losses of {len(batch[1])} examples")
        outs = [out for out in outs if out.dim() and len(out) == len(batch[1])]
        params = [p for p in self.model.parameters() if p.requires_grad] if finite else []
        weight = 0.5 + torch.rand(len(kept), generator=torch.Generator().manual_seed(3), dtype=self.dtype)
        slopes = self._slopes((losses[index] * weight).sum(), [*params, *outs])
        rows = [v.detach()[index] for v in (*outs, *slopes[len(params) :])]
        mixed = self._slopes(coupled, params) if coupled is not None else []
        return _Observed(losses.detach()[index], _flat(slopes[: len(params)]), _flat(mixed), rows)

    @staticmethod
    def _slopes(total: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
        if not total.requires_grad or not of:
            return [torch.zeros_like(v) for v in of]
        slopes = torch.autograd.grad(total, list(of), allow_unused=True, retain_graph=True)
        return [torch.zeros_like(v) if g is None else g for v, g in zip(of, slopes, strict=True)]

    def compare(self, when: str, alone: _Observed, among: _Observed) -> None:
        pairs = [(alone.losses, among.losses), *zip(alone.rows, among.rows, strict=False)]
        if len(alone.rows) != len(among.rows):
            raise _refused(f"other layers run when {when}")
        if len(among.gradient):
            pairs.append((alone.gradient, among.gradient))
        moved = max(_distance(a, b) for a, b in pairs)
        if not moved <= self.tolerance:
            raise _refused(f"its gradient changes by {moved:.1e} when {when}")


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([g.flatten().double() for g in gradients] or [torch.zeros(0, dtype=torch.float64)])


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the distance of two tensors, relative to the largest entry of the first (at least 1)."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    both = torch.isnan(a) & torch.isnan(b) | (a == b)
    return float((a - b).masked_fill(both, 0.0).abs().max() / a.nan_to_num().abs().max().clamp(min=1.0))


def _nonsense_examples(base: _Batch, classes: int) -> _Batch:
    x = torch.stack([torch.full_like(base[0][0], v) for v in (0.0, 1e30, float("inf"), float("nan"))])
    y = torch.cat((torch.arange(4) % classes, (base[1][:1] + 1) % classes))
    return torch.cat((x, base[0][:1])), y


def _inserted(base: _Batch, more: _Batch, places: Sequence[int]) -> tuple[_Batch, list[int]]:
    """Insert examples of `more` into `base` before `places`, in rising order.

    Returns the batch, and the positions in it of the examples of `base`.
    """
    n, order = len(base[1]), list[int]()
    for k in range(n + 1):
        order += [n + j for j, place in enumerate(places) if place == k]
        order += [k] if k < n else []
    whole = torch.cat((base[0], more[0])), torch.cat((base[1], more[1]))
    return (whole[0][order], whole[1][order]), [order.index(k) for k in range(n)]


def _refused(problem: str) -> RefusedError:
    return RefusedError(
        "E-PRIV-16",
        f"the loss of an example must depend on that example alone, but {problem}: move terms that mix examples into "
        "the coupled term",
    )


class _OutputHooks:
    """Reports, while open, every output of a layer that has trainable parameters itself."""

    def __init__(self, model: nn.Module, on_output: Callable[[nn.Module, Tensor], None]) -> None:
        self._layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._on_output = on_output
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        self._hooks = [layer.register_forward_hook(self._note) for layer in self._layers]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, layer: nn.Module, inputs: object, out: object) -> None:  # noqa: ARG002
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor) and first.requires_grad:
            self._on_output(layer, first)


def _multiplications(model: nn.Module, run: Callable[[], Losses]) -> int:
    counts: list[int] = []

    def count(layer: nn.Module, out: Tensor) -> None:
        parameters, width = (
            sum(p.numel() for p in layer.parameters(recurse=False)),
            out.shape[1 if out.dim() > 3 else -1],
        )
        counts.append(out.numel() // max(1, width) * parameters)

    with _OutputHooks(model, count):
        run()
    return sum(counts)


# ---- where randomness enters a step ----------------------------------------------------------------------------------

_DEEP = 6
"""Search depth for generators in a loss: a function's cells, their attributes, and so on."""


def disable_random_layers(model: nn.Module, run: Callable[[], object]) -> None:
    while drawing := _drawing(model, run):
        for module in drawing:
            module.training = False


def _drawing(model: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    drawing: list[nn.Module] = []
    states: list[Tensor] = []

    def before(_: nn.Module, __: object) -> None:
        states.append(torch.get_rng_state())

    def after(module: nn.Module, _: object, __: object) -> None:
        drew = not torch.equal(states.pop(), torch.get_rng_state())
        if drew and module.training and not any(m in drawing for m in list(module.modules())[1:]):
            drawing.append(module)

    handles = [m.register_forward_pre_hook(before) for m in model.modules()]
    handles += [m.register_forward_hook(after) for m in model.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return drawing


class DrawDetector:
    """Detects whether a loss draws random numbers from torch's generator, or from generators that it refers to."""

    def __init__(self, loss: object) -> None:
        self._held = list(_generators(loss, set(), _DEEP))
        self._before: list[Tensor] = []

    def begin(self) -> None:
        self._before = self._states()

    def check(self) -> None:
        """Raise RefusedError (E-PRIV-16) if a number was drawn since `begin`."""
        if any(not torch.equal(a, b) for a, b in zip(self._before, self._states(), strict=True)):
            raise RefusedError(
                "E-PRIV-16",
                "the loss draws random numbers: they depend on the position in the batch, which changes when an "
                "example is added. Use a loss without random numbers",
            )

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(g.get_state() for g in self._held)]


def _generators(value: object, met: set[int], deep: int) -> Iterator[torch.Generator]:
    if isinstance(value, torch.Generator):
        yield value
        return
    if id(value) in met or not deep or isinstance(value, Tensor | nn.Module | str | int | float | type(None)):
        return
    met.add(id(value))
    for part in _held_by(value):
        yield from _generators(part, met, deep - 1)


def _held_by(value: object) -> list[object]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        return [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)] + list(
            value.__defaults__ or ()
        )
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in fields(value)]
    return list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []


def _filled(cell: object) -> bool:
    try:
        return cell.cell_contents is not None  # type: ignore[attr-defined]
    except ValueError:
        return False
