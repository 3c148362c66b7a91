"""Meshwright: finds the fastest parallel strategy for a PyTorch model on your machines, says why, and trains with it.

The names below are handed on when they are first asked for, so that `import meshwright` loads neither torch nor
anything else that takes time.
"""

from typing import TYPE_CHECKING

from meshwright._version import __version__
from meshwright.handed_on import handed_on

if TYPE_CHECKING:
    from meshwright.api import plan
    from meshwright.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        InfeasiblePlan,
        MeshwrightError,
        PlanError,
        RankFailure,
        UnsupportedCombination,
    )
    from meshwright.measure import describe_module, trace
    from meshwright.measure.sharding import explain_sharding
    from meshwright.measure.verify import verify
    from meshwright.runtime import Engine, MeanLoss, ModelLoss, StepReport
    from meshwright.spec import Cluster, Job, ModelSpec, OptimizerSpec, Plan, Strategy
    from meshwright.spec.sharded import Sharded
    from meshwright.spec.verified import Verified
    from meshwright.train.batches import Batches
    from meshwright.train.collate import Padding, pad, prompt_mask
    from meshwright.train.packing import Packing

__all__ = [
    "Batches",
    "CheckpointError",
    "Cluster",
    "ConfigError",
    "DataError",
    "Engine",
    "InfeasiblePlan",
    "Job",
    "MeanLoss",
    "MeshwrightError",
    "ModelLoss",
    "ModelSpec",
    "OptimizerSpec",
    "Packing",
    "Padding",
    "Plan",
    "PlanError",
    "RankFailure",
    "Sharded",
    "StepReport",
    "Strategy",
    "UnsupportedCombination",
    "Verified",
    "__version__",
    "describe_module",
    "explain_sharding",
    "pad",
    "plan",
    "prompt_mask",
    "trace",
    "verify",
]

_HOME = {
    "Batches": "meshwright.train.batches",
    "CheckpointError": "meshwright.errors",
    "Cluster": "meshwright.spec",
    "ConfigError": "meshwright.errors",
    "DataError": "meshwright.errors",
    "Engine": "meshwright.runtime",
    "InfeasiblePlan": "meshwright.errors",
    "Job": "meshwright.spec",
    "MeanLoss": "meshwright.runtime",
    "MeshwrightError": "meshwright.errors",
    "ModelLoss": "meshwright.runtime",
    "ModelSpec": "meshwright.spec",
    "OptimizerSpec": "meshwright.spec",
    "Packing": "meshwright.train.packing",
    "Padding": "meshwright.train.collate",
    "Plan": "meshwright.spec",
    "PlanError": "meshwright.errors",
    "RankFailure": "meshwright.errors",
    "Sharded": "meshwright.spec.sharded",
    "StepReport": "meshwright.runtime",
    "Strategy": "meshwright.spec",
    "UnsupportedCombination": "meshwright.errors",
    "Verified": "meshwright.spec.verified",
    "describe_module": "meshwright.measure",
    "explain_sharding": "meshwright.measure.sharding",
    "pad": "meshwright.train.collate",
    "plan": "meshwright.api",
    "prompt_mask": "meshwright.train.collate",
    "trace": "meshwright.measure",
    "verify": "meshwright.measure.verify",
}


__getattr__ = handed_on(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
