"""`coordinator privacy preview`: the privacy cost of a run before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from coordinator.cli.options import Place
from fl_core.errors import ConfigError
from service_core.command_line import command
from service_core.console import ERR, CommandResult, make_table, pluralize

if TYPE_CHECKING:
    from coordinator.config.run_spec import RunSpec
    from fl_core.rounds.manifest import RunManifest

_FACTS = ("hospital", "size", "q", "steps", "rounds")
_NUMBERS = {
    "noise z": "noise",
    "epsilon": "epsilon",
    "with reserve": "epsilon_most",
    "actually spent": "epsilon_tight",
    "of a record": "epsilon_record",
    "of a test record": "epsilon_test",
}

_SHARED = {"all honest": "epsilon_all_honest", "masks fail": "epsilon_alone"}
"""Further columns if hospitals share the noise."""

_LEGEND = (
    "q: share of a hospital's records in one step; noise z: standard deviation of the noise over the clipping norm; "
    "epsilon: what the run spends by the ledger's count, which is binding; with reserve: if rounds are repeated after "
    "a crash; actually spent: by the privacy loss of all releases together; of a record, of a test record: the part of "
    "one training or test image"
)

_SHARED_LEGEND = (
    "; hospitals share the noise under masks, so epsilon holds while at most secagg.collusion hospitals collude; all "
    "honest: if all are present and honest; masks fail: with a hospital's own noise only"
)

_HINT = ("to estimate the accuracy, add --expect 3 (needs data on this machine)",)

privacy = typer.Typer(no_args_is_help=True, help="Look at privacy before a run.")
privacy.callback()(lambda: None)


@privacy.command()
@command
def preview(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of the run, such as privacy=dp_record privacy.epsilon=4.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Declared numbers of training examples, one per hospital, such as 300,250,120.")
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Use the sizes that the connected hospitals declare.")
    ] = False,
    data_root: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    expected: Annotated[
        int,
        typer.Option(
            "--expect", help="Also simulate the run N times with data on this machine, and show the accuracies.", min=0
        ),
    ] = 0,
    *,
    home: Place,
) -> CommandResult:
    """Show what a run would cost each hospital before it starts: the epsilon it spends, and the noise it adds.

    A run of several rounds keeps a reserve (privacy.reserve_rounds) to repeat a round after a crash.
    The column "epsilon" is what the run spends if no round is repeated, "with reserve" if the whole reserve is used.
    The ledgers stop the run at the requested epsilon.

    --expect 3 simulates the run three times and shows the range of accuracies. It needs data on this machine, such as a
    public data set similar to the hospitals' (data=folder data.path=... federation=p5c2).

    Sizes come from --sizes, from the hospitals online (--online), or from the simulated federation.
    """
    from coordinator.config import weights
    from coordinator.config.hydra_config import compose_spec
    from coordinator.lead.tables import private_form
    from privacy.accounting.projection import preview
    from privacy.compiled_run import CompiledRun

    spec = weights.without_file(compose_spec(overrides or []))
    if sizes is not None and online:
        raise ConfigError("E-CFG-01", "expected --sizes or --online, found both: leave one out")
    manifest = (
        _online(spec, home) if online else _manifest_of_sizes(spec, sizes) if sizes else _simulated(spec, data_root)
    )
    projection, form = preview(CompiledRun.of(manifest)), private_form(manifest.to_json())
    facts: dict[str, Any] = {**projection, "private_form": dict(manifest.private_form)}
    if expected and projection["silos"]:
        from consilium.research.simulate.expectation import expect

        outcome = expect(spec, expected, data_root, ERR.print)
        return CommandResult({**facts, "expected": outcome.facts()}, chain(_shown(projection, form), outcome.lines()))
    return CommandResult(facts, chain(_shown(projection, form), _HINT if projection["silos"] else ()))


def _shown(found: Mapping[str, Any], form: str) -> Iterator[str | Table]:
    if form:
        yield form
    if not found["silos"]:
        yield f"privacy={found['profile']} adds no noise: no epsilon bounds what this run reveals"
        return
    title = f"{found['method']}, {found['rounds']} rounds, delta {found['delta']:g}"
    shared = any(silo["epsilon_alone"] != silo["epsilon"] for silo in found["silos"])
    numbers = {**_NUMBERS, **(_SHARED if shared else {})}
    yield make_table(title, (*_FACTS, *numbers), [_row(silo, numbers) for silo in found["silos"]])
    yield _LEGEND + (_SHARED_LEGEND if shared else "")
    yield _parts(found)
    yield f"drawing the noise with finite precision adds at most {found['delta_of_sampling']:.1e} to delta"


def _parts(found: Mapping[str, Any]) -> str:
    """Describe how the requested epsilon is used, for the hospital that spends most."""
    most = max(found["silos"], key=lambda silo: silo["epsilon"])
    target, spent, with_reserve = found["epsilon_target"], most["epsilon"], most["epsilon_most"]
    kept, again = "nothing is reserved to repeat a round after a crash", found["reserve_rounds"]
    if again:
        kept = (
            f"{with_reserve - spent:.2f} is reserved to repeat {pluralize(again, 'round')} after a crash (with "
            f"privacy.reserve_rounds=0, noise z is {most['noise_unreserved']:.3f} instead of {most['noise']:.3f})"
        )
    actual = most["epsilon_tight"]
    text = f"of epsilon {target:g}, {most['name']} plans {spent:.2f} and actually spends {actual:.2f}; {kept}"
    if most["rate"] == 1:
        return text
    return (
        f"{text}; {target - with_reserve:.2f} stays unused, because a ledger counts training steps at one Renyi order "
        "that is fixed before any run"
    )


def _row(silo: Mapping[str, Any], numbers: Mapping[str, str]) -> tuple[str, ...]:
    facts = (silo["name"], silo["units"], f"{silo['rate']:.4f}", silo["steps"], silo["rounds"])
    return (*map(str, facts), *(f"{silo[key]:.3f}" for key in numbers.values()))


def _manifest_of_sizes(spec: RunSpec, sizes: str) -> RunManifest:
    from coordinator.config.manifest_builder import manifest_from

    try:
        counts = [int(word) for word in sizes.split(",")]
    except ValueError:
        raise ConfigError("E-CFG-01", f"expected --sizes N,N,..., found {sizes!r}: give whole numbers") from None
    if any(n < 1 for n in counts):
        raise ConfigError("E-CFG-01", f"expected --sizes of at least 1, found {sizes!r}: correct it")
    names = list(spec.silos or [f"hospital{k}" for k in range(len(counts))])
    if len(names) != len(counts):
        raise ConfigError(
            "E-CFG-01", f"expected a size for each of {len(names)} silos, found {len(counts)}: correct --sizes"
        )
    return manifest_from(spec, names, counts)


def _simulated(spec: RunSpec, data_root: Path | None) -> RunManifest:
    from consilium.research.simulate.runner import build_simulation

    return build_simulation(replace(spec, silos=None), data_root)[0]


def _online(spec: RunSpec, home: Path) -> RunManifest:
    from coordinator.config.manifest_builder import build_manifest
    from coordinator.lead.client import LeadClient

    with closing(LeadClient.open(home)) as client:
        return build_manifest(spec.to_json(), list(client.silos().silos))
