"""Writes docs/accuracy.md: predicted beside published, for every row of the tables in tests/published/data.

    python scripts/accuracy.py [FOLDER]      (make accuracy)

Text that explains the figures stands here; every figure is computed. Where bench/results/choice.json exists (made by
bench/choice.py), its tables are included.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

from meshwright.cost.published import DRAWS, Accuracy, PricedRow, Summary, accuracy
from meshwright.cost.published.baseline import MFU

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tests" / "published" / "data"
CHOICE = ROOT / "bench" / "results" / "choice.json"
CALIBRATE_ON = 3
FAR = 0.2
#: Rows for the memory alone, and a table of model states.
LEFT_OUT = ("more_rows", "zero_paper_table1_model_states")

HEAD = """# How accurate the predictions are

Made by `make accuracy` (`scripts/accuracy.py`): no figure on this page is typed in. Predicted step times and peaks
stand beside {rows} published rows of other people's runs, on machines this project never had.
`meshwright accuracy TABLE.csv` does the same for any table with these columns; cells may be empty.

- **What was fitted.** Constants of devices, links and kinds of kernels come from data sheets, hardware benchmarks, and
  one fit to two files: MosaicML llm-foundry and torchtitan's Llama 8B. All other files check. No constant belongs to a
  model, a table or a row.
- **Calibrated**: {count} rows of a file and stack set at most three factors (on all terms, on memory-bound work, on
  waiting for others), and the rest check. Rows are drawn {draws} times by a fixed seed; figures are medians over the
  draws. A stack is the software, its kind of kernels, the dtype of its matrix products, and the architecture of the
  devices that its kernels were written for.
- **Constant MFU** is the simplest model there is: every step runs at the mean utilisation of its device over the fitted
  rows ({mfu}; other devices: the mean of these).
- **Ranked** is the share of pairs of rows of one model on one cluster, whose published values differ by more than 5%,
  that are predicted in the right order (time per token).
- **Regret** is how much slower than the best measured strategy the one is that would have been chosen, over groups of
  several strategies for one model, cluster, batch and sequence.
"""

HONEST = """## What stays off, and why

- **What a table does not say.** Recompute, ZeRO and offload of Megatron-Bridge, batches of torchtune's offloading
  recipes, networks: what was assumed stands beside each row in `meshwright accuracy --json` (`assumed`).
- **Software of one moment.** The same run under several releases of Megatron-Bridge differs by {middle:.0%} in the
  middle and by {largest:.0%} at most ({groups} runs). One set of constants cannot follow that; calibration can.
- **Networks that are shared.** Some of InternEvo's and nanotron's runs over hundreds of GPUs lose to others what no
  model of the machine alone can know.
- **Offload through host memory.** The speed of the optimizer on the host depends on cores and memory channels that no
  table names.
- **Models with experts** are priced with evenly loaded experts and plain all-to-all; fused or 8-bit dispatch and
  overlapped experts are not described. They stand apart and count in no figure of dense models.
- **Not described at all:** low-rank adapters, quantised weights, 8-bit optimizers, state-space layers.
"""


def releases(found: Accuracy) -> tuple[int, float, float]:
    """Runs that were measured under several releases of their software: how many, and by how much they differ."""
    runs: dict[object, dict[str, float]] = {}
    for row in found.part(mixture=None):
        if row.time and row.setup and row.row.release:
            key = (row.alike, row.setup.stack, str(row.setup.strategy), row.time.tokens)
            runs.setdefault(key, {})[row.row.release] = row.time.published_s
    spreads = [max(run.values()) / min(run.values()) - 1 for run in runs.values() if len(run) > 1]
    return len(spreads), statistics.median(spreads or [0.0]), max(spreads, default=0.0)


def percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def time_line(name: str, told: Summary) -> str:
    error, base, fixed = told.errors, told.baseline, told.calibrated
    cells = [
        name,
        str(told.priced),
        str(told.rows_skipped),
        percent(error.median_absolute if error else None),
        percent(error.mean_absolute if error else None),
        percent(error.median_signed if error else None, signed=True),
        "-" if told.concordance is None else f"{told.concordance:.2f} of {told.pairs}",
        percent(told.regret.mean if told.regret else None),
        percent(base.median_absolute if base else None),
        percent(fixed.median_absolute if fixed else None),
        "-" if fixed is None or fixed.concordance is None else f"{fixed.concordance:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


TIME_HEAD = """| | rows | skipped | median | mean | bias | ranked | regret | constant MFU | calibrated | ranked |
|---|---|---|---|---|---|---|---|---|---|---|"""


def times(found: Accuracy) -> list[str]:
    checks = [file for file in found.files if found.time(found.part(file=file, fitted=False)).priced]
    lines = ["## Step time, dense models", "", TIME_HEAD]
    lines += [time_line(file, found.time(found.part(file=file, fitted=False))) for file in checks]
    lines.append(time_line("**all files that check**", found.time(found.part(fitted=False))))
    lines += [
        time_line(f"{file} (fitted)", found.time(found.part(file=file, fitted=True)))
        for file in found.files
        if found.part(file=file, fitted=True)
    ]
    lines += ["", "By stack:", "", TIME_HEAD]
    for stack in dict.fromkeys(row.stack for row in found.part() if row.stack is not None and row.time):
        rows = found.part(stack=stack)
        name = f"{rows[0].row.file}: {rows[0].setup.stack if rows[0].setup else ''}"
        lines.append(time_line(name, found.time(rows)))
    skipped = Counter(row.no_time for row in found.part() if row.has_time and row.time is None)
    lines += ["", "Skipped: " + "; ".join(f"{reason} ({count} rows)" for reason, count in skipped.items()) + ".", ""]
    return lines


def memories(found: Accuracy) -> list[str]:
    lines = ["## Peak memory", "", "| | rows | skipped | median | mean | bias | ranked |", "|---" * 7 + "|"]
    parts = [(file, found.part(file=file, mixture=None)) for file in found.files]
    for name, rows in [*parts, ("**all**", found.part(mixture=None))]:
        told = found.memory(rows)
        if told.errors is None:
            continue
        error = told.errors
        ranked = "-" if told.concordance is None else f"{told.concordance:.2f} of {told.pairs}"
        lines.append(
            f"| {name} | {told.priced} | {told.rows_skipped} | {percent(error.median_absolute)} | "
            f"{percent(error.mean_absolute)} | {percent(error.median_signed, signed=True)} | {ranked} |"
        )
    return [*lines, ""]


def mixtures(found: Accuracy) -> list[str]:
    lines = ["## Models with experts", "", TIME_HEAD]
    for file in found.files:
        rows = found.part(file=file, mixture=True)
        if rows and found.time(rows).priced:
            lines.append(time_line(file, found.time(rows)))
    return [*lines, ""]


def excluded(found: Accuracy) -> list[str]:
    lines = ["## Rows not to be trusted", "", "In none of the figures above.", ""]
    lines += ["| file | row | model | time | memory | why |", "|---|---|---|---|---|---|"]
    silent: Counter[tuple[str, str]] = Counter()
    for row in found.part(mixture=None, excluded=True):
        if row.time is None and row.memory is None:
            silent[row.row.file, row.excluded] += 1
            continue
        time = percent(row.time.error if row.time else None, signed=True)
        memory = percent(row.memory.error if row.memory else None, signed=True)
        lines.append(
            f"| {row.row.file} | {row.row.index} | {row.row.text('model')} | {time} | {memory} | {row.excluded} |"
        )
    lines += ["", *(f"- {file}: {count} more, not priced: {reason}" for (file, reason), count in silent.items()), ""]
    return lines


def far(found: Accuracy) -> list[str]:
    """The dense rows that are furthest off, and through which terms they spend their time."""
    rows = [row for row in found.part(fitted=False) if row.time and abs(row.time.error) > FAR]
    lines = [f"Rows of dense models that check and are more than {FAR:.0%} off:", ""]
    lines += ["| file | row | model | strategy | error | largest terms |", "|---|---|---|---|---|---|"]
    for row in rows:
        time = row.time
        if time is None or row.setup is None:
            continue
        terms = sorted(time.terms.items(), key=lambda item: -item[1])[:3]
        told = ", ".join(f"{name} {seconds / time.predicted_s:.0%}" for name, seconds in terms)
        lines.append(
            f"| {row.row.file} | {row.row.index} | {row.row.text('model')} | `{row.setup.strategy}` | "
            f"{time.error:+.0%} | {told} |"
        )
    return [*lines, ""]


def every_row(found: Accuracy) -> list[str]:
    lines = ["## Every row", ""]
    lines.append("Seconds per step and GiB; calibrated is the median over the draws that left the row out.")
    names = ("row", "model", "GPUs", "strategy", "published s", "predicted", "error", "calibrated", "published GiB")
    head = "| " + " | ".join((*names, "predicted")) + " |"
    for file in found.files:
        shown = [(place, row) for place, row in enumerate(found.rows) if row.row.file == file]
        shown = [(place, row) for place, row in shown if not row.excluded and (row.time or row.memory)]
        if shown:
            lines += ["", f"### {file}", "", head, "|---" * 10 + "|"]
            lines += [row_line(found, place, row) for place, row in shown]
    return [*lines, ""]


def row_line(found: Accuracy, place: int, row: PricedRow) -> str:
    time, memory = row.time, row.memory
    calibrated = found.calibrated_s.get(place)
    cells = [
        str(row.row.index),
        row.row.text("model"),
        f"{row.row.text('gpus')} {row.row.text('gpu_type')}",
        f"`{row.setup.strategy}`" if row.setup else "",
        f"{time.published_s:.4g}" if time else "-",
        f"{time.predicted_s:.4g}" if time else "-",
        percent(time.error if time else None, signed=True),
        percent(calibrated / time.published_s - 1 if time and calibrated else None, signed=True),
        f"{memory.published_bytes / 2**30:.1f}" if memory else "-",
        f"{memory.predicted_bytes / 2**30:.1f}" if memory else "-",
    ]
    return "| " + " | ".join(cells) + " |"


def page(found: Accuracy) -> str:
    mfu = ", ".join(f"{name} {share:.0%}" for name, share in MFU.items())
    groups, middle, largest = releases(found)
    lines = [HEAD.format(rows=len(found.rows), count=CALIBRATE_ON, draws=DRAWS, mfu=mfu)]
    lines += [*times(found), *memories(found), HONEST.format(groups=groups, middle=middle, largest=largest)]
    lines += [*far(found), *mixtures(found), *excluded(found)]
    if CHOICE.exists():
        rendered = subprocess.run(
            [sys.executable, str(ROOT / "bench" / "choice.py"), "--markdown"],
            capture_output=True,
            text=True,
            check=True,
        )
        lines += [rendered.stdout.strip(), ""]
    lines += every_row(found)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLES
    tables = sorted(path for path in folder.glob("*.csv") if path.stem not in LEFT_OUT)
    found = accuracy(tables, calibrate_on=CALIBRATE_ON)
    out = ROOT / "docs" / "accuracy.md"
    out.write_text(page(found), encoding="utf-8")
    told = found.time(found.part(fitted=False))
    if told.errors:
        print(f"{out}: {told.priced} rows check the step time, median error {told.errors.median_absolute:.1%}")


if __name__ == "__main__":
    main()
