"""Plans and runs as tables for the terminal. Nothing here imports torch."""

from meshwright.report.estimate_view import estimate_view
from meshwright.report.measured_view import measured_view
from meshwright.report.plan_table import plan_table
from meshwright.report.plan_view import plan_view
from meshwright.report.why_view import why_view

__all__ = ["estimate_view", "measured_view", "plan_table", "plan_view", "why_view"]
