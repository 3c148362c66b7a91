"""The runtime: executes a Strategy with PyTorch."""

from meshwright.runtime.engine import Engine
from meshwright.runtime.init import meta_parameters
from meshwright.runtime.loss import MeanLoss
from meshwright.runtime.model_loss import ModelLoss
from meshwright.runtime.ranks import global_rank, join_ranks, local_device, world_size
from meshwright.runtime.report import StepReport

__all__ = [
    "Engine",
    "MeanLoss",
    "ModelLoss",
    "StepReport",
    "global_rank",
    "join_ranks",
    "local_device",
    "meta_parameters",
    "world_size",
]
