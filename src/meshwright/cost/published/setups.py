"""What a published row ran, as far as all sources have it in common: degrees, batch, dtypes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.published.flops import Counting
from meshwright.cost.published.machines import machines_of
from meshwright.cost.published.rows import PublishedRow, Unpriced
from meshwright.spec import Cluster, Job, Layout, ModelSpec, Strategy
from meshwright.spec.conventions import Convention, ProductDtype
from meshwright.spec.families import DecoderModel, Described
from meshwright.spec.job import Dtype, Recompute

__all__ = ["Run", "Setup", "fit_stages", "mixed_precision", "product_dtype", "read_run"]

#: Architectures by the start of a device's name.
_FAMILIES = (
    (r"V100", "Volta"),
    (r"A\d|RTX ?3|RTX ?A", "Ampere"),
    (r"H\d|GH", "Hopper"),
    (r"L4|RTX ?4", "Ada"),
    (r"B\d|GB|RTX ?5", "Blackwell"),
    (r"MI", "CDNA"),
)
#: Times the stages: microbatches enough to fill a pipeline, and so many that its bubble is small.
_FILLED, _MANY = 2, 8
#: Tokens of a microbatch where no table says.
_USUAL_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a published row ran.

    `convention` declares how its stack holds bytes; `plain` tells its kernels and what the row itself says (recompute,
    chunked loss), and nothing of the stack's bytes. `counting` says what its source counts as flops. `assumed` lists
    what the row does not say and what was taken. `no_memory` and `no_time` say why a prediction of the peak or of the
    step would be a guess, "" where it is not.
    """

    row: PublishedRow
    described: Described
    cluster: Cluster
    job: Job
    strategy: Strategy
    convention: Convention
    plain: Convention
    counting: Counting = field(default_factory=Counting)
    assumed: tuple[str, ...] = ()
    no_memory: str = ""
    no_time: str = ""

    @property
    def mixture(self) -> bool:
        """Whether the model has experts."""
        return isinstance(self.described, DecoderModel) and self.described.experts > 0

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.job.global_batch * self.job.sequence

    @property
    def stack(self) -> str:
        """The software that ran it: what calibration holds together.

        Kernels are written for one architecture of devices and one dtype, so these belong to it.
        """
        told = self.convention
        device = self.cluster.nodes[0].device.name
        family = next((name for pattern, name in _FAMILIES if re.match(pattern, device)), device)
        parts = (told.stack, told.product_dtype, family)
        return f"{told.name} ({', '.join(part for part in parts if part)})"

    def model(self, *, declared: bool = True, whole: bool = False) -> ModelSpec:
        """The model as a rank sees it; `whole`: as one rank would that held all of it.

        Raises:
            ConfigError: it cannot be laid out so.
        """
        told = self.convention if declared else self.plain
        if whole:
            layout = Layout(sequence=self.job.sequence, compute_dtype=self.job.compute_dtype, stack=told.stack)
        else:
            layout = Layout.of(replace(self.job, stack=told.stack), self.strategy, attention=told.attention)
        return self.described.at(layout)

    def estimate(self, *, declared: bool = True) -> Estimate:
        """Its predicted memory, with or without the bytes of its stack declared.

        Raises:
            ConfigError: the model cannot be laid out so.
        """
        told, strategy = (self.convention if declared else self.plain), self.strategy
        # Once a pipeline is full, more microbatches find what those before did.
        count = min(strategy.microbatches(self.job.global_batch), _FILLED * strategy.pp)
        job = replace(self.job, stack=told.stack, global_batch=count * strategy.microbatch * strategy.dp)
        return estimate(self.model(declared=declared), self.cluster, job, strategy, convention=told)


@dataclass(kw_only=True)
class Run:
    """Degrees and batch of a row, before they become a `Strategy` and a `Job`. `options` are the strategy's fields.

    `network` is what a node has, where its document tells and the row does not.
    """

    row: PublishedRow
    options: dict[str, Any]
    gpus: int
    global_batch: int
    sequence: int
    assumed: list[str]
    network: str = ""
    no_memory: str = ""
    no_time: str = ""

    def setup(
        self,
        described: Described,
        told: Convention,
        *,
        job: Job | None = None,
        plain: Convention | None = None,
        counting: Counting | None = None,
    ) -> Setup:
        """The setup with this model and stack; the job is in mixed precision unless it is given."""
        machines = machines_of(self.row, self.gpus, self.network)
        told = replace(told, product_dtype=product_dtype(self.row))
        return Setup(
            row=self.row,
            described=described,
            cluster=machines.cluster,
            job=job or mixed_precision(self),
            strategy=Strategy(**self.options),
            convention=told,
            plain=plain or told.without_bytes(),
            counting=counting or Counting(),
            assumed=(*self.assumed, *machines.assumed),
            no_memory=self.no_memory,
            no_time=self.no_time,
        )


def mixed_precision(run: Run) -> Job:
    """Float32 weights and gradients, bf16 compute; fp16 or float32 compute where the row names nothing else."""
    precision = run.row.text("precision").lower()
    halves = "bf16" in precision or "fp8" in precision or "fp4" in precision
    if not halves and re.search(r"fp32|float32|tf32", precision) and "16" not in precision:
        return Job(global_batch=run.global_batch, sequence=run.sequence)
    old = "V100" in run.row.text("gpu_type") or (not halves and re.search(r"fp16|float16|half", precision))
    dtype: Dtype = "float16" if old else "bfloat16"
    return Job(global_batch=run.global_batch, sequence=run.sequence, compute_dtype=dtype)


def product_dtype(row: PublishedRow) -> ProductDtype:
    """The dtype of a layer's matrix products where the row names one of 8 or 4 bits."""
    precision = row.text("precision").lower()
    if re.search(r"fp8|float8|mxfp8|e4m3", precision):
        return "float8"
    return "float4" if re.search(r"fp4|float4", precision) else ""


def read_run(
    row: PublishedRow, *, zero: int | None = None, sequence: int | None = None, global_batch: int | None = None
) -> Run:
    """Degrees and batch of a row.

    Args:
        zero: where the stack knows better than the column.
        sequence, global_batch: where the column is empty.

    Raises:
        Unpriced: one of them is not published, or they contradict each other.
    """
    assumed: list[str] = []
    tp, pp, cp = (max(1, row.count(name, 1)) for name in ("tp", "pp", "cp"))
    gpus = row.count("gpus", row.count("dp", 0) * tp * pp * cp)
    if gpus < 1:
        raise Unpriced("gpus is not published")
    if gpus % (tp * pp * cp) and not row.count("dp", 0):
        raise Unpriced(f"tp x pp x cp is {tp * pp * cp}, which does not divide the {gpus} GPUs")
    dp = row.count("dp", 0) or gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise Unpriced(f"dp x tp x pp x cp is {dp * tp * pp * cp}, but it ran on {gpus} GPUs")
    run = Run(
        row=row,
        options={"dp": dp, "tp": tp, "pp": pp, "cp": cp, "recompute": _recompute(row, assumed)},
        gpus=gpus,
        global_batch=0,
        sequence=row.count("seq", sequence),
        assumed=assumed,
    )
    run.options["zero"] = _zero(run, zero)
    _read_batch(run, global_batch)
    if pp > 1:
        chunks = row.count("vp", 1)
        interleaved = chunks > 1 and (run.global_batch // (dp * run.options["microbatch"])) % pp == 0
        run.options |= {"schedule": "interleaved-1f1b", "virtual_stages": chunks} if interleaved else {}
        run.options.setdefault("schedule", "1f1b")
    return run


def _read_batch(run: Run, known: int | None) -> None:
    """Microbatch and global batch; what is missing is taken from the other, or as it is usual."""
    row, dp, pp = run.row, run.options["dp"], run.options["pp"]
    batch, microbatch = row.count("global_batch", known or 0), row.count("micro_batch", 0)
    steps = re.search(r"(?:grad(?:ient)?[ _]accum[a-z]*|GAS|acc(?:um)?)[ =:]*([0-9]+)", row.text("notes"))
    if not batch and known is None and microbatch and steps:
        batch = dp * microbatch * max(1, int(steps[1]))
    if not microbatch:
        most = max(1, _USUAL_TOKENS // run.sequence) if pp == 1 else 1
        share = max(1, batch // dp) if batch else most
        microbatch = next(size for size in range(min(most, share), 0, -1) if share % size == 0)
        run.assumed.append(f"microbatches of {microbatch}")
        run.no_memory = run.no_memory or "micro_batch is not published"
    if not batch:
        batch = dp * microbatch * (_MANY * pp if pp > 1 else 1)
        run.assumed.append(f"global batch {batch}" + (", enough to fill the pipeline" if pp > 1 else ""))
        if pp > 1 and not any(row.text(name) for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")):
            run.no_time = "global_batch is not published"
    elif batch % (dp * microbatch):
        even = max(1, round(batch / (dp * microbatch))) * dp * microbatch
        if abs(even - batch) > 0.1 * batch:
            raise Unpriced(f"dp {dp} x micro_batch {microbatch} does not divide global_batch {batch}")
        run.assumed.append(f"global batch {even}, the nearest to {batch} that dp x micro_batch divides")
        batch = even
    run.options["microbatch"], run.global_batch = microbatch, batch


#: Words of tables for ZeRO stages, the most telling first.
_ZERO_WORDS = (
    (3, r"zero-?_?3|zero stage 3|stage ?3|\bfsdp|hsdp|full[_ ]shard|fully[_ ]shard"),
    (2, r"zero-?_?2|zero stage 2|stage ?2|shard[_ ]grad"),
    (1, r"zero-?_?1|zero stage 1|stage ?1|dist(ributed)?[-_ ]opt"),
    (0, r"zero-?_?0|\bddp\b|replicat"),
)


def _zero(run: Run, known: int | None) -> int:
    """The ZeRO stage: known, in its column as a number or a word, or in the notes; else ZeRO-1 where ranks share."""
    if known is not None:
        return known
    text = run.row.text("zero").lower()
    if re.fullmatch(r"[0-3](\.0*)?", text):
        return int(text[0])
    for words in (text, run.row.text("notes").lower()):
        for stage, pattern in _ZERO_WORDS:
            if re.search(pattern, words):
                return stage
    if text in ("none", "no", "false", "off", "-"):
        return 0
    usual = 1 if run.options["dp"] > 1 else 0
    if usual:
        run.assumed.append(f"zero={usual}")
        run.no_memory = "zero is not published"
    return usual


_NOT = ("none", "no", "false", "off", "0", "-", "na", "n/a")


def _recompute(row: PublishedRow, assumed: list[str]) -> Recompute:
    text = row.text("recompute").lower()
    if not text:
        if row.has("activation checkpoint", "gradient checkpoint", "full recompute", "recompute=full", "full AC"):
            assumed.append("full recompute, by its notes")
            return "full"
        return "none"
    if text in _NOT or text.startswith("no "):
        return "none"
    if re.search(r"selective|sac\b|core[_ ]attn|attention", text):
        return "selective"
    return "full"


def fit_stages(run: Run, described: Described) -> None:
    """Fewer virtual stages where there are more stages than layers, so that each has one.

    Elsewhere embedding and loss may have stages of their own; here a number is taken that spreads layers, embedding and
    loss as evenly, where there is one.
    """
    if not isinstance(described, DecoderModel) or run.options["pp"] == 1:
        return
    layers, pp, chunks = len(described.layers), run.options["pp"], run.options.get("virtual_stages", 1)
    if chunks == 1 or pp * chunks <= layers or layers < pp:
        return
    most = layers // pp
    even = [fewer for fewer in range(most, 0, -1) if not layers % (pp * fewer) or not (layers + 2) % (pp * fewer)]
    fewer = even[0] if even else most
    run.assumed.append(f"{fewer} virtual stages instead of {chunks}, so that each has a layer")
    run.options["virtual_stages"] = fewer
    if fewer == 1:
        run.options["schedule"] = "1f1b"
