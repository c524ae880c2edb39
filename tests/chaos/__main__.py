"""Disturb runs until the time is over: python -m tests.chaos --minutes 10 --seed 1 [--out DIR]."""

from __future__ import annotations

from service_core.tls.connect import require_tls13, silence_grpc_logs

require_tls13()  # before anything imports gRPC
silence_grpc_logs()

import argparse  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from tempfile import mkdtemp  # noqa: E402

import torch  # noqa: E402

from fl_core.errors import FederationError  # noqa: E402
from tests.chaos import checks  # noqa: E402
from tests.chaos.federation import Federation, children  # noqa: E402
from tests.chaos.plan import draw  # noqa: E402
from tests.support import until  # noqa: E402


def main(words: list[str]) -> int:
    """Run, print what happens, and return 0 when everything held; homes and logs stay where it did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where homes and logs are kept; default: a temporary folder")
    asked = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # every process is ended with this one
    torch.set_num_threads(1)
    folder = asked.out or Path(mkdtemp(prefix="consilium-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        wrong, done = disturb(folder.resolve(), asked.minutes, asked.seed)
    except KeyboardInterrupt:
        print(f"interrupted; every process was ended, homes and logs are in {folder}")
        return 130
    print(f"{sum(done.values())} faults: {', '.join(f'{n} {kind}' for kind, n in sorted(done.items()))}")
    if wrong:
        print(f"seed {asked.seed}: {len(wrong)} things are wrong; homes and logs are in {folder}", *wrong, sep="\n  ")
        return 1
    print(f"seed {asked.seed}: everything held")
    if asked.out is None:
        shutil.rmtree(folder)
    return 0


def disturb(folder: Path, minutes: float, seed: int) -> tuple[list[str], Counter[str]]:
    """Run plan after plan until the time is over; return what was wrong, and how many faults there were of a kind."""
    wrong: list[str] = []
    number, deadline = 0, time.monotonic() + 60 * minutes
    federation = Federation(folder, partial(print, flush=True))
    try:
        federation.begin()
        while time.monotonic() < deadline and not wrong:
            plan = draw(seed, number)
            print(f"run {number}, {plan.name}:", *plan.faults, sep="\n    ", flush=True)
            wanted = checks.undisturbed(plan)
            run, found = federation.disturb(plan)
            wrong += [f"run {number}, {run}: {text}" for text in checks.after_run(federation, plan, run, found, wanted)]
            wrong += checks.of_processes(federation)
            number += 1
    except (AssertionError, FederationError) as error:
        wrong += [f"run {number}: {error}", *checks.of_processes(federation)]
    finally:
        federation.stop()
    try:
        until(lambda: not children(folder), "every process to end", 20)
    except AssertionError as error:
        wrong.append(f"{error}: {children(folder)}")
    return wrong, federation.done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
