"""The choice: from what is possible, by a fixed rule, with reasons. Nothing here imports torch."""

from meshwright.planner.make import make_plan
from meshwright.planner.pins import pins_of
from meshwright.planner.rule import RULE

__all__ = ["RULE", "make_plan", "pins_of"]
