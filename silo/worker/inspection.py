"""Check that images can be decoded, each in a sandboxed process that reports why one cannot.

`python -m silo.worker.inspection` is that process. Its first input line gives the folder, later lines name images.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from fl_core.errors import RefusedError, StateError
from service_core.console import printable
from service_core.workers.child import ChildProcess, launch, worker_words
from service_core.workers.lines import own_streams
from silo.cancellation import CancelToken
from silo.worker import cage

START_S, IMAGE_S = 300.0, 120.0
"""Seconds to load the decoders, and for one image."""


def inspected(folder: Path, names: Iterable[str], caged: bool, stop: CancelToken) -> Iterator[tuple[str, str]]:
    """Yield each name with the reason why its image cannot be read, "" if it can.

    An image that crashes its decoder process or exceeds `IMAGE_S` counts as unreadable. caged: raise RefusedError
    (E-POLICY-21) if the process can reach a network. Raises StateError (E-RUN-55) if no process starts.
    """
    child: ChildProcess | None = None
    try:
        for name in names:
            stop.raise_if_cancelled()
            if child is None:
                child = _started(folder, caged)
            answer = None
            with suppress(OSError, ValueError), stop.on_cancel(child.kill), child.within(IMAGE_S):
                child.line.send(name=name)
                answer = child.line.read()
            stop.raise_if_cancelled()
            if answer is not None:
                yield name, printable(str(answer.get("reason")))[:500]
                continue
            ending = child.ending()
            child.line.incoming.close()
            child = None
            yield name, f"decoding it ended the process: {printable(ending)[:500]}"
    finally:
        if child is not None:
            child.end()
            child.line.incoming.close()


def listed_images(folder: Path, caged: bool, stop: CancelToken) -> Iterator[tuple[str, str]]:
    """Yield the relative path of each image below a folder with "", and each unreadable entry with the reason.

    Skips files that are not images. caged, raises: as `inspected`.
    """
    child = _started(folder, caged, list=True)
    try:
        with stop.on_cancel(child.kill):
            while (answer := child.line.read()) is not None and "name" in answer:
                yield str(answer["name"]), str(answer["reason"])
        stop.raise_if_cancelled()
        if answer is None:
            raise StateError("E-RUN-55", f"the process that lists images failed: {child.ending()}")
    finally:
        child.end()
        child.line.incoming.close()


def _started(folder: Path, caged: bool, **more: object) -> ChildProcess:
    child = ChildProcess(partial(launch, worker_words(__name__)))
    answer = None
    with suppress(OSError, ValueError), child.within(START_S):
        child.line.send(folder=str(folder), **more)
        answer = child.line.read()
    if answer is None:
        raise StateError("E-RUN-55", f"the process that decodes images failed: {child.ending()}")
    if caged and not cage.Walls(*answer["walls"]).offline:
        child.end()
        raise RefusedError(
            "E-POLICY-21",
            "[worker] isolation: the process that decodes images must have no network, but this machine offers "
            "neither namespaces nor a seccomp filter. To see why, run silo doctor",
        )
    return child


def main() -> None:
    line = own_streams()
    if (setup := line.read()) is None:
        return
    walls = cage.enter([])
    cage.end_with_parent(signal.SIGKILL)
    from fl_core.datasets.decoding.limits import UnreadableError
    from fl_core.datasets.decoding.pixels import open_image

    line.send(walls=walls)
    if setup.get("list"):
        from fl_core.datasets.sources.class_folders import list_images

        contents = list_images(root := Path(setup["folder"]))
        for path in contents.images:
            line.send(name=str(path.relative_to(root)), reason="")
        for problem in contents.problems:
            for name in problem.first:
                line.send(name=name, reason=problem.what)
        line.send(end=True)
    while (message := line.read()) is not None:
        reason = ""
        try:
            open_image(Path(setup["folder"], message["name"]))
        except UnreadableError as error:
            reason = str(error) or "unreadable"
        line.send(reason=reason)


if __name__ == "__main__":
    main()
