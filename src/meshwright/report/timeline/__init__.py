"""Timelines of a step on the screen and as pictures."""

from meshwright.report.timeline.figures import timeline_table
from meshwright.report.timeline.files import OUTPUTS, require_output, write_timeline
from meshwright.report.timeline.terminal import timeline_view

__all__ = ["OUTPUTS", "require_output", "timeline_table", "timeline_view", "write_timeline"]
