"""The errors a user of Meshwright can meet, as one visible tree.

    MeshwrightError
    ├── ConfigError                 a value, key, file or pin that cannot be right
    │   └── UnsupportedCombination  legal, but not executable by this version
    ├── PlanError
    │   └── InfeasiblePlan          nothing fits the machine (or the pins)
    ├── DataError                   a corpus that is missing, empty, unreadable or too short
    ├── CheckpointError             a checkpoint that is none, half-written or of another model
    └── RankFailure                 a rank raised or died

Every text says what was asked with its values, why it cannot be, and what to change. None derives from `ValueError`
or `TypeError`: they pass unchanged through libraries that turn those into errors of their own.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InfeasiblePlan",
    "MeshwrightError",
    "PlanError",
    "RankFailure",
    "UnsupportedCombination",
]


class MeshwrightError(Exception):
    """Base of every error raised on purpose.

    Args:
        what: what was asked, with its values.
        why: the reason why it cannot be.
        fix: what to change; two ways where there are two.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        super().__init__(what, why, fix)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.why, self.fix))


def _rebuild(kind: type[MeshwrightError], what: str, why: str, fix: str) -> MeshwrightError:
    return kind(what, why=why, fix=fix)


class ConfigError(MeshwrightError):
    """A value, key, file or pin cannot be right."""


class UnsupportedCombination(ConfigError):
    """A legal strategy or job that this version cannot execute yet."""


class PlanError(MeshwrightError):
    """No plan could be made."""


class InfeasiblePlan(PlanError):
    """No strategy within the pins fits the machine's memory."""


class DataError(MeshwrightError):
    """A corpus is missing, empty, unreadable or too short."""


class CheckpointError(MeshwrightError):
    """A checkpoint is none, incomplete, or of another model."""


class RankFailure(MeshwrightError):
    """A rank raised or was killed; the text names rank, host, step and cause."""
