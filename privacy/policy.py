"""The hospital's policy file: which runs it accepts. It overrides every run, and it fails closed.

A file that cannot be read, that others can change, or that has an unknown key allows nothing. The file is never sent;
only its SHA-256 leaves, with each session and each update. Without a file, or with an empty one, the defaults apply:
any method of any lead, with or without privacy and secure aggregation; private runs up to epsilon 8 at delta 1e-5, with
secret local noise and noisy evaluations; from evaluations without noise only correct answers; no survey.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fl_core import validate
from fl_core.converter import structure
from fl_core.errors import ConfigError, RefusedError
from fl_core.suggest import suggest
from fl_core.text import decoded
from privacy.accounting.accountant import PrivacyFilter
from privacy.policy_terms import (
    SHARE_OF_UNITS,
    BudgetPolicy,
    EvaluationPolicy,
    Floors,
    PeerPolicy,
    PolicyFile,
    PrototypePolicy,
    RunPolicy,
    SecureAggregationPolicy,
    SurveyPolicy,
    WorkerPolicy,
)

if TYPE_CHECKING:
    from fl_core.rounds.manifest import RunManifest
    from privacy.compiled_run import CompiledRun

MAX_BYTES = 1 << 20
OTHERS = stat.S_IWGRP | stat.S_IWOTH

_NOTHING = "nothing is accepted until then"


@dataclass(frozen=True, slots=True)
class Policy:
    """A hospital's policy. budgets: (epsilon, delta) by collection, in addition to those of the ledger.

    digest: SHA-256 of the file, empty without one. Raises ConfigError (E-POLICY-01) on a number out of range.
    """

    runs: RunPolicy = field(default_factory=RunPolicy)
    privacy: Floors = field(default_factory=Floors)
    prototypes: PrototypePolicy = field(default_factory=PrototypePolicy)
    budgets: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    digest: str = ""
    evaluation: EvaluationPolicy = field(default_factory=EvaluationPolicy)
    secagg: SecureAggregationPolicy = field(default_factory=SecureAggregationPolicy)
    peers: PeerPolicy = field(default_factory=PeerPolicy)
    survey: SurveyPolicy = field(default_factory=SurveyPolicy)
    worker: WorkerPolicy = field(default_factory=WorkerPolicy)

    def __post_init__(self) -> None:
        for name, (epsilon, delta) in self.budgets.items():
            validate.declared("E-POLICY-01", f"budget.{name!r}", BudgetPolicy(epsilon, delta))

    @classmethod
    def read(cls, file: Path) -> Policy:
        """Read a policy file; without one the defaults apply.

        Raises RefusedError: E-POLICY-01 on a file that cannot be read or has an unknown key, E-POLICY-10 on one that
        others can change.
        """
        raw = read_file(file)
        if raw is None:
            return cls()
        try:
            return cls.parse(raw)
        except (ConfigError, ValueError, ArithmeticError, RecursionError) as error:
            reason = error.message if isinstance(error, ConfigError) else str(error)
            raise closed(f"{file.name}: {reason}") from error

    @classmethod
    def parse(cls, raw: bytes) -> Policy:
        """Parse the text of a policy; raises ConfigError, ValueError and others on invalid text."""
        file = structure(PolicyFile, tomllib.loads(decoded(raw)), "")
        budgets = {name: (budget.epsilon, budget.delta) for name, budget in file.budget.items()}
        digest = hashlib.sha256(raw).hexdigest()
        sections = file.runs, file.privacy, file.prototypes
        return cls(*sections, budgets, digest, file.evaluation, file.secagg, file.peers, file.survey, file.worker)

    def caps(self) -> dict[str, PrivacyFilter]:
        return {name: PrivacyFilter.of(*budget) for name, budget in self.budgets.items()}

    def require_collections(self, collections: Iterable[str]) -> None:
        """Raise RefusedError (E-POLICY-09) if the policy sets a budget for an unknown collection."""
        collections = list(collections)
        for name in self.budgets:
            if name not in collections:
                raise RefusedError(
                    "E-POLICY-09",
                    f"[budget.{name!r}]: the ledger has no collection {name!r}. {suggest(name, collections)}; "
                    "otherwise run `silo ledger register` first",
                )

    # ---- checks of a run ----------------------------------------------------------------------------------------

    def check_request(self, manifest: RunManifest) -> None:
        """Raise RefusedError on a run that the policy does not allow, before the run is built.

        E-POLICY-02, E-POLICY-03: method, lead   E-POLICY-17: weaker secure aggregation than required
        E-POLICY-18: training, if only evaluations and surveys are allowed
        """
        runs = self.runs
        if manifest.kind.trains and not runs.train:
            raise training_refused(manifest.rounds, "its policy says train = false under [runs]")
        if runs.methods and manifest.method.name not in runs.methods:
            raise RefusedError("E-POLICY-02", f"expected a method of {runs.methods}, found {manifest.method.name!r}")
        if runs.leads and manifest.lead not in runs.leads:
            raise RefusedError("E-POLICY-03", f"expected a lead of {runs.leads}, found {manifest.lead or 'no name'!r}")
        self.secagg.check(manifest)

    def check(self, run: CompiledRun) -> None:
        """Raise RefusedError (E-POLICY-02 to -06, -09, -17) on a run that is not allowed. Reads no data."""
        manifest, terms, runs, floors = run.manifest, run.profile.terms, self.runs, self.privacy
        self.check_request(manifest)
        if runs.hide_size and (terms is None or terms.weights != "uniform"):
            raise RefusedError(
                "E-POLICY-06",
                "this hospital declares no size, so it needs a private run in which all hospitals have the same "
                f"weight, found weights {terms.weights if terms else 'and evaluation sums in the clear'!r}: set "
                "privacy.weights=uniform",
            )
        if strangers := sorted(set(self.prototypes.hidden) - set(manifest.schema.classes)):
            raise RefusedError(
                "E-POLICY-09",
                f"prototypes.hidden names {strangers}, which are not classes of the run {manifest.schema.classes}: "
                "correct them, since a misspelt name would hide nothing",
            )
        profile = manifest.privacy.name if run.private else "none"
        if floors.require not in ("", profile):
            raise RefusedError(
                "E-POLICY-05", f"expected the profile {floors.require!r} with a finite epsilon, found {profile!r}"
            )
        if terms is not None:
            floors.check_terms(terms)

    def check_hidden_size(self, size: float) -> None:
        """Raise RefusedError (E-POLICY-05) if the policy's delta is too large for the hospital's hidden size.

        The run's delta is not compared: the refusal would reveal the size.
        """
        if self.privacy.delta > SHARE_OF_UNITS / size:
            raise RefusedError(
                "E-POLICY-05",
                f"expected [privacy] delta <= {SHARE_OF_UNITS / size:.2g} for a hospital of this size, which the "
                f"policy hides, found {self.privacy.delta:g}: lower it, or declare a size (silo serve --nominal-size)",
            )


def training_refused(rounds: int, why: str) -> RefusedError:
    return RefusedError(
        "E-POLICY-18",
        f"this hospital only evaluates models: {why}. The run trains for {rounds} rounds: leave the hospital out of "
        "the run, and evaluate the model there with `coordinator evaluate`",
    )


def check_labels(declared: Iterable[str], run: Iterable[str]) -> None:
    """Raise RefusedError (E-POLICY-16) unless a run has every class that the hospital declares."""
    declared, space = list(declared), list(run)
    if not declared:
        raise RefusedError(
            "E-POLICY-16",
            "this hospital has not declared the classes that its records may have, which private runs need: list "
            f"them all in policy.toml, [privacy] labels = [...]; this run has {space}",
        )
    if missing := sorted(set(declared) - set(space)):
        raise RefusedError(
            "E-POLICY-16",
            f"the run's classes {space} lack {missing}, which this hospital declares: ask the lead for a run with "
            "them, or change [privacy] labels in policy.toml",
        )


# ---- the file --------------------------------------------------------------------------------------------------------


def read_file(file: Path) -> bytes | None:
    """Read a policy file, following a link; None if there is none.

    Raises RefusedError: E-POLICY-01 if it cannot be read, is not a regular file or exceeds 1 MiB; E-POLICY-10 if others
    can change it (mode, owner or folder).
    """
    opened = open_file(file)
    if opened is None:
        return None
    raw, facts = opened
    if facts.st_mode & OTHERS:
        raise _open_to_others(f"the policy file {file} to be writable only by its owner", facts, file.resolve())
    trusted = (os.geteuid(), 0, *_root_without_name())
    for what, owner in ((file.resolve(), facts.st_uid), (file, os.lstat(file).st_uid)):
        if owner not in trusted:
            raise RefusedError(
                "E-POLICY-10",
                f"expected {what} to be owned by this user or by root, found user {owner}, who can change what it "
                f"allows: chown {trusted[0]} {shlex.quote(str(what))} ; {_NOTHING}",
            )
    for folder in {file.absolute().parent, file.resolve().parent}:
        about = folder.stat()
        if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
            raise _open_to_others(f"the folder {folder} of the policy file not to be writable by others", about, folder)
    return raw


def _root_without_name() -> list[int]:
    """Return the user id of root as seen in a one-user namespace, such as a worker's cage; empty elsewhere.

    Other users appear with the same id there. The service is in no such namespace, and reads the file before a worker
    does.
    """
    with suppress(OSError, ValueError):
        users = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
        if len(users) == 3 and users[0] != "0" and users[2] == "1":
            return [int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="utf-8"))]
    return []


def open_file(file: Path) -> tuple[bytes, os.stat_result] | None:
    """Return the bytes and the `stat` of a policy file, without checking who can change it; None without one.

    Raises RefusedError (E-POLICY-01). Guarantees: a pipe or device does not block.
    """
    try:
        os.lstat(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise closed(f"cannot access {file}: {error.strerror}") from error
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        link = ", a broken link" if file.is_symlink() and not file.exists() else ""
        raise closed(f"cannot read {file}: {error.strerror}{link}") from error
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise closed(f"expected {file} to be a file, found {stat.filemode(facts.st_mode)}")
        with os.fdopen(fd, "rb", closefd=False) as source:
            raw = source.read(MAX_BYTES + 1)
    except OSError as error:
        raise closed(f"expected to read {file}, found {error.strerror}") from error
    finally:
        os.close(fd)
    if len(raw) > MAX_BYTES:
        raise closed(f"{file} has more than {MAX_BYTES} bytes")
    return raw, facts


def closed(reason: str) -> RefusedError:
    return RefusedError("E-POLICY-01", f"{reason}: nothing is accepted until the policy file is repaired")


def _open_to_others(expected: str, facts: os.stat_result, place: Path) -> RefusedError:
    return RefusedError(
        "E-POLICY-10",
        f"expected {expected}, found mode {stat.S_IMODE(facts.st_mode):04o}: check its content, then "
        f"chmod go-w {shlex.quote(str(place))} ; {_NOTHING}",
    )
