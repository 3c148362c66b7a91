"""The choice: from what is possible, the best that fits, with reasons. Nothing here imports torch."""

from meshwright.planner.make import Model, ask, make_plan, plan_for
from meshwright.planner.pins import pins_of
from meshwright.planner.question import Question
from meshwright.planner.why import Why, parse_why, why_not

__all__ = ["Model", "Question", "Why", "ask", "make_plan", "parse_why", "pins_of", "plan_for", "why_not"]
