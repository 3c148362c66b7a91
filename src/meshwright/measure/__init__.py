"""Looks at real things: traces a model, measures a machine, verifies a strategy.

Names are handed on when they are first asked for: commands whose work is done by processes of their own do not wait for
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    """Hands on a public name from the module it lives in. Raises AttributeError for any other name."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'meshwright.measure' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value
