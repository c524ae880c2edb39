"""Tables of the methods, their papers, and the models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from consilium.report.papers import CLAIMS, SETTINGS, TABLES, Claim, Paper, claims_of, needs, paper_of
from coordinator.config.hydra_config import compose_spec
from coordinator.config.manifest_builder import schema_of
from coordinator.config.run_spec import RunSpec
from fl_core.errors import ConfigError
from fl_core.extensions import registry
from fl_core.methods import METHODS
from fl_core.models import MODELS, ModelFacts, describe
from service_core.console import CommandResult, make_table


def methods() -> CommandResult:
    """List for each method what the server sees, whether its loss mixes examples, and what a silo sends."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "exposure": "each" if method.unsummed_parts else "sum",
            "coupling": method.coupling.value,
            "sends": list(method.sends),
            "personal_model": method.has_personal_model,
            "summary": (type(method).__doc__ or "").split("\n")[0],
        }
        for name, method in ((name, kind()) for name, kind in METHODS.items())
    ]
    head = ("method", "server sees", "loss per", "silo sends", "personal model", "")
    shown = [
        r | {"sends": ", ".join(r["sends"]), "personal_model": "yes" if r["personal_model"] else "no"} for r in rows
    ]
    tables = [make_table("Methods", head, [tuple(r.values()) for r in shown])]
    others = [(point.kind, point.name, point.reference) for point in registry.entry_points()]
    if others:
        tables.append(make_table("Installed extensions", ("kind", "name", "place"), others))
    return CommandResult(rows, tables)


def papers() -> CommandResult:
    """List for each method its paper, its requirements, which claims of the paper reproduce, and the tables with it."""
    rows: list[dict[str, Any]] = []
    for name, kind in METHODS.items():
        paper = asdict(paper_of(kind) or Paper("", "", "", ""))
        facts = {"tables": list(TABLES.get(name, ())), "claims": [asdict(claim) for claim in claims_of(name)]}
        rows.append({"name": name, **paper, "needs": needs(kind()), **facts})
    lines = [
        (
            str(row["name"]),
            f"{row['title']}, {row['venue']}" if row["title"] else "no paper: a lower bound",
            str(row["where"]),
            ", ".join(row["needs"]) or "-",
            _verdicts(claims_of(row["name"])),
            ", ".join(row["tables"]) or "-",
        )
        for row in rows
    ]
    claims = [(c.method, c.claim, c.printed, c.ours, _verdict(c), c.scale or "-") for c in CLAIMS]
    return CommandResult(
        rows,
        [
            make_table("Papers", ("method", "paper", "where", "needs", "reproduces", "tables"), lines),
            make_table("Claims", ("paper of", "claim", "printed", "ours, points", "verdict", "scale"), claims),
            "tables: python -m benchmarks.paper table=NAME; how claims are checked: benchmarks/paper/README.md",
        ],
    )


def _verdicts(found: Sequence[Claim]) -> str:
    counts = Counter(claim.verdict for claim in found)
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())) or "-"


def _verdict(claim: Claim) -> str:
    return f"{claim.verdict}: {claim.why}" if claim.why else claim.verdict


def models(overrides: Sequence[str]) -> CommandResult:
    """Count the models' parameters: in the papers' settings, or for the chosen data."""
    rows = _chosen_rows(compose_spec(overrides)) if overrides else _published_rows()
    head = ("model", "data", "example", "classes", "feature dimension", "parameters", "with buffers", "paper, options")
    lines = [
        (
            str(r["name"]),
            str(r["data"]),
            "x".join(map(str, r["shape"])),
            str(r["classes"]),
            str(r["feature_dim"]),
            f"{r['parameters']:,}",
            f"{r['total']:,}",
            " ".join([str(r["paper"]), *(f"{k}={v}" for k, v in r["options"].items())]),
        )
        for r in rows
    ]
    return CommandResult(rows, [make_table("Models", head, lines)])


def _published_rows() -> list[dict[str, Any]]:
    return [_row(s.facts(), s.paper, s.data, s.shape, s.classes, s.options) for s in SETTINGS]


def _chosen_rows(spec: RunSpec) -> list[dict[str, Any]]:
    schema = schema_of(spec)
    rows = []
    for name in dict.fromkeys([*MODELS, str(spec.model["name"])]):
        options = {k: v for k, v in spec.model.items() if k != "name"} if name == spec.model["name"] else {}
        try:
            facts = describe(name, schema, options)
        except ConfigError:  # this architecture cannot take examples of this shape
            continue
        rows.append(_row(facts, "", str(spec.data["name"]), schema.shape, len(schema.classes), options))
    return rows


def _row(
    facts: ModelFacts, paper: str, data: str, shape: Sequence[int], classes: int, options: Mapping[str, object]
) -> dict[str, Any]:
    return {
        "name": facts.name,
        "paper": paper,
        "data": data,
        "shape": list(shape),
        "classes": classes,
        "options": dict(options),
        "feature_dim": facts.feature_dim,
        "parameters": facts.parameters,
        "total": facts.total_with_buffers,
    }
