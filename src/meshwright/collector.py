"""Python's cycle collector, paused while hundreds of thousands of small objects without cycles are made."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused", "collector_spared_at_exit"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, nothing is searched for cycles. The collector would walk through a growing schedule again and again,
    which took a third of the time to build one."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # else objects that someone else has frozen would thaw
                gc.freeze()  # with the next line: what was made counts as old, and is not walked through right away
                gc.unfreeze()
            gc.enable()


def collector_spared_at_exit() -> None:
    """When the process ends nothing is searched for cycles any more, which took a twentieth of a whole plan."""
    atexit.register(gc.freeze)
