"""Published measurements: rows of tables, what they ran, and what is predicted for them."""

from meshwright.cost.published.accuracy import DRAWS, Accuracy, Calibrated, Summary, accuracy
from meshwright.cost.published.compare import Comparison, compare, median_error, peak_bytes
from meshwright.cost.published.pricing import PricedRow, price_rows
from meshwright.cost.published.rows import PublishedRow, Unpriced, read_rows
from meshwright.cost.published.setups import Setup
from meshwright.cost.published.sources import setup_of
from meshwright.cost.published.table import accuracy_table

__all__ = [
    "DRAWS",
    "Accuracy",
    "Calibrated",
    "Comparison",
    "PricedRow",
    "PublishedRow",
    "Setup",
    "Summary",
    "Unpriced",
    "accuracy",
    "accuracy_table",
    "compare",
    "median_error",
    "peak_bytes",
    "price_rows",
    "read_rows",
    "setup_of",
]
