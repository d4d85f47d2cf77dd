"""How measured values are shown: the median, and the range because single values of a shared machine mean little."""

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Returns ``median (least to largest)``, the median first so that columns line up.

    Args:
        values: Measured in several rounds.
        digits: Digits behind the point.
    """
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
