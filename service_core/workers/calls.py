"""Calls between a service and its worker, in both directions at once, over one pair of pipes."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from fl_core.errors import FederationError
from service_core.workers.lines import ErrorLines, Line, encoded

T = TypeVar("T")
MOST_THREADS = 32
"""Maximum number of calls of the other side that are answered at the same time; further calls wait."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Later(Generic[T]):
    """An answer that is available after an event; no thread has to wait for it.

    event: done once `read` can be called; its result is not used   read: returns the answer, or raises
    """

    event: Future[Any]
    read: Callable[[], T]

    def result(self) -> T:
        """Wait for the answer."""
        wait([self.event])
        return self.read()


class OtherSideEndedError(Exception):
    """The process at the other end of the pipes has ended, or sent an invalid line."""


class Calls:
    """One end of the calls. Each call of the other side runs in a thread of its own; any thread may use `call`.

    answers: functions that the other side may call, by name; arguments and results are JSON, or a `Later` of JSON
    errors: converts errors for the pipe
    """

    def __init__(self, line: Line, answers: Mapping[str, Callable[..., object]], errors: ErrorLines) -> None:
        self._line, self._answers, self._errors = line, answers, errors
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._answering = set[threading.Thread]()
        self._ended = False
        self._room = threading.Semaphore(MOST_THREADS)

    def call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - what the other side returns
        """Return the other side's answer; raises its error, or OtherSideEndedError."""
        return self.begin(name, *arguments).result()

    def begin(self, name: str, *arguments: object) -> Future[Any]:
        """Send a call; return a future of its answer.

        Raises OtherSideEndedError if the other side has ended, and ValueError as `encoded`.
        """
        answer: Future[Any] = Future()
        number = next(self._numbers)
        data = encoded(call=[number, name, arguments])
        with self._lock:
            if self._ended:
                raise OtherSideEndedError(name)
            self._open[number] = answer
        with suppress(OSError, ValueError):  # it has ended: `listen` notices, and answers every open call
            self._line.write(data)
        return answer

    def listen(self) -> None:
        """Process lines until the other side ends; then open calls and later ones raise OtherSideEndedError."""
        try:
            while (message := self._line.read()) is not None:
                if "call" in message:
                    number, name, arguments = message["call"]
                    self._room.acquire()
                    self._start(self._answer, number, name, arguments)
                elif "returned" in message:
                    number, value = message["returned"]
                    self._open.pop(number).set_result(value)
                else:
                    number, raw = message["raised"]
                    error = self._errors.read(raw)
                    self._open.pop(number).set_exception(error)
        except Exception:  # no call may wait forever
            if not self._ended:
                log.exception("the other side sent an invalid message, or this one cannot answer")
        self.close()
        self._line.incoming.close()

    def close(self) -> None:
        """Make open calls and later ones raise OtherSideEndedError, even if the pipe is still open."""
        with self._lock:
            self._ended = True
            still_open, self._open = list(self._open.values()), {}
        for answer in still_open:
            answer.set_exception(OtherSideEndedError("it ended"))

    def settle(self) -> None:
        """Wait until the calls of the other side, which has ended, have returned here."""
        with self._lock:
            answering = list(self._answering)
        for thread in answering:
            if thread.ident is not None:
                thread.join()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        with self._lock:
            self._answering.add(thread)
        thread.start()

    def _answer(self, number: int, name: str, arguments: list[Any]) -> None:
        try:
            self._reply(number, name, lambda: self._answers[name](*arguments))
        finally:
            self._room.release()

    def _reply(self, number: int, name: str, answer: Callable[[], object]) -> None:
        try:
            value = answer()
            if isinstance(value, Later):
                value.event.add_done_callback(partial(self._reply_later, number, name, value.read))
                return
            data = encoded(returned=[number, value])
        except BaseException as error:  # also SystemExit and panics of libraries: the caller waits for an answer
            if not isinstance(error, FederationError) and type(error).__name__ not in self._errors.plain:
                log.exception("a call of %s failed", name)
            data = encoded(raised=[number, self._errors.write(error)])
        finally:
            with self._lock:
                self._answering.discard(threading.current_thread())
        try:
            self._line.write(data)
        except (OSError, ValueError):
            log.debug("the answer to %s is no longer needed", name)

    def _reply_later(self, number: int, name: str, read: Callable[[], object], event: Future[Any]) -> None:
        """Reply in another thread: the thread of the event must not wait for the other side to read."""
        del event
        try:
            self._start(self._reply, number, name, read)
        except RuntimeError:  # no thread can be started
            self._reply(number, name, read)
