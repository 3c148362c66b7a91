"""What a strategy costs: memory by category and moment, and collectives. Nothing here imports torch."""

from meshwright.cost.communication import count_collectives
from meshwright.cost.memory import CATEGORIES, Moment, StepMemory, framework_bytes, recomputed_blocks
from meshwright.cost.price import price

__all__ = [
    "CATEGORIES",
    "Moment",
    "StepMemory",
    "count_collectives",
    "framework_bytes",
    "price",
    "recomputed_blocks",
]
