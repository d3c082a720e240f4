"""Numbers and lists in words."""

MINUS = "\N{MINUS SIGN}"


def format_percent_number(fraction: float, decimals: int = 1) -> str:
    """Return a fraction in percent without the sign: 0.912 -> "91.2"."""
    return format_number(100 * fraction, decimals)


def format_points(difference: float, decimals: int = 1) -> str:
    """Return a difference in percentage points with its sign: 0.0123 -> "+1.2"; a number that rounds to 0 has no sign."""
    text = format_number(100 * difference, decimals)
    return f"+{text}" if text[0] != MINUS and text.strip("0.") else text


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
