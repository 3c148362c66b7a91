"""`python -m meshwright.report`: a plan for this machine, and predicted beside measured with made-up measurements."""

from rich.console import Console

from meshwright.planner import make_plan
from meshwright.report import measured_view, plan_view
from meshwright.spec import DecoderShape, Job, this_machine

plan = make_plan(DecoderShape(), this_machine(), Job(global_batch=16))
screen = Console()
screen.print(plan_view(plan))
screen.print(measured_view(plan.cost.in_step, {name: size * 101 // 100 for name, size in plan.cost.in_step.items()}))
