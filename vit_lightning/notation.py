"""Notation of numbers in sentences: with their noun, and times with their unit."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_time(seconds: float) -> str:
    """Writes a time with its unit: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
