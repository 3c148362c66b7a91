"""Published measurements: rows of tables, what they ran, and what is predicted for them."""

from meshwright.cost.published.compare import Comparison, compare, median_error, peak_bytes
from meshwright.cost.published.rows import PublishedRow, Unpriced, read_rows
from meshwright.cost.published.setups import Setup
from meshwright.cost.published.sources import setup_of

__all__ = [
    "Comparison",
    "PublishedRow",
    "Setup",
    "Unpriced",
    "compare",
    "median_error",
    "peak_bytes",
    "read_rows",
    "setup_of",
]
