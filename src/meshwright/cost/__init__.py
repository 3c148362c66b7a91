"""What a strategy costs: memory by category and communication by count. Nothing here imports torch."""

from meshwright.cost.communication import count_collectives
from meshwright.cost.estimate import Estimate, RankEstimate, estimate
from meshwright.cost.memory import CATEGORIES, RankMemory, StepMemory, recomputed_blocks
from meshwright.cost.moments import Moment
from meshwright.cost.overhead import framework_bytes, overhead_bytes
from meshwright.cost.price import price
from meshwright.cost.stages import Stage, cut

__all__ = [
    "CATEGORIES",
    "Estimate",
    "Moment",
    "RankEstimate",
    "RankMemory",
    "Stage",
    "StepMemory",
    "count_collectives",
    "cut",
    "estimate",
    "framework_bytes",
    "overhead_bytes",
    "price",
    "recomputed_blocks",
]
