"""How numbers are written: fractions in percent, their differences in points, other metrics in their unit, bytes in kB."""

from dataclasses import dataclass

from fedmutual.metric import ACCURACY, Metric

MINUS = "\N{MINUS SIGN}"
_DIGITS, _SPREAD_DIGITS = 3, 2  # of a number that is no fraction, and of a difference and half an interval


@dataclass(frozen=True)
class MetricScale:
    """The metric of a comparison, and how its values are written."""

    decimals: int = 1  # of a percentage
    metric: Metric = ACCURACY

    @property
    def factor(self) -> int:
        """Return the factor from a value to the number that is shown."""
        return 100 if self.metric.is_fraction else 1

    @property
    def mark(self) -> str:
        """Return the text after a value: " %", " mmol/l", or nothing."""
        return " %" if self.metric.is_fraction else f" {self.metric.unit}" if self.metric.unit else ""

    @property
    def difference_mark(self) -> str:
        """Return the text after a difference: " points", " mmol/l", or nothing."""
        return " points" if self.metric.is_fraction else self.mark

    @property
    def head(self) -> str:
        """Return the unit in the head of a column: ", %", ", mmol/l", or nothing."""
        return f",{self.mark}" if self.mark else ""

    @property
    def difference_head(self) -> str:
        """Return the unit of differences in the head of a column: ", points", ", mmol/l", or nothing."""
        return f",{self.difference_mark}" if self.difference_mark else ""

    def format_value(self, value: float) -> str:
        """Return 0.912 as "91.2", a number that is no fraction with three digits: 53.8712 as "53.9"."""
        if self.metric.is_fraction:
            return format_number(100 * value, self.decimals)
        return _round_number(value, _DIGITS)

    def format_spread(self, half: float) -> str:
        """Return half the width of an interval, without a sign."""
        return self.format_value(half) if self.metric.is_fraction else _round_number(half, _SPREAD_DIGITS)

    def format_gain(self, value: float) -> str:
        """Return a difference with its sign: "+1.2"; a difference that is shown as 0 has no sign."""
        return _add_sign(self.format_value(value) if self.metric.is_fraction else _round_number(value, _SPREAD_DIGITS))


def _add_sign(text: str) -> str:
    return f"+{text}" if text[0] != MINUS and text.strip("0.") else text


def _round_number(value: float, digits: int) -> str:
    """Return a number with this number of significant digits, without an exponent for a large number."""
    is_small = abs(value) < 10**digits - 0.5  # a number that is not is rounded to one of more digits
    return f"{value:.{digits}g}".replace("-", MINUS) if is_small else format_number(value, 0)


PERCENT = MetricScale()
"""Accuracies in percent with one decimal."""


def format_signed(value: float, decimals: int) -> str:
    """Return a number with its sign: "+1.2"; a number that rounds to 0 has no sign."""
    return _add_sign(format_number(value, decimals))


def format_number(value: float, decimals: int) -> str:
    """Return a number with this number of decimals and a true minus sign; a number that rounds to 0 has no sign."""
    text = f"{value:.{decimals}f}"
    return text.replace("-", MINUS) if text.strip("-0.") else text.removeprefix("-")


def format_size(n: float) -> str:
    """Return bytes as text, in powers of 1000: 796840 -> "796.8 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
