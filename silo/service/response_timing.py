"""When a hospital answers: pulses not too often, and results of private runs at planned moments.

How long training takes depends on the records. An answer that leaves a whole number of `after` seconds after the
training began tells that number alone: nothing, where `after` is longer than any training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from fl_core.errors import ConfigError
from silo.connection.retry import CancelToken
from silo.connection.session import PULSE_CEILING_S, PULSE_FLOOR_S

LONGEST_S = 86_400.0
_REMEMBERED = 1000


@dataclass(slots=True)
class ResponseTiming:
    """after: seconds between possible answers, 0 to answer at once   pulse_floor: least seconds between two pulses.

    Raises ConfigError (E-CFG-02) on others than 0 to a day, and 0.01 to 300.
    """

    after: float = 0.0
    pulse_floor: float = PULSE_FLOOR_S
    clock: Callable[[], float] = time.monotonic
    _born: float = field(init=False)
    _began: dict[Hashable, float] = field(default_factory=dict)
    _due: dict[Hashable, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, found, least, most in (
            ("seconds of --answer-after", self.after, 0.0, LONGEST_S),
            ("seconds of --pulse-floor", self.pulse_floor, 0.01, PULSE_CEILING_S),
        ):
            if not least <= found <= most:
                raise ConfigError("E-CFG-02", f"expected {what} from {least:g} to {most:g}, found {found:g}")
        self._born = self.clock()

    def begin(self, task: Hashable, private: bool) -> None:
        """Note that a task's training begins; only private ones are held."""
        if len(self._began) >= _REMEMBERED:
            oldest = next(iter(self._began))
            del self._began[oldest]
            self._due.pop(oldest, None)
        self._due.pop(task, None)
        self._began[task] = self.clock()
        if not private:
            self._due[task] = -math.inf

    def holds(self, task: Hashable) -> bool:
        return self.after > 0 and self.clock() < self._due_at(task)

    def hold(self, task: Hashable, stop: CancelToken) -> None:
        """Wait until the answer of a task may leave; raises CancelledError when it is given up meanwhile.

        Guarantees: once set, its moment stays, however often the task is offered again; an answer of an earlier process
        is held `after` seconds from this one's start.
        """
        if self.after <= 0:
            return
        due = self._due.setdefault(task, self._due_at(task))
        while (left := due - self.clock()) > 0:
            stop.wait(left)
            stop.raise_if_cancelled()

    def _due_at(self, task: Hashable) -> float:
        if task in self._due:
            return self._due[task]
        if task not in self._began:
            return self._born + self.after
        took = self.clock() - self._began[task]
        return self._began[task] + self.after * max(1, math.ceil(took / self.after))
