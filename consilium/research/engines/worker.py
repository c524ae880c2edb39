"""Run silos' rounds outside the simulation's own process: in a child process (`workers`) or a Ray actor."""

from __future__ import annotations

import copyreg
import io
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consilium.research.engines.in_process import InProcessSilo, PassedState, SiloShare, on_device
from fl_core.errors import FederationError
from fl_core.extensions import loading
from fl_core.rounds.manifest import RunManifest
from fl_core.rounds.run_setup import RunSetup
from fl_core.types.enums import TaskKind
from fl_core.types.values import Bundle, Examples, RoundContext, State, Tensors

Pickled: TypeAlias = tuple[bytes, list[NDArray[np.uint8]]]
"""A pickled value without its tensors, and the tensors' bytes, which are copied only once on each side."""
Task: TypeAlias = tuple[int, RoundContext, TaskKind, State | None]
"""A silo's index, its round's context and kind, and its state before the round."""
Reply: TypeAlias = tuple[Bundle, State | None]
"""A bundle and, after training, the silo's next state."""


class SiloWorker:
    """Runs the rounds of some silos of a run. Their states stay with the caller."""

    def __init__(
        self,
        manifest_json: str,
        weights: Tensors | None,
        shares: Mapping[int, SiloShare],
        public: Examples | None,
        threads: int,
        device_type: str = "cpu",
    ) -> None:
        torch.set_num_threads(threads)
        manifest, device = RunManifest.from_json(manifest_json), torch.device(device_type)
        loading.load_again(manifest.extensions)
        run = RunSetup.of(manifest)
        runtime, self._states = (run if weights is None else run.with_weights(weights)).silo_runtime(), PassedState()
        runtime.model.to(device)
        self._ports = {
            k: InProcessSilo(manifest, k, share, runtime, public, states=self._states, device=device)
            for k, share in zip(shares, on_device(list(shares.values()), device), strict=True)
        }

    def round(self, msg: State, task: Task) -> Reply:
        """Run one silo's round."""
        silo, context, kind, state = task
        self._states.before, self._states.after = state, None
        return self._ports[silo].round(msg, context, kind), self._states.after


class _Process:
    """The worker and newest message of this process, if `workers` started it."""

    worker: SiloWorker
    message: State


def begin(manifest_json: str, start_file: Path, threads: int) -> None:
    """Prepare this process. start_file: weights, shares and the official test set; it is memory-mapped."""
    os.setsid()  # Linux shares a processor between sessions first, then between their processes
    Thread(target=_end_with_parent, daemon=True).start()
    with _plain_errors():
        # Written by the parent process, in a folder that no other user can enter.
        weights, shares, public = torch.load(start_file, mmap=True, weights_only=False)
        _Process.worker = SiloWorker(manifest_json, weights, dict(enumerate(shares)), public, threads)


def run(message: Pickled | None, task: Pickled) -> Pickled:
    """Run a silo's round. message: the round's message to all silos; None reuses that of the last call."""
    with _plain_errors():
        if message is not None:
            _Process.message = cast("State", loads(message))
        return dumps(_Process.worker.round(_Process.message, cast("Task", loads(task))))


def _end_with_parent() -> None:
    """End this process when its parent ends; otherwise it would wait for work forever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Convert errors so that any process can unpickle them: ours unchanged, others as a RuntimeError with traceback."""
    try:
        yield
    except FederationError:
        raise
    except Exception as error:
        raise RuntimeError("".join(traceback.format_exception(error))) from None


def _tensor(flat: NDArray[np.uint8], dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)


def _reduced(value: Tensor) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _tensor, (flat.numpy(), value.dtype, value.shape)


class _Pickler(pickle.Pickler):
    dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced, torch.nn.Parameter: _reduced}  # noqa: RUF012


def dumps(value: object) -> Pickled:
    """Pickle a value. Tensors are not copied, so they must not change until they are sent."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), [np.asarray(buffer) for buffer in buffers]


def loads(pickled: Pickled) -> object:
    """Invert `dumps`. Unpickling runs code, so use it only on data from this program's own processes."""
    value: object = pickle.loads(pickled[0], buffers=pickled[1])  # noqa: S301
    return value
