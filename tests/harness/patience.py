"""Memory of a step, counted a moment after its collectives: threads of gloo let go of their buffers a little later."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from unittest import mock

from meshwright.runtime.memory import MemoryMeter

__all__ = ["patient"]

PATIENCE_S = 0.003


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Inside, each moment is counted after a short wait."""
    note = MemoryMeter.note

    def later(meter: MemoryMeter) -> None:
        time.sleep(PATIENCE_S)
        note(meter)

    with mock.patch.object(MemoryMeter, "note", later):
        yield
