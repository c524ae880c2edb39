"""What runs silos' rounds outside of a simulation's own process: in a child process (`workers`) or an actor of Ray."""

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
"""A value without its tensors, and their bytes: the executor copies them once on each side."""
Task: TypeAlias = tuple[int, RoundContext, TaskKind, State | None]
"""A silo, its round, and the state that it begins with."""
Reply: TypeAlias = tuple[Bundle, State | None]
"""A bundle and, after training, the silo's next state."""


class SiloWorker:
    """Some silos of a run; their states stay with the caller."""

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
    """What this process works with, where `workers` has started it."""

    worker: SiloWorker
    message: State


def begin(manifest_json: str, start_file: Path, threads: int) -> None:
    """Prepare this process. start_file: weights, shares and the official test set; it is memory-mapped."""
    os.setsid()  # Linux shares a processor between sessions first, then between their processes
    Thread(target=_end_with_parent, daemon=True).start()
    with _plain_errors():
        # Objects of the process that started this one, in a folder that no other user may enter.
        weights, shares, public = torch.load(start_file, mmap=True, weights_only=False)
        _Process.worker = SiloWorker(manifest_json, weights, dict(enumerate(shares)), public, threads)


def run(message: Pickled | None, task: Pickled) -> Pickled:
    """Run a silo's round; message: what the round sends to all silos, None for the message of the last call."""
    with _plain_errors():
        if message is not None:
            _Process.message = cast("State", loads(message))
        return dumps(_Process.worker.round(_Process.message, cast("Task", loads(task))))


def _end_with_parent() -> None:
    """End this process where its parent was killed; it would wait for work for ever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what any process can unpickle: our own errors as they are, of others the traceback."""
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
    """Pickle a value; of a tensor its elements alone, which must not change until they are sent."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), [np.asarray(buffer) for buffer in buffers]


def loads(pickled: Pickled) -> object:
    """Return what `dumps` was given. It runs code of whoever pickled it: this program's own processes."""
    value: object = pickle.loads(pickled[0], buffers=pickled[1])  # noqa: S301
    return value
