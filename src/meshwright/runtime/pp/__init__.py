"""Pipeline parallelism: a model's own forward, of which every stage runs its part and is handed the rest."""

from meshwright.runtime.pp.apply import PipelineParallel
from meshwright.runtime.pp.run import PipelineRun

__all__ = ["PipelineParallel", "PipelineRun"]
