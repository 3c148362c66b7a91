"""Schedules as plain data: per rank, a list of actions; one score that `cost/` prices and `runtime/` plays."""

from meshwright.schedule.action import COMPUTE, Action, Kind, Schedule, Window, windows
from meshwright.schedule.files import parse_schedule, read_schedule, write_schedule
from meshwright.schedule.flight import InFlight, in_flight
from meshwright.schedule.make import (
    FOLDED,
    SCHEDULES,
    compute_order,
    compute_orders,
    make_schedule,
    single_stage,
    stage_rank,
    stage_ranks,
)
from meshwright.schedule.timeline import Row, Span, SpanKind, Timeline
from meshwright.schedule.validate import validate

__all__ = [
    "COMPUTE",
    "FOLDED",
    "SCHEDULES",
    "Action",
    "InFlight",
    "Kind",
    "Row",
    "Schedule",
    "Span",
    "SpanKind",
    "Timeline",
    "Window",
    "compute_order",
    "compute_orders",
    "in_flight",
    "make_schedule",
    "parse_schedule",
    "read_schedule",
    "single_stage",
    "stage_rank",
    "stage_ranks",
    "validate",
    "windows",
    "write_schedule",
]
