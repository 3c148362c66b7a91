"""Looks at real things: traces a model."""

from meshwright.measure.described import TracedModel, describe_module
from meshwright.measure.named import named_module
from meshwright.measure.trace import trace

__all__ = ["TracedModel", "describe_module", "named_module", "trace"]
