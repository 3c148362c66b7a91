"""When two runs are equal: what a run leaves behind, how close is close, and float64 for models that cast down."""

from meshwright.measure.equality.float64 import float32_upcasts_stay_float64
from meshwright.measure.equality.recording import record
from meshwright.measure.equality.records import Piece, Run, Step, join, piece
from meshwright.measure.equality.tolerance import (
    ADAMW_DEFAULT_EPS_UPDATE,
    BF16_RATIO,
    FLOAT32,
    FLOAT64,
    Mismatch,
    Tolerance,
    compare,
    deviations,
    distance,
    show,
)

__all__ = [
    "ADAMW_DEFAULT_EPS_UPDATE",
    "BF16_RATIO",
    "FLOAT32",
    "FLOAT64",
    "Mismatch",
    "Piece",
    "Run",
    "Step",
    "Tolerance",
    "compare",
    "deviations",
    "distance",
    "float32_upcasts_stay_float64",
    "join",
    "piece",
    "record",
    "show",
]
