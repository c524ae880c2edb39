"""Pages of the site that lie elsewhere in the repository, and links between what is a page and what is not.

A page of `docs` is at its own place. README, CHANGELOG, CONTRIBUTING and SECURITY, and the README of each benchmark,
are pages too, with what they show. A link to a file that is no page becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
REST = "all-pages.md"
ROLES = ("hospital", "lead", "administrator", "researcher")
TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
NAVIGATION: list[Any] = [
    "index.md",
    {"By role": [f"roles/{role}.md" for role in (*ROLES, "data-protection-officer")]},
    {"Tutorials": [f"tutorials/{name}.md" for name in ("two-hospitals", *ROLES)]},
    {
        "Data and models": [
            f"{name}.md" for name in ("data", "methods", "models", "metrics", "evaluation", "predict", "model-card")
        ]
    },
    {
        "Privacy": [
            "privacy/README.md",
            "privacy/epsilon.md",
            "privacy/budget.md",
            "privacy/threat-model.md",
            "secure-aggregation.md",
            "audit.md",
        ]
    },
    {"Operations": [f"operations/{name}.md" for name in ("README", "install", "page", "faults")]},
    {"Research": ["research.md", "python.md", "extending/README.md", "comparison.md"]},
    {"Results": ["benchmarks/index.md", "paper-tables.md", "paper-figures.md"]},
    {"Reference": ["reference/coordinator.md", "reference/silo.md", "reference/configuration.md", "errors.md", REST]},
]
"""What a reader sees first: at most 40 pages. All others are on the page `REST`."""
PAGES = dict[str, str]
"""Path in the repository -> path in the site."""


def _title(markdown: str) -> str:
    return next((line.removeprefix("# ") for line in markdown.splitlines() if line.startswith("# ")), "")


def _pages() -> PAGES:
    found = {name: page for name, page in TOP.items() if (ROOT / name).exists()}
    for file in sorted((ROOT / "benchmarks").glob("*/README.md")):
        found[file.relative_to(ROOT).as_posix()] = f"benchmarks/{file.parent.name}.md"
    for file in sorted((ROOT / "docs").rglob("*")):
        if file.is_file() and "site" not in file.relative_to(ROOT / "docs").parts:
            found[file.relative_to(ROOT).as_posix()] = file.relative_to(ROOT / "docs").as_posix()
    return found


def _index(title: str, files: list[tuple[str, str]]) -> str:
    return "\n".join([f"# {title}", "", *(f"- [{name}]({page})" for page, name in files), ""])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside `docs`, and the lists of decisions and benchmarks."""
    for source, page in _pages().items():
        if not source.startswith("docs/"):
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for picture in sorted((ROOT / "benchmarks").rglob("*.png")):
        files.append(File.generated(config, picture.relative_to(ROOT).as_posix(), abs_src_path=str(picture)))
    benchmarks = [
        (f"{p.parent.name}.md", _title(p.read_text())) for p in sorted((ROOT / "benchmarks").glob("*/README.md"))
    ]
    files.append(File.generated(config, "benchmarks/index.md", content=_index("Benchmarks", benchmarks)))
    decisions = [(p.name, _title(p.read_text())) for p in sorted((ROOT / "docs/adr").glob("*.md"))]
    files.append(File.generated(config, "adr/index.md", content=_index("Decisions", decisions)))
    files.append(File.generated(config, REST, content=_rest(files)))
    config.nav = NAVIGATION
    return files


def _named(navigation: list[Any]) -> list[str]:
    """List the pages of a navigation."""
    return [
        page
        for entry in navigation
        for page in ([entry] if isinstance(entry, str) else _named(next(iter(entry.values()))))
    ]


def _rest(files: Files) -> str:
    """List the pages that the navigation leaves out, by folder. Decisions have a page of their own."""
    shown = {*_named(NAVIGATION), REST}
    others = sorted(f.src_uri for f in files if f.src_uri.endswith(".md") and f.src_uri not in shown)
    folders: dict[str, list[str]] = {}
    for page in others:
        folder, _, name = page.rpartition("/")
        if folder != "adr" or name == "index.md":
            folders.setdefault(folder, []).append(page)
    titles = {file.src_uri: _title(file.content_string) for file in files if file.src_uri in others}
    lines = ["# All other pages", ""]
    for folder, pages in folders.items():
        lines += [
            f"## {folder.capitalize() or 'Pages'}",
            "",
            *(f"- [{titles[page] or page}]({page})" for page in pages),
            "",
        ]
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Let links lead to pages; one to a file of the repository that is no page becomes its text."""
    pages = _pages() | {"benchmarks": "benchmarks/index.md", "docs/adr": "adr/index.md"}
    pages |= {name.removesuffix(".md"): name for name in pages.values() if name.startswith("benchmarks/")}
    origins = {target: source for source, target in _pages().items()}
    own = page.file.src_uri
    origin = origins.get(own, f"docs/{own}")

    def led(match: re.Match[str]) -> str:
        bang, text, target = match.groups()
        if target.startswith(("#", "http:", "https:", "mailto:")):
            return match[0]
        path, hash_, anchor = target.partition("#")
        named = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if bang and named.startswith("benchmarks/"):
            return f"![{text}]({posixpath.relpath(named, posixpath.dirname(own) or '.')})"
        if named in pages:
            return f"{bang}[{text}]({posixpath.relpath(pages[named], posixpath.dirname(own) or '.')}{hash_}{anchor})"
        return text if (ROOT / named).exists() else match[0]

    if own.startswith("reference/"):
        return markdown
    return LINK.sub(led, markdown)
