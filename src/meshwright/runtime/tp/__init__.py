"""Tensor parallelism: a model's matrices divided over ranks, by the user's annotations or the model's own plan."""

from meshwright.runtime.tp.apply import TensorParallel
from meshwright.runtime.tp.plan import plan_sharding

__all__ = ["TensorParallel", "plan_sharding"]
