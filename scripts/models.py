"""Writes docs/models.md: Hugging Face families, each verified under every ZeRO stage on 2 and 3 ranks.

    python scripts/models.py            (make models; some minutes)
    python scripts/models.py --render   (the page again from what was recorded)

Small random models are made from each class's own default config, tied and untied where it has both, and run by
`meshwright.verify`. What was found is recorded in bench/results/models.json; every figure of the page comes from there.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from meshwright.errors import MeshwrightError
from meshwright.measure.verify import verify, verify_all
from meshwright.report.verified_view import share
from meshwright.spec.verified import Verified

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECORD = ROOT / "docs" / "models.md", ROOT / "bench" / "results" / "models.json"
STRATEGIES = [f"dp={dp} zero={zero}" for dp in (2, 3) for zero in (0, 1, 2, 3)]
#: Fewer for those that the tests do not run.
FURTHER_STRATEGIES = ["dp=2 zero=3", "dp=3 zero=2"]
#: Tied and untied, where a class has both.
BOTH = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "t5", "bert")
FAMILIES: dict[str, tuple[bool | None, ...]] = {
    **dict.fromkeys(BOTH, (False, True)),
    "vit": (None,),
    "whisper": (None,),
}
FURTHER = ("mixtral", "qwen3_moe", "deepseek_v3", "gemma3_text", "phi", "bloom", "mpt", "falcon", "bart", "roberta")
#: What is refused, and by whom.
REFUSED = ("clip", "wav2vec2", "mamba", "a_model_of_ours")

HEAD = """# Models that were verified

Made by `make models` (`scripts/models.py`) on {date} with PyTorch {torch} and Transformers {transformers}: no
figure on this page is typed in. Each family is a small random model of its class's own default config, unmodified, with
its own loss. It was trained for three steps with SGD (momentum) and three with AdamW in float64, clipped, on padded
sequences with unequal numbers of labels that count, by each strategy and in one process: by the engine with the same
microbatches, and in plain PyTorch on the whole batch. *Largest* is the largest deviation of any loss, norm, gradient or
update as a part of what is allowed ([the bounds](verify.md#what-is-compared)): above 1 it would not be verified.

Your own model, whatever its sizes: `meshwright verify MODEL --strategy 'dp=2 zero=3'` ([how](verify.md)).
"""


def wanted(family: str, tied: bool | None) -> dict[str, Any]:
    """The keys of a config; all others are its class's defaults."""
    return {"model_type": family, **({} if tied is None else {"tie_word_embeddings": tied})}


def row(family: str, tied: bool | None, found: list[Verified]) -> dict[str, Any]:
    """What is kept of a family's verifications."""
    copy, worst = found[0].copy, max(found, key=lambda entry: entry.largest)
    return {
        "family": family,
        "tied": tied,
        "kind": copy.kind,
        "classes": list(copy.classes),
        "parameters": copy.parameters,
        "blocks": copy.blocks,
        "labels": copy.labels,
        "notes": list(copy.notes),
        "strategies": {entry.strategy: entry.largest for entry in found},
        "equal": all(entry.equal for entry in found),
        "largest": worst.largest,
        "worst": f"{worst.worst}, {worst.strategy}" if worst.equal else str(worst),
    }


def measure() -> dict[str, Any]:
    """Run everything."""
    cases = [(family, tied) for family, kinds in FAMILIES.items() for tied in kinds]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None)

        def tell(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        found = verify_all([wanted(*case) for case in cases], STRATEGIES, progress=tell)
        more = verify_all([wanted(family, None) for family in FURTHER], FURTHER_STRATEGIES, progress=tell)
    refused = {}
    for family in REFUSED:
        try:
            verify({"model_type": family}, "dp=2")
        except MeshwrightError as error:
            refused[family] = {"what": error.what, "why": error.why}
    each, few = len(STRATEGIES), len(FURTHER_STRATEGIES)
    return {
        "date": date.today().isoformat(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "rows": [row(*case, found[index * each : (index + 1) * each]) for index, case in enumerate(cases)],
        "further": [row(name, None, more[index * few : (index + 1) * few]) for index, name in enumerate(FURTHER)],
        "refused": refused,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a table."""
    lines = [
        "| family | class | head | blocks | verified | largest | where |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in rows:
        tied = {True: "tied", False: "untied", None: ""}[entry["tied"]]
        count = f"{len(entry['strategies'])} of {len(entry['strategies'])}" if entry["equal"] else "**not equal**"
        cells = [entry["family"], f"`{entry['kind']}`", tied, str(entry["blocks"]), count, share(entry["largest"])]
        lines.append(f"| {' | '.join([*cells, entry['worst']])} |")
    return "\n".join(lines)


def labels(rows: list[dict[str, Any]]) -> str:
    """How labels are weighted, by what is counted."""
    kinds: dict[str, list[str]] = {}
    for entry in rows:
        kinds.setdefault(entry["labels"], []).append(entry["family"])
    return "\n".join(f"- {what}: {', '.join(dict.fromkeys(names))}" for what, names in kinds.items())


def classes(rows: list[dict[str, Any]]) -> str:
    """Which modules were covered."""
    found: dict[str, str] = {}
    for entry in rows:
        found.setdefault(entry["family"], ", ".join(f"`{name}`" for name in entry["classes"]))
    return "\n".join(f"- {family}: {names}" for family, names in found.items())


def remarks(rows: list[dict[str, Any]]) -> str:
    """What was done to the models besides making them small."""
    kinds: dict[str, list[str]] = {}
    for entry in rows:
        for note in entry["notes"]:
            kinds.setdefault(note, []).append(entry["family"])
    return "\n".join(f"- {note}: {', '.join(dict.fromkeys(names))}" for note, names in kinds.items())


def render(record: dict[str, Any]) -> str:
    """The page."""
    strategies = ", ".join(f"`{text}`" for text in record["rows"][0]["strategies"])
    few = ", ".join(f"`{text}`" for text in record["further"][0]["strategies"])
    every = [*record["rows"], *record["further"]]
    refused = "\n".join(f"- `{name}`: {entry['what']}: {entry['why']}" for name, entry in record["refused"].items())
    parts = [
        HEAD.format(**record),
        f"## Tested families\n\nUnder {strategies}. The tests run every family under one of these.",
        table(record["rows"]),
        f"## Further families\n\nUnder {few}.",
        table(record["further"]),
        f"## How labels are weighted\n\nThe step's loss is the mean over all that count, on whatever rank they lie:\n\n"
        f"{labels(every)}",
        f"## What else was done\n\n{remarks(every)}",
        f"## What is refused\n\n{refused}\n- Batch norms: `SyncBatchNorm` trains ([how](runtime.md#loss)), but one "
        "process with the same microbatches has other rows to normalise over.",
        f"## Modules that were covered\n\n{classes(every)}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    if "--render" not in sys.argv[1:]:
        record = measure()
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
