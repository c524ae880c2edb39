"""Class coverage: the classes of a run, the hospitals that train each, and the test images of each.

It is computed once before round 1, so that every display has the same wording. It names classes and never a hospital.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

NAMED = 20
"""Most classes that a sentence names; for more it gives the number."""
LEFT_OUT = "E-RUN-53"
"""Error code for a run that would leave classes out; the lead has to confirm it."""


@dataclass(frozen=True, slots=True)
class ClassCoverage:
    """The number of hospitals that train each class of a run, and the consequence for classes of few hospitals.

    hospitals: (C,), including those of the run's ancestors; empty: unknown, with the reason in `why`
    partial: some hospitals did not declare their classes, so that 0 may be more   least: number of hospitals that a
    class needs for its rows to leave
    masked: updates leave under masks   tested: test images (C,) of the newest evaluation; empty: unknown.
    """

    classes: tuple[str, ...] = ()
    hospitals: tuple[int, ...] = ()
    partial: bool = False
    least: int = 1
    masked: bool = False
    why: str = ""
    tested: tuple[float, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> ClassCoverage:
        """Read the output of `facts`, through JSON or a message."""
        listed: dict[str, Any] = {
            name: tuple(v) if isinstance(v, Sequence) and not isinstance(v, str) else v for name, v in raw.items()
        }
        return cls(**listed)

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def after(self, parent: ClassCoverage | None, *, trains: bool) -> ClassCoverage:
        """Add the classes that the start model was trained on. parent: None if unknown."""
        if parent is None or not parent.hospitals or parent.classes != self.classes:
            return replace(self, partial=True) if trains else replace(self, hospitals=(), why="the first run is older")
        before = tuple(0 if n < parent.least else n for n in parent.hospitals)
        if not trains:
            return replace(self, hospitals=before, partial=parent.partial, least=1)
        both = tuple(max(pair) for pair in zip(self.hospitals, before, strict=True)) if self.hospitals else ()
        return replace(self, hospitals=both, partial=self.partial or parent.partial)

    def with_tested(self, tested: Sequence[float]) -> ClassCoverage:
        return replace(self, tested=tuple(tested))

    # ---- what follows --------------------------------------------------------------------------------------------

    @property
    def left_out(self) -> tuple[str, ...]:
        """Classes that too few hospitals have for their rows to leave."""
        return self._where(lambda n: 0 < n < self.least)

    @property
    def alone(self) -> tuple[str, ...]:
        """Classes trained at one hospital only."""
        return self._where(lambda n: n == 1 >= self.least)

    @property
    def untaught(self) -> tuple[str, ...]:
        """Classes that the model does not learn: no hospital has them, or they are left out."""
        return self._where(lambda n: n < self.least and (n > 0 or not self.partial))

    def _where(self, true: Callable[[int], bool]) -> tuple[str, ...]:
        return tuple(name for name, n in zip(self.classes, self.hospitals, strict=False) if true(n))

    # ---- in words ------------------------------------------------------------------------------------------------

    def sentences(self) -> list[str]:
        """Describe the consequence for classes that few hospitals have; empty if there are none."""
        if not self.hospitals:
            return [f"the number of hospitals per class is unknown: {self.why}"] if self.why else []
        nobody = [name for name in self.untaught if name not in self.left_out]
        masked = "the coordinator reads this hospital's sums, but not its name"
        clear = "the coordinator can read this hospital's update"
        texts = [
            (self.alone, f"trained at one hospital only; {masked if self.masked else clear}"),
            (
                self.left_out,
                f"left out because fewer than {self.least} hospitals have it: the model cannot recognise it",
            ),
            (nobody, "at no hospital: the model cannot recognise it"),
        ]
        return [f"{listed(names)}: {_each(text, len(names))}" for names, text in texts if names]

    def headline(self) -> str:
        """Describe the tested and trained classes in a few words; empty if nothing is known."""
        total = max(len(self.classes), len(self.tested))
        parts = []
        if self.tested:
            parts.append(f"{sum(n > 0 for n in self.tested)} of {total} classes tested")
        if self.classes and self.hospitals:
            taught = f"{total - len(self.untaught)} of {total}{'' if parts else ' classes'} trained"
            parts.append(("at least " if self.partial else "") + taught + self._where_trained())
        return ", ".join(parts)

    def _where_trained(self) -> str:
        numbers = sorted(n for n in self.hospitals if n >= self.least and n)
        if not numbers:
            return ""
        low, high = numbers[0], numbers[-1]
        return f" at {low}{'' if low == high else f' to {high}'} {'hospital' if high == 1 else 'hospitals'} each"

    def lines(self) -> list[str]:
        """Describe the trained and tested classes, and the consequence for those that few hospitals have.

        Empty if the classes have no names.
        """
        return [*filter(None, [self.headline()]), *self.sentences()]

    def over(self) -> str:
        """Return a text to follow a number that covers only some of the classes; empty if it covers all."""
        n = sum(of > 0 for of in self.tested)
        return f" over {n} of {len(self.tested)} classes" if self.tested and n < len(self.tested) else ""

    def as_json(self) -> dict[str, object]:
        """Return it as JSON values; None for unknown ones."""
        return {
            "names": list(self.classes),
            "hospitals": list(self.hospitals) or None,
            "all_have_said": not self.partial,
            "left_out": list(self.left_out),
            "untaught": list(self.untaught),
            "tested": list(self.tested) or None,
        }

    def hospitals_of(self, name: str) -> int | None:
        """Return at how many hospitals a class is trained; None if unknown."""
        n = dict(zip(self.classes, self.hospitals, strict=False)).get(name)
        return None if n == 0 and self.partial else n


def _each(text: str, number: int) -> str:
    """Return a sentence about one class in the plural if `number` is above 1."""
    if number == 1:
        return text
    for one, several in (
        ("trained at", "each trained at"),
        ("have it", "have them"),
        ("recognise it", "recognise them"),
    ):
        text = text.replace(one, several)
    return text


def listed(names: Collection[str]) -> str:
    """List the names of classes; if there are many, only the first ones."""
    first = ", ".join(list(names)[:NAMED])
    return first if len(names) <= NAMED else f"{first} and {len(names) - NAMED} more"


def counted_holders(classes: Sequence[str], holders: Iterable[Collection[str]]) -> tuple[int, ...]:
    """Count the hospitals of each class. holders: the classes of each hospital."""
    class_sets = [frozenset(each) for each in holders]
    return tuple(sum(name in each for each in class_sets) for name in classes)
