"""Calls between a service and its worker, in both directions at once, over one pair of pipes."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from fl_core.errors import FederationError
from service_core.workers.lines import ErrorLines, Line, encoded

log = logging.getLogger(__name__)


class OtherSideEndedError(Exception):
    """The process at the other end of the pipes has ended, or said what nobody understands."""


class Calls:
    """One end. Each call of the other side is answered in a thread of its own; `call` may be used by every thread.

    answers: what the other side may call, by name; arguments and results are JSON   errors: those that pass the pipe
    """

    def __init__(self, line: Line, answers: Mapping[str, Callable[..., object]], errors: ErrorLines) -> None:
        self._line, self._answers, self._errors = line, answers, errors
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._answering = set[threading.Thread]()
        self._ended = False

    def call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - what the other side returns
        """Return the other side's answer; raises its error, or OtherSideEndedError."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._ended:
                raise OtherSideEndedError(name)
            number = next(self._numbers)
            self._open[number] = answer
        data = encoded(call=[number, name, arguments])
        with suppress(OSError, ValueError):  # it has ended: `listen` notices, and answers every open call
            self._line.write(data)
        return answer.result()

    def listen(self) -> None:
        """Read until the other side ends; calls that are open then, and later ones, raise OtherSideEndedError."""
        try:
            while (message := self._line.read()) is not None:
                if "call" in message:
                    number, name, arguments = message["call"]
                    thread = threading.Thread(target=self._answer, args=(number, name, arguments), daemon=True)
                    with self._lock:
                        self._answering.add(thread)
                    thread.start()
                elif "returned" in message:
                    number, value = message["returned"]
                    self._open.pop(number).set_result(value)
                else:
                    number, raw = message["raised"]
                    error = self._errors.read(raw)
                    self._open.pop(number).set_exception(error)
        except Exception:  # whatever it is, no call may wait for ever
            if not self._ended:
                log.exception("the other side said what nobody understands, or this one cannot answer")
        self.close()
        self._line.incoming.close()

    def close(self) -> None:
        """Have open calls, and later ones, raise OtherSideEndedError, whoever may still hold the pipe."""
        with self._lock:
            self._ended = True
            still_open, self._open = list(self._open.values()), {}
        for answer in still_open:
            answer.set_exception(OtherSideEndedError("it ended"))

    def settle(self) -> None:
        """Wait until every call of a side that has ended is answered."""
        with self._lock:
            answering = list(self._answering)
        for thread in answering:
            if thread.ident is not None:
                thread.join()

    def _answer(self, number: int, name: str, arguments: list[Any]) -> None:
        try:
            data = encoded(returned=[number, self._answers[name](*arguments)])
        except BaseException as error:  # also SystemExit and panics of libraries: the caller waits for an answer
            if not isinstance(error, FederationError) and type(error).__name__ not in self._errors.plain:
                log.exception("a call of %s failed", name)
            data = encoded(raised=[number, self._errors.write(error)])
        try:
            self._line.write(data)
        except (OSError, ValueError):
            log.debug("nobody waits for the answer to %s any more", name)
        finally:
            with self._lock:
                self._answering.discard(threading.current_thread())
