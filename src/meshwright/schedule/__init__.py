"""Schedules as plain data: per rank, a list of actions; one score that `cost/` prices and `runtime/` plays."""

from meshwright.schedule.action import Action, Kind, Schedule, Window, windows
from meshwright.schedule.single import single_stage
from meshwright.schedule.validate import validate

__all__ = ["Action", "Kind", "Schedule", "Window", "single_stage", "validate", "windows"]
