"""Rows priced: predicted beside published, time and memory, or why not."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from meshwright.cost.estimate import Estimate
from meshwright.cost.published.baseline import baseline_s
from meshwright.cost.published.compare import peak_bytes
from meshwright.cost.published.flops import model_flops
from meshwright.cost.published.metrics import Point
from meshwright.cost.published.roles import distrust, fitted
from meshwright.cost.published.rows import PublishedRow, Unpriced
from meshwright.cost.published.setups import Setup
from meshwright.cost.published.sources import setup_of
from meshwright.cost.published.speed import COLUMNS, disagreement, published_steps
from meshwright.errors import MeshwrightError

__all__ = ["PricedMemory", "PricedRow", "PricedTime", "price_rows"]


@dataclass(frozen=True, kw_only=True)
class PricedTime:
    """A step as published (by `column`) and as predicted, by its terms and by a constant MFU, in seconds.

    `tokens` are those of a step, `disagrees` what other columns of the row say.
    """

    published_s: float
    predicted_s: float
    baseline_s: float
    terms: dict[str, float]
    tokens: int
    column: str
    disagrees: str = ""

    @property
    def error(self) -> float:
        """(predicted - published) / published."""
        return self.predicted_s / self.published_s - 1


@dataclass(frozen=True, kw_only=True)
class PricedMemory:
    """The peak of the worst rank as published and as predicted, in bytes as the stack's figure counts them."""

    published_bytes: int
    predicted_bytes: int

    @property
    def error(self) -> float:
        """(predicted - published) / published."""
        return self.predicted_bytes / self.published_bytes - 1


@dataclass(frozen=True, kw_only=True)
class PricedRow:
    """A row, what it ran, and both predictions, or why there is none.

    `no_time` and `no_memory` are "" where there is a prediction, and where nothing was published (`has_time`,
    `has_memory`). `excluded` says why the row is not to be trusted, "" where it is; `fitted` rows were used to fit
    constants; `mixture` models have experts.
    """

    row: PublishedRow
    setup: Setup | None = None
    time: PricedTime | None = None
    memory: PricedMemory | None = None
    no_time: str = ""
    no_memory: str = ""
    has_time: bool = False
    has_memory: bool = False
    excluded: str = ""
    fitted: bool = False
    parameters: int = 0

    @property
    def mixture(self) -> bool:
        """Whether its model has experts; of a row that cannot be read, whether it lays experts over ranks."""
        return self.setup.mixture if self.setup is not None else (self.row.maybe("ep") or 1) > 1

    @property
    def alike(self) -> Hashable:
        """Model and cluster."""
        row = self.row
        return row.file, row.text("model"), self.parameters, row.text("gpu_type"), row.text("gpus")

    @property
    def stack(self) -> Hashable:
        """What shares software constants: the file, the stack, and whether there are experts."""
        return None if self.setup is None else (self.row.file, self.setup.stack, self.mixture)

    def time_point(self, predicted_s: float | None = None) -> Point:
        """The time per token, predicted as given or by the model."""
        assert self.time is not None
        assert self.setup is not None
        job, seconds = self.setup.job, self.time.predicted_s if predicted_s is None else predicted_s
        fixed = (self.alike, job.global_batch, job.sequence, self.setup.stack, self.row.release)
        return Point(
            predicted=seconds / self.time.tokens,
            published=self.time.published_s / self.time.tokens,
            alike=self.alike,
            group=fixed,
            choice=str(self.setup.strategy),
        )

    def memory_point(self) -> Point:
        """The peak."""
        assert self.memory is not None
        return Point(predicted=self.memory.predicted_bytes, published=self.memory.published_bytes, alike=self.alike)


def price_rows(rows: Iterable[PublishedRow]) -> tuple[PricedRow, ...]:
    """Every row priced, or with the reason why it is not."""
    pricer = _Pricer()
    return tuple(pricer.price(row) for row in rows)


class _Pricer:
    """Prices rows; what several rows ran alike is priced once."""

    def __init__(self) -> None:
        self._times: dict[Hashable, tuple[float, dict[str, float]]] = {}
        self._estimates: dict[Hashable, Estimate] = {}
        self._flops: dict[Hashable, tuple[int, int]] = {}

    def price(self, row: PublishedRow) -> PricedRow:
        """A row, both ways."""
        has_time, has_memory = _has_time(row), row.peak_bytes is not None
        excluded = distrust(row)
        try:
            setup = setup_of(row)
            flops, parameters = self._whole(setup)
            time, no_time = self._time(setup, flops) if has_time else (None, "")
            memory, no_memory = self._memory(setup) if has_memory else (None, "")
        except (MeshwrightError, Unpriced) as error:
            reason = error.what if isinstance(error, MeshwrightError) else str(error)
            return PricedRow(
                row=row,
                no_time=reason if has_time else "",
                no_memory=reason if has_memory else "",
                has_time=has_time,
                has_memory=has_memory,
                excluded=excluded,
                fitted=fitted(row),
            )
        return PricedRow(
            row=row,
            setup=setup,
            time=time,
            memory=memory,
            no_time=no_time,
            no_memory=no_memory,
            has_time=has_time,
            has_memory=has_memory,
            excluded=excluded,
            fitted=fitted(row),
            parameters=parameters,
        )

    def _whole(self, setup: Setup) -> tuple[int, int]:
        """Model flops of a sequence, and parameters."""
        key = (_model_key(setup), setup.job.sequence, setup.job.compute_dtype)
        if key not in self._flops:
            whole = setup.model(whole=True)
            self._flops[key] = model_flops(whole), whole.parameters
        return self._flops[key]

    def _time(self, setup: Setup, flops: int) -> tuple[PricedTime | None, str]:
        from meshwright.cost.time import step_time

        if setup.no_time:
            return None, setup.no_time
        steps = published_steps(setup)
        if not steps:
            return None, "what its TFLOP/s or MFU count cannot be turned into seconds"
        key = _key(setup)
        try:
            if key not in self._times:
                found = step_time(setup.model(), setup.cluster, setup.job, setup.strategy, convention=setup.convention)
                self._times[key] = found.step_s, dict(found.terms)
        except MeshwrightError as error:
            return None, error.what
        predicted, terms = self._times[key]
        column, published = next(iter(steps.items()))
        return PricedTime(
            published_s=published,
            predicted_s=predicted,
            baseline_s=baseline_s(setup, flops * setup.job.global_batch),
            terms=terms,
            tokens=setup.tokens,
            column=column,
            disagrees=disagreement(steps),
        ), ""

    def _memory(self, setup: Setup) -> tuple[PricedMemory | None, str]:
        published = setup.row.peak_bytes
        if setup.no_memory or published is None:
            return None, setup.no_memory
        key = _key(setup)
        try:
            if key not in self._estimates:
                self._estimates[key] = setup.estimate()
        except MeshwrightError as error:
            return None, error.what
        found = peak_bytes(self._estimates[key], setup)
        return PricedMemory(published_bytes=published, predicted_bytes=found), ""


def _has_time(row: PublishedRow) -> bool:
    return not row.out_of_memory and any((row.maybe(column) or 0) > 0 for column in COLUMNS)


def _model_key(setup: Setup) -> Hashable:
    cells = setup.row.cells
    names = ("model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "pp")
    return setup.row.file, setup.row.section, *(cells.get(name, "") for name in names)


def _key(setup: Setup) -> Hashable:
    """What decides a prediction."""
    return (
        _model_key(setup),
        repr(setup.cluster),
        repr(setup.job),
        str(setup.strategy),
        setup.strategy.stages,
        repr(setup.convention),
    )
