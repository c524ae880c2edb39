"""The interfaces: access to the examples, a method, a guard, a port. They define guarantees, not only types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from fl_core.types.enums import Capability, Coupling, Split, TaskKind
from fl_core.types.records import TrainConfig
from fl_core.types.values import (
    AS_SCHEDULED,
    Bundle,
    Examples,
    LocalResult,
    LossFn,
    Part,
    PartRule,
    Progress,
    Query,
    RoundContext,
    SgdOptions,
    State,
    Tensors,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class LocalData(Protocol):
    """The only access to a silo's examples: `sgd` and `sum`.

    `PlainLocalData` and the data of private runs implement it; a method cannot tell which one it uses.
    """

    lr: float
    batch_size: int

    @property
    def multi_label(self) -> bool:
        """Whether records have several labels at once."""
        ...

    def planned_steps(self, epochs: float | None = None) -> int:
        """Return the number of optimiser steps that `sgd` will take; a public constant in a private run."""
        ...

    def effective_steps(self, steps: int, mu: float = 0.0) -> float:
        """Return A_k, the effective number of steps: how far they move a scalar of gradient 1, in units of -lr.

        mu: strength of a proximal term. Raises ConfigError (E-CFG-08) for an adaptive optimizer.
        """
        ...

    def sgd(self, model: nn.Module, loss: LossFn, options: SgdOptions = AS_SCHEDULED) -> int: ...

    def sum(self, query: Query, *, bound: float | None = None, split: Split = Split.TRAIN) -> Tensors:
        """Sum a query over the examples of a split, without augmentation; a charged release under DP.

        bound: l2 norm of one example's contribution; None takes the privacy plan's.
        """
        ...

    def size(self) -> float:
        """Return the number of training examples; the declared nominal size in a private or masked run."""
        ...

    def class_counts(self) -> Tensor:
        """Return the training examples per class (C,): a `sum` query, charged once and cached under DP."""
        ...

    def contributes(self) -> Tensor:
        """Return the classes (C,) for which sums over training examples may have rows other than zeros."""
        ...


class StepPart(NamedTuple):
    """What one process computes of a training step.

    tensors: with a row for each example   numbers: of all of it   seed: of what layers draw; None for secret draws.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    seed: int | None = None


Gradients = Sequence["Tensor | None"]
"""One tensor per parameter; None where the loss does not depend on it."""


class Team:
    """The processes that compute a silo's steps; this class is a process that computes alone."""

    size: int = 1

    def deal(self, params: Sequence[nn.Parameter], parts: Sequence[StepPart]) -> None:
        """Give each helper at most one part of a step, to be computed with these parameters."""

    def collect(self) -> Iterator[Gradients]:
        """Return the gradients of the parts that were dealt, in their order; each is valid until the next is dealt."""
        return iter(())

    def finish(self, params: Sequence[nn.Parameter]) -> None:
        """End a call of `sgd`, with the trained parameters."""


@dataclass(frozen=True, slots=True)
class RoundData:
    """The input of a silo's round: its examples, the schedule, and the model's device.

    device: the CPU by default   progress: receives steps done and total steps   public: the public test set, if there
    is one   team: computes the steps.
    """

    train: Examples
    test: Examples
    config: TrainConfig
    context: RoundContext
    device: torch.device | None = None
    progress: Progress | None = None
    public: Examples | None = None
    team: Team = Team()  # noqa: RUF009 - it has no state


DataFactory = Callable[[RoundData], LocalData]
"""Opens a round's data: `PlainLocalData`, or a privacy profile's replacement. A private profile reserves the round's
releases before any example is read."""


class Method(Protocol):
    """One federated method, both halves: a frozen dataclass of hyper-parameters without state.

    Required properties, each checked by the contract suite for every method: `local` mutates none of its arguments
    except `model`; one exchange per round, a State down and a Bundle up; the bundle's layout is the same for every silo
    and every round. `model` has the run's initial weights on entry, except for `personal` after a round's training,
    which gets it as `local` left it.
    """

    name: ClassVar[str]
    has_global_model: ClassVar[bool] = True
    """Whether the federation has a global model; otherwise no global accuracy is measured and nothing exported."""
    ga_is_personal: ClassVar[bool] = False
    """Whether papers compute its generic accuracy (GA) from personal models, on the whole test set: a global model may
    exist, but no silo would use it."""
    personal_at_end: ClassVar[bool] = False
    """Whether personal models are made once, from the final global model: they are measured only in the closing
    evaluation."""
    server_tracks_state: ClassVar[bool] = False
    """Whether the server keeps a sum of silo states: then a silo whose update was not included discards its new state;
    otherwise it keeps it."""

    bias_follows_classes: ClassVar[bool] = False
    """Whether training raises the head's bias for the silo's own classes, as plain cross entropy does: updates that
    lower it are then refused."""
    even_norms: ClassVar[bool] = True
    """Whether honest updates stay within 100 medians; if not, long updates are clipped and none is refused."""

    exact: ClassVar[bool] = False
    """Whether updates contain float64 numbers, on a grid on which their sums are exact."""

    @property
    def exchanges(self) -> int:
        """Return after how many rounds the method ends; 0 if every round improves the model."""
        return 0

    def fingerprint(self, update: Bundle) -> str:  # noqa: ARG002
        """Return a digest of an update's contribution to a sum; empty if it cannot be taken out of it again."""
        return ""

    def expects(self, round: int) -> str:  # noqa: ARG002
        """Return the fingerprint that every update of a training round must have; empty for any."""
        return ""

    def own_numbers(self, n_classes: int, feature_dim: int) -> int:  # noqa: ARG002
        """Count the float32 numbers that the method needs at once besides the model, at least."""
        return 0

    @property
    def unsummed_parts(self) -> frozenset[str]:
        """Return the parts that `merge` sees one by one: total (n, ...) and weight (n, ...) in the roster's order."""
        return frozenset()

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Return the meaning of an update's parts, for checks against false claims; the default is `PartRule()`."""
        return {}

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        """Return what the method cannot do, with the remedy; a run that needs it is refused before round 0.

        Properties of the private form are missing without it; methods that lack more name the remedy.
        """
        wanted = " and ".join(f"method.{option}={value}" for option, value in self.private_form.items())
        return {Capability.DIFFERENTIAL_PRIVACY: f"set {wanted}"} if wanted else {}

    @property
    def private_form(self) -> Mapping[str, str | int]:
        """Return the options that a run with record-level privacy must change, and their values; empty if none."""
        return {}

    def for_noise(self, width: int, records: float, noise: float) -> Mapping[str, str | int]:  # noqa: ARG002
        """Return options of a private run that follow from features, records and noise, never from data; empty if none.

        noise: standard deviation on a sum over all hospitals to which a record adds a vector of length 1
        """
        return {}

    @property
    def coupling(self) -> Coupling:
        """Return whether the loss, with these hyper-parameters, mixes the examples of a batch."""
        return Coupling.EXAMPLE

    def init_server(self, model: nn.Module, context: RoundContext) -> State:
        """Make the server state of round 0 from an initialised model."""
        ...

    def init_silo(self, model: nn.Module, context: RoundContext) -> State:
        """Create a silo's private state before its first round; it is never sent."""
        ...

    def broadcast(self, server: State) -> State:
        """Return the state that is sent to every silo of the cohort."""
        ...

    def local(
        self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext
    ) -> LocalResult: ...

    def merge(self, server: State, total: Bundle, context: RoundContext) -> State:
        """Do the server's half: the only place that computes a mean. An empty cohort changes nothing."""
        ...

    def global_model(self, model: nn.Module, msg: State) -> nn.Module:
        """Load the broadcast into `model`: the model that is evaluated and exported."""
        ...

    def exported(self, server: State) -> Tensors:
        """Return the tensors of an exported model: everything learnt or drawn for classification."""
        ...

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:
        """Make the silo's personal model after a round, from the `model` that `local` left and the silo's new state.

        With `personal_at_end`: from the final `msg`, the initial weights and the silo's last state.
        """
        ...


class Guard:
    """One privacy or coding layer: `outgoing` at the silo, `incoming` on the sum; it never sees the method.

    An adaptive guard has a public setting that follows the releases of earlier rounds (adaptive_guards.py). A guard
    without one is an adaptive guard that never changes: this class, which does nothing.
    """

    group: ClassVar[str] = ""
    """The setting's group in the state and its part in the bundle; empty without a setting."""

    def outgoing(self, bundle: Bundle, silo: int, round: int) -> Bundle:  # noqa: ARG002
        return bundle

    def incoming(self, total: Bundle, cohort: int, round: int) -> Bundle:  # noqa: ARG002
        return total

    def sensitivity(self) -> Mapping[str, float]:
        """Return the l2 sensitivity per part; empty for a guard that is no privacy mechanism."""
        return {}

    def initial_setting(self) -> Tensors:
        """Create the setting of round 0; empty if nothing adapts in the plan."""
        return {}

    def with_setting(self, setting: Tensors | None) -> Guard:  # noqa: ARG002
        """Create the guard of a round; raises RefusedError on a setting, or none, against the plan."""
        return self

    def next_setting(self, setting: Tensors, answered: Part) -> Tensors:  # noqa: ARG002
        """Create the next round's setting from the sum of the silos' guards' answers."""
        return setting


class SiloPort(Protocol):
    """Where a silo's round runs: in this process or at a hospital. Both run the same `run_silo_round`."""

    @property
    def name(self) -> str: ...

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle: ...

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        """Receive the close of a round, and whether this silo's bundle is part of it."""
        ...
