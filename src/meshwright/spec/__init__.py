"""The nouns: what a model, a cluster, a job, a strategy and a plan are. Nothing here imports torch."""

from meshwright.spec.cluster import Cluster, Device, Efficiency, Link, NodeGroup
from meshwright.spec.decoder import DecoderShape, describe
from meshwright.spec.job import DTYPE_BYTES, Job, OptimizerSpec
from meshwright.spec.job_for import job_for
from meshwright.spec.layout import Attention, Layout
from meshwright.spec.machine import this_machine
from meshwright.spec.model import AttentionWork, BlockCollective, BlockSpec, ModelSpec, Product, shard_dim
from meshwright.spec.plan import (
    PLAN_FORMAT,
    Change,
    Constant,
    Cost,
    ErrorBar,
    ModelReference,
    Objective,
    Plan,
    Provenance,
    Rejected,
    RunnerUp,
)
from meshwright.spec.strategy import Offload, Strategy, even_layers
from meshwright.spec.support import is_executable, require_executable
from meshwright.spec.text import Assignment, parse_assignments, parse_strategy

__all__ = [
    "even_layers",
    "DTYPE_BYTES",
    "PLAN_FORMAT",
    "Assignment",
    "Attention",
    "AttentionWork",
    "BlockCollective",
    "BlockSpec",
    "Change",
    "Cluster",
    "Constant",
    "Cost",
    "DecoderShape",
    "Device",
    "Efficiency",
    "ErrorBar",
    "Job",
    "Layout",
    "Link",
    "ModelReference",
    "ModelSpec",
    "NodeGroup",
    "Objective",
    "Offload",
    "OptimizerSpec",
    "Plan",
    "Product",
    "Provenance",
    "Rejected",
    "RunnerUp",
    "Strategy",
    "describe",
    "is_executable",
    "job_for",
    "parse_assignments",
    "parse_strategy",
    "require_executable",
    "shard_dim",
    "this_machine",
]
