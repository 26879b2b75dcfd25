"""Notation of metrics: fractions as percentages and points, others as they are."""

import math
from dataclasses import dataclass

from vit_lightning.metric_facts import facts_of

NONE = "\N{EN DASH}"
"""Stands where there is no number."""
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Unit:
    """Notation of a metric: fractions as percentages, others as they are."""

    scale: float = 1.0
    digits: int = 4
    points: str = ""
    """Unit of a difference: percentages differ by points."""
    sign: str = ""
    """Unit of a value."""

    def label(self, name: str) -> str:
        """Returns a name of values with their unit."""
        return f"{name} ({self.sign.strip()})" if self.sign else name

    def difference_label(self, name: str) -> str:
        """Returns a name of differences with their unit."""
        return f"{name} ({self.points.strip()})" if self.points else name

    def value(self, number: float, sign: str = "") -> str:
        return NONE if math.isnan(number) else f"{self.scale * number:{sign}.{self.digits}f}".replace("-", MINUS)

    def signed(self, number: float) -> str:
        return self.value(number, "+" if number else "")

    def difference(self, number: float) -> str:
        """Writes a difference with its unit."""
        return self.signed(number) + self.points

    def interval(self, low: float, high: float) -> str:
        return NONE if math.isnan(low) else f"{self.signed(low)} to {self.signed(high)}"

    def plain(self, number: float) -> str:
        shown = f"{self.scale * number:.6g}"
        return shown + (self.points.removesuffix("s") if shown == "1" else self.points)


def unit_of(metric: str) -> Unit:
    """Returns the notation of a metric."""
    facts = facts_of(metric)
    return Unit(100.0, 2, " points", " %") if facts is not None and facts.percent else Unit()
