"""Writes docs/models.md: Hugging Face families, verified under every ZeRO stage, and over tensor-parallel ranks.

    python scripts/models.py            (make models; some minutes for each part)
    python scripts/models.py zero       (one part again: zero or tensor; the other stays as it was recorded)
    python scripts/models.py tensor phi (of that part some families again)
    python scripts/models.py --render   (the page again from what was recorded)

Small random models are made from each class's own default config, tied and untied where it has both, and run by
`meshwright.verify`. What was found is recorded in bench/results/models.json; every figure of the page comes from there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
#: Over tensor- and data-parallel ranks: both stages that differ in what is gathered, whole sequences and cut ones.
TENSOR_STRATEGIES = ["dp=2 zero=1 tp=2", "dp=2 zero=3 tp=2", "dp=2 zero=3 tp=2 sequence_parallel=true"]
#: Those that publish a plan or whose plan is known, and then those that wait for one.
TENSOR_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "starcoder2", "olmo2"),
    *("granite", "cohere", "phi", "gpt2", "opt", "mixtral", "qwen3_moe", "glm", "smollm3", "cohere2", "helium"),
    *("nemotron", "olmo", "seed_oss", "exaone4", "ernie4_5", "gptj", "deepseek_v3"),
)
WITHOUT_PLAN = ("bloom", "mpt", "falcon", "t5", "bart", "bert", "roberta", "vit", "whisper")
#: Keys besides the family: 71 heads are divided by nothing, and a class does not fill in its own default.
KEYS: dict[str, dict[str, Any]] = {
    "falcon": {"hidden_size": 4096, "num_attention_heads": 64},
    "nemotron": {"num_key_value_heads": 8},
}
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


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the screen, moved by what it yields."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None)

        def tell(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield tell


def stamp() -> dict[str, str]:
    """When and with what a part was measured."""
    return {
        "date": date.today().isoformat(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def measure_zero() -> dict[str, Any]:
    """Every family under ZeRO, and what is refused whatever the strategy."""
    cases = [(family, tied) for family, kinds in FAMILIES.items() for tied in kinds]
    with progress() as tell:
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
        **stamp(),
        "rows": [row(*case, found[index * each : (index + 1) * each]) for index, case in enumerate(cases)],
        "further": [row(name, None, more[index * few : (index + 1) * few]) for index, name in enumerate(FURTHER)],
        "refused": refused,
    }


def measure_tensor(families: Sequence[str]) -> None:
    """Families over tensor-parallel ranks: under which strategies each is equal, and what is refused of it.

    The record is written after each family, so that what was done stays when it is interrupted.
    """
    with progress() as tell:
        for index, family in enumerate(families):
            tell(family, index, len(families))
            found, refused = _by_strategy(family)
            entry: dict[str, Any] = {**stamp(), "refused": refused}
            if found:
                entry |= row(family, None, found) | {"divided": list(found[0].copy.divided)}
            record = read()
            record["tensor"] = {**record.get("tensor", {}), family: entry}
            write(record)


def _by_strategy(family: str) -> tuple[list[Verified], dict[str, dict[str, str]]]:
    """All at once, where no strategy is refused; else one by one."""
    table = {**wanted(family, None), **KEYS.get(family, {})}
    try:
        return verify_all([table], TENSOR_STRATEGIES), {}
    except MeshwrightError:
        found, refused = [], {}
    for strategy in TENSOR_STRATEGIES:
        try:
            found.append(verify(table, strategy))
        except MeshwrightError as error:
            refused[strategy] = {"what": error.what, "why": error.why}
            if "sequence_parallel" not in strategy:
                break  # what cannot be divided with whole sequences is not with cut ones
    return found, refused


def read() -> dict[str, Any]:
    """What was recorded."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def write(record: dict[str, Any]) -> None:
    """Record it."""
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


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


def tensor(part: dict[str, Any]) -> str:
    """The tensor-parallel part: a table of those that are divided, and those that wait."""
    made = sorted({"on {date} with PyTorch {torch} and Transformers {transformers}".format(**e) for e in part.values()})
    cuts = ", ".join(f"`{text}`" for text in TENSOR_STRATEGIES)
    lines = [
        f"Measured {' and '.join(made)}, under {cuts}: the last cuts sequences, where that is possible. "
        "What has no plan, annotations divide: `meshwright verify MODEL --strategy tp=2 --sharding "
        "'layers.*.up=colwise' --sharding 'layers.*.down=rowwise'`.\n",
        "| family | class | divided by | verified | sequences cut | largest | where |",
        "|---|---|---|---|---|---|---|",
    ]
    waiting = {name: next(iter(part[name]["refused"].values())) for name in part if "kind" not in part[name]}
    for entry in (part[name] for name in (*TENSOR_FAMILIES, *WITHOUT_PLAN) if "kind" in part.get(name, {})):
        by = "the plan known here" if any("(known)" in words for words in entry["divided"]) else "its own plan"
        if not any("att" in words for words in entry["divided"]):
            by += ", attention whole"
        count = f"{len(entry['strategies'])} of {len(entry['strategies'])}" if entry["equal"] else "**not equal**"
        cut = next((f"refused: {told['why']}" for told in entry["refused"].values()), "yes")
        cells = [entry["family"], f"`{entry['kind']}`", by, count, cut]
        lines.append(f"| {' | '.join([*cells, share(entry['largest']), entry['worst']])} |")
    waits = "\n".join(f"- `{name}`: {told['what']}: {told['why']}" for name, told in waiting.items())
    return "\n".join(lines) + f"\n\nThese wait for plans that are derived from the model's code:\n\n{waits}"


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
    part = record["tensor"]
    every = [*record["rows"], *record["further"], *(entry for entry in part.values() if "kind" in entry)]
    refused = "\n".join(f"- `{name}`: {entry['what']}: {entry['why']}" for name, entry in record["refused"].items())
    parts = [
        HEAD.format(**record),
        f"## Tested families\n\nUnder {strategies}. The tests run every family under one of these.",
        table(record["rows"]),
        f"## Further families\n\nUnder {few}.",
        table(record["further"]),
        f"## Over tensor-parallel ranks\n\n{tensor(part)}",
        f"## How labels are weighted\n\nThe step's loss is the mean over all that count, on whatever rank they lie:\n\n"
        f"{labels(every)}",
        f"## What else was done\n\n{remarks(every)}",
        f"## What is refused\n\n{refused}\n- Batch norms: `SyncBatchNorm` trains ([how](runtime.md#loss)), but one "
        "process with the same microbatches has other rows to normalise over.",
        f"## Modules that were covered\n\n{classes(every)}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    asked, families = sys.argv[1:], (*TENSOR_FAMILIES, *WITHOUT_PLAN)
    known = ("zero", "tensor", "--render", *(families if "tensor" in asked else ()))
    if unknown := [word for word in asked if word not in known]:
        sys.exit(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    if not asked or "zero" in asked:
        write(read() | measure_zero())
    if not asked or "tensor" in asked:
        measure_tensor([name for name in families if name in asked] or families)
    PAGE.write_text(render(read()), encoding="utf-8")
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
