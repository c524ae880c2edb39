"""A process that runs silos' rounds for a simulation: the other end of `workers.WorkerPool`.

It is started as a program of its own, not forked: a fork of a process that has computed with torch has its locks and
none of its threads.
"""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias, cast

import torch

from fl_core.errors import FederationError
from fl_core.extensions import loading
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.simulation import tensor_messages
from fl_core.simulation.in_process import InProcessSilo, PassedState, SiloShare
from fl_core.types.enums import TaskKind
from fl_core.types.values import Examples, RoundContext, Tensors

Given: TypeAlias = tuple[list[SiloShare], Examples | None, Tensors | None]
"""Shares, the official test set and weights."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker begins with.

    examples: shares, the official test set and weights, taken apart   tensors: the file of theirs   threads: of a round
    """

    manifest_json: str
    examples: bytes
    tensors: Path
    threads: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Heads the message of a round, which is sent once for all of its silos."""


@dataclass(frozen=True, slots=True)
class Task:
    """Heads a silo's state, and asks for its round with the newest message."""

    silo: int
    context: RoundContext
    kind: TaskKind
    has_state: bool


@dataclass(frozen=True, slots=True)
class Done:
    """Heads a bundle and, from tensor `bundle` on, the silo's next state; None without one."""

    bundle: int
    has_state: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """What a round raised. kind, code: of our own errors; else empty, and `text` is the traceback."""

    kind: str
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker can take tasks."""


def main(descriptor: int) -> None:
    """Serve the simulation at the other end until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends us
    connection = Connection(descriptor)
    try:
        setup = connection.recv()
        try:
            worker = _Worker(setup)
        except Exception as error:
            tensor_messages.send(connection, _failure(error), [])
            return
        tensor_messages.send(connection, Ready(), [])
        while True:
            worker.serve(connection)
    except (EOFError, ConnectionError):
        return


class _Worker:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        manifest = RunManifest.from_json(setup.manifest_json)
        loading.load_again(manifest.extensions)
        tensors = torch.load(setup.tensors, mmap=True, weights_only=True)
        shares, public, weights = cast("Given", tensor_messages.put_together(setup.examples, tensors))
        run = RunSetup.of(manifest)
        runtime, self._state = (run if weights is None else run.with_weights(weights)).silo_runtime(), PassedState()
        self._ports = [
            InProcessSilo(manifest, k, share, runtime, public, states=self._state) for k, share in enumerate(shares)
        ]
        self._msg: object = None

    def serve(self, connection: Connection) -> None:
        """Answer one message."""
        head, tensors = tensor_messages.receive(connection)
        if isinstance(head, Broadcast):
            self._msg = tensor_messages.to_state(tensors)
            return
        assert isinstance(head, Task)
        try:
            done, reply = self._round(head, tensors)
        except Exception as error:
            tensor_messages.send(connection, _failure(error), [])
            return
        tensor_messages.send(connection, done, reply)

    def _round(self, task: Task, tensors: tensor_messages.Named) -> tuple[Done, tensor_messages.Named]:
        assert isinstance(self._msg, dict)
        self._state.before = tensor_messages.to_state(tensors) if task.has_state else None
        self._state.after = None
        bundle = tensor_messages.of_bundle(self._ports[task.silo].round(self._msg, task.context, task.kind))
        after = self._state.after
        state = tensor_messages.Named() if after is None else tensor_messages.of_state(after)
        return Done(len(bundle), after is not None), [*bundle, *state]


def _failure(error: Exception) -> Failed:
    if isinstance(error, FederationError):
        return Failed(type(error).__name__, error.code, error.message)
    return Failed("", "", "".join(traceback.format_exception(error)))
