"""The interfaces for access to examples, methods, guards and ports. They define guarantees as well as types."""

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

        bound: l2 norm of one example's contribution; None for that of the privacy plan.
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
    """The part of a training step that one process computes.

    tensors: with a row for each example   numbers: for the part as a whole   seed: of the layers' draws; None if they
    are secret.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    seed: int | None = None


Gradients = Sequence["Tensor | None"]
"""One tensor per parameter; None if the loss does not depend on it."""


class Team:
    """The processes that compute a silo's steps. This base class is a single process without helpers."""

    size: int = 1

    def deal(self, params: Sequence[nn.Parameter], parts: Sequence[StepPart]) -> None:
        """Give each helper at most one part of a step, to be computed with these parameters."""

    def collect(self) -> Iterator[Gradients]:
        """Yield the gradients of the dealt parts, in their order; they are valid until the next parts are dealt."""
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
    except `model`; there is one exchange per round, a State down and a Bundle up; the bundle's layout is the same for
    every silo and every round. `model` has the run's initial weights on entry, except in a call of `personal` after a
    round's training, in which it is as `local` left it.
    """

    name: ClassVar[str]
    has_global_model: ClassVar[bool] = True
    """Whether the federation has a global model. If not, no global accuracy is measured and no model is exported."""
    ga_is_personal: ClassVar[bool] = False
    """Whether papers compute its generic accuracy (GA) from personal models, on the whole test set. A global model may
    exist, but silos would not use it."""
    personal_at_end: ClassVar[bool] = False
    """Whether personal models are made once, from the final global model: they are measured only in the closing
    evaluation."""
    server_tracks_state: ClassVar[bool] = False
    """Whether the server keeps a sum of silo states. If so, a silo whose update was not included discards its new
    state; if not, it keeps the new state."""

    bias_follows_classes: ClassVar[bool] = False
    """Whether training raises the head's bias for the silo's own classes, as plain cross entropy does: updates that
    lower it are then refused."""
    even_norms: ClassVar[bool] = True
    """Whether honest updates stay within 100 medians; if not, long updates are clipped and none is refused."""

    exact: ClassVar[bool] = False
    """Whether updates contain float64 numbers, on a grid on which their sums are exact."""

    @property
    def exchanges(self) -> int:
        """Return the number of rounds after which the method ends; 0 if every round improves the model."""
        return 0

    def fingerprint(self, update: Bundle) -> str:  # noqa: ARG002
        """Return a digest of an update's contribution to a sum; empty if the contribution cannot be removed later."""
        return ""

    def expects(self, round: int) -> str:  # noqa: ARG002
        """Return the fingerprint that every update of a training round must have; empty for any."""
        return ""

    def own_numbers(self, n_classes: int, feature_dim: int) -> int:  # noqa: ARG002
        """Count the float32 numbers that the method needs at once besides the model, at least."""
        return 0

    @property
    def unsummed_parts(self) -> frozenset[str]:
        """Return the parts that `merge` gets unsummed: total (n, ...) and weight (n, ...) in the roster's order."""
        return frozenset()

    @property
    def part_rules(self) -> Mapping[str, PartRule]:
        """Return the meaning of an update's parts, for checks against false claims; the default is `PartRule()`."""
        return {}

    @property
    def unsupported(self) -> Mapping[Capability, str]:
        """Return the capabilities that the method lacks, with remedies; a run that needs one is refused before round 0.

        By default the method lacks differential privacy until its options have the private form.
        """
        wanted = " and ".join(f"method.{option}={value}" for option, value in self.private_form.items())
        return {Capability.DIFFERENTIAL_PRIVACY: f"set {wanted}"} if wanted else {}

    @property
    def private_form(self) -> Mapping[str, str | int]:
        """Return the options that a run with record-level privacy must change, and their values; empty if none."""
        return {}

    def for_noise(self, width: int, records: float, noise: float) -> Mapping[str, str | int]:  # noqa: ARG002
        """Return options of a private run that follow from public numbers, never from data; empty if none.

        width: number of features   records: declared number of all records   noise: standard deviation on a sum over
        all hospitals to which a record adds a vector of length 1.
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
        """Load the broadcast into `model` and return the model that is evaluated and exported."""
        ...

    def exported(self, server: State) -> Tensors:
        """Return the tensors of an exported model: all that were learnt or drawn for classification."""
        ...

    def personal(self, model: nn.Module, msg: State, silo: State, data: LocalData, context: RoundContext) -> nn.Module:
        """Make the silo's personal model after a round, from the `model` that `local` left and the silo's new state.

        With `personal_at_end`: from the final `msg`, the initial weights and the silo's last state.
        """
        ...


class Guard:
    """One privacy or coding layer: `outgoing` at the silo, `incoming` on the sum; it never sees the method.

    An adaptive guard has a public setting that follows the releases of earlier rounds (adaptive_guards.py). The methods
    of this class are those of a guard that has no setting and changes nothing.
    """

    group: ClassVar[str] = ""
    """The setting's group in the state and its part in the bundle; empty without a setting."""

    def outgoing(self, bundle: Bundle, silo: int, round: int) -> Bundle:  # noqa: ARG002
        return bundle

    def incoming(self, total: Bundle, cohort: int, round: int) -> Bundle:  # noqa: ARG002
        return total

    def sensitivity(self) -> Mapping[str, float]:
        """Return the l2 sensitivity per part; empty if the guard is no privacy mechanism."""
        return {}

    def initial_setting(self) -> Tensors:
        """Create the setting of round 0; empty if the guard does not adapt."""
        return {}

    def with_setting(self, setting: Tensors | None) -> Guard:  # noqa: ARG002
        """Create the guard of a round; raises RefusedError if a setting is missing, or is not planned."""
        return self

    def next_setting(self, setting: Tensors, answered: Part) -> Tensors:  # noqa: ARG002
        """Create the next round's setting from the sum of the silos' guards' answers."""
        return setting


class SiloPort(Protocol):
    """The place where a silo's round runs: this process or a hospital. Both run the same `run_silo_round`."""

    @property
    def name(self) -> str: ...

    def round(self, msg: State, context: RoundContext, kind: TaskKind) -> Bundle: ...

    def settle(self, context: RoundContext, kind: TaskKind, included: bool) -> None:
        """Receive the close of a round, and whether this silo's bundle is part of it."""
        ...
