"""Every page that there is, with as much on it as there can be: long names, many classes, runs of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from consilium.model import inputs, model_file
from consilium.model.page.site import PredictionPage
from consilium.model.predictor import Predictor, calibrated
from consilium.pages.hospital.site import HospitalPage
from consilium.pages.lead.exports import Exporter
from consilium.report import documents
from consilium.report.card import ClassFacts, Hospital
from consilium.research.demo.report import Holdings, ResultTable, write_page
from consilium.web.serve import PageServer
from coordinator.lead.client import LeadClient
from coordinator.lead.survey_answers import SurveyAnswers
from fl_core.datasets.image_loader import ImageLoader
from fl_core.types.survey import Cell, SurveyAnswer
from protos.consilium.v1 import federation_pb2 as pb
from tests.support import cards
from tests.support.exported import exported
from tests.support.hospital import furnished
from tests.support.made_up_service import (
    FAILED,
    FEDAVG,
    FEDMR,
    LONG,
    MASKED,
    MEASURED,
    PRIVATE,
    SURVEYED,
    WAITS,
    every_kind,
)
from tests.support.pages import Visit, shown

RUNS = {
    "waiting": WAITS,
    "finished": FEDMR,
    "failed": FAILED,
    "private": PRIVATE,
    "masked": MASKED,
    "survey": SURVEYED,
    "evaluation": MEASURED,
}
LEAD = {
    "lead": "/",
    **{f"lead, {kind}": f"/runs/{run}" for kind, run in RUNS.items()},
    "lead, compare": f"/compare?a={FEDAVG}&b={FEDMR}&c={MASKED}&d={PRIVATE}",
    "lead, new": "/new",
    "lead, choose": "/compare",
    "lead, nothing there": "/runs/none",
}
FILES = ("card", "demo")
PAGES = (*LEAD, "hospital", "predict", *FILES)


def survey() -> SurveyAnswers:
    """Make answers with noise: some suppressed by a few hospitals, one question by all, one hospital's apart."""

    def answers(hospitals: int) -> tuple[SurveyAnswer, ...]:
        few = tuple(Cell(name, None, 40.0 * k - 20, 12.5, k % hospitals) for k, name in enumerate(LONG.classes))
        none = tuple(Cell(name, None, None, 0.0, hospitals) for name in ("female", "male"))
        return SurveyAnswer("classes", "Class", "", few, {}), SurveyAnswer("sex", "Sex", "", none, {})

    apart = {LONG.hospitals[-1]: answers(1)}
    return SurveyAnswers(
        "d" * 64, len(LONG.hospitals), 3.0, 1e-5, answers(len(LONG.hospitals)), apart, ("classes, melanoma",)
    )


class Surveyed(Exporter):
    """Has these answers to every survey."""

    def answers(self, info: pb.RunInfo) -> SurveyAnswers:
        return survey()


@contextmanager
def gallery(browser: Any, folder: Path) -> Iterator[Callable[[str], Any]]:
    """Serve all of it; gives a function from a name in `PAGES` to a tab that shows this page."""
    with ExitStack() as stack:

        def tab(server: PageServer) -> Any:
            visit = Visit(browser, server)
            stack.callback(visit.context.close)
            return visit.page

        served, _ = stack.enter_context(shown(every_kind(), folder / "lead", exporter=Surveyed(folder, LeadClient)))
        hospital = HospitalPage(furnished(folder / "hospital"))
        stack.enter_context(closing(hospital))
        predict = _predict(folder / "predict")
        lead, file = tab(served), stack.enter_context(closing(browser.new_context())).new_page()
        tabs = {
            "hospital": tab(stack.enter_context(PageServer(hospital.site(), folder / "hospital"))),
            "predict": tab(stack.enter_context(PageServer(predict.site(), folder / "predict"))),
        }
        (folder / "card.html").write_text(_card(folder / "authority"))
        _demo(folder / "demo.html")

        def show(name: str) -> Any:
            if name in LEAD:
                lead.goto(f"http://{served.host}{LEAD[name]}")
            elif name in FILES:
                file.goto((folder / f"{name}.html").as_uri())
            return lead if name in LEAD else file if name in FILES else tabs[name]

        yield show


def _predict(folder: Path) -> PredictionPage:
    folder.mkdir(mode=0o700)
    made, loader = exported(folder), ImageLoader(cache_bytes=0)
    model = model_file.load(made.model)
    held = inputs.from_reference(made.hospital, "test", model.facts, None, loader)
    page = PredictionPage(Predictor(model, calibrated(model, held, 0.9, 0.1)), folder)
    image = next((made.images / "new/3").iterdir())
    for name in ("three.png", f"{'a-file-with-a-very-long-name-' * 4}.png"):
        page.take(name, image)
    return page


def _card(home: Path) -> str:
    own = cards.lead(home)
    classes = tuple(ClassFacts(name, n, cards.LUCKY, LONG.hospitals, 0.9, 0.8, 0.82) for name, n in LONG.tested.items())
    hospitals = tuple(Hospital(name, 2, ("2: offline",), "yes", 30.0, "p" * 64, "f" * 64) for name in LONG.hospitals)
    made = cards.card(classes=classes, hospitals=hospitals)
    confusion = tuple(tuple(137 for _ in classes) for _ in classes)
    made = replace(made, results=replace(made.results, confusion=confusion))
    return documents.page(cards.signed(own, classes=classes, hospitals=hospitals, results=made.results), made)


def _demo(file: Path) -> None:
    names = ("north", "east", "south", "west", "harbour", "hill")
    held = {name: [140 + k if k // 2 == n else 0 for k in range(10)] for n, name in enumerate(names)}
    said = ResultTable(
        "One model for six hospitals; no image moved",
        ("trained by", "classified correctly", "bytes up", "updates"),
        [
            (
                "analytic, every image protected (epsilon 8)",
                "91.94 %",
                "3.2 MiB",
                "norm_clipped: 0 refused, 3 cut, 0 rows cut",
            )
        ],
    )
    curves = {"FedAvg": [0.1, 0.3, 0.5], "FedGELA": [0.1, 0.6, 0.9], "analytic": [0.1, 0.97]}
    write_page(file, "Six hospitals trained one model", "No image left.", Holdings("0123456789", held), curves, [said])
