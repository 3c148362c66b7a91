"""What global rank 0 shows while a run goes on: a live bar on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.spec.units import show_bytes

__all__ = ["ProgressView", "StepView", "duration"]

_PLAIN_LINES = 25
_SMOOTH = 0.1


@dataclass(frozen=True, kw_only=True)
class StepView:
    """The figures of one optimizer step that are shown.

    `loss` is the global token mean in nats per byte, `memory_bytes` the peak of one rank's tensors.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    memory_bytes: int
    skipped: bool = False


class ProgressView:
    """A context manager; `step` once per optimizer step, `note` for anything else worth a line.

    Args:
        steps: optimizer steps of the whole run.
        done: those that were done before, when it is resumed.
        console: where to show it; a terminal gets a live bar, anything else about 25 lines in all.
    """

    def __init__(self, steps: int, done: int, console: Console) -> None:
        self._steps = steps
        self._done = done
        self._console = console
        self._every = max(1, -(-(steps - done) // _PLAIN_LINES))
        self._started = time.perf_counter()
        self._bar: Progress | None = None
        self._speed = 0.0
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=8),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=console,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("", total=steps, completed=done, figures="")

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, view: StepView) -> None:
        """Show one step; on anything but a terminal only about 25 of them, the first and the last among them."""
        smooth = _SMOOTH if self._speed else 1.0
        self._speed += smooth * (view.tokens_per_s - self._speed)
        if self._bar is not None:
            self._bar.update(self._task, completed=view.step, figures=self._figures(view))
        elif view.step - self._done == 1 or view.step == self._steps or (view.step - self._done) % self._every == 0:
            done = view.step - self._done
            left = (time.perf_counter() - self._started) / done * (self._steps - view.step)
            width = len(str(self._steps))
            text = f"step {view.step:>{width}}/{self._steps}  {self._figures(view)}  {duration(left)} left"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        if view.skipped:
            self.note(f"step {view.step}: gradients are not finite; weights kept as they were")

    def note(self, text: str) -> None:
        """Show a line between the steps."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _figures(self, view: StepView) -> str:
        memory = show_bytes(view.memory_bytes)
        return f"loss {view.loss:.4f} norm {view.grad_norm:.3f} {self._speed:,.0f} tokens/s {memory}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
