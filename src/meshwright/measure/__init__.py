"""Looks at real things: traces a model, measures a machine, verifies a strategy.

Names are handed on when they are first asked for: commands whose work is done by processes of their own do not wait for
torch.
"""

from typing import TYPE_CHECKING

from meshwright.handed_on import handed_on

if TYPE_CHECKING:
    from meshwright.measure.described import TracedModel, describe_module
    from meshwright.measure.named import named_module
    from meshwright.measure.traced import trace

__all__ = ["TracedModel", "describe_module", "named_module", "trace"]

_HOME = {
    "TracedModel": "meshwright.measure.described",
    "describe_module": "meshwright.measure.described",
    "named_module": "meshwright.measure.named",
    "trace": "meshwright.measure.traced",
}


__getattr__ = handed_on(__name__, _HOME)
