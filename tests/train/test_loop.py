"""The training loop on several ranks: what is shown, which samples are read, how a run goes on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from meshwright.train.folder import RunFolder
from tests.harness.ranks import RankError, run_one, run_ranks
from tests.train.tiny import RankRun, corpus, metrics, rank_of, run_folder

STEPS = 8
BATCH = 12


def test_S1_one_line_per_step_from_rank_0_with_the_loss_of_one_process(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus")
    options = {"dtype": "float64", "steps": 6, "evaluate_every": 3, "checkpoint_every": 6}
    run_folder(tmp_path / "one", "dp=1 microbatch=3", data, **options)
    run_folder(tmp_path / "four", "dp=4 zero=2 microbatch=3", data, **options)
    run_one(rank_of, tmp_path / "one")
    first, *others = run_ranks(4, rank_of, tmp_path / "four")
    assert [other.screen for other in others] == ["", "", ""]
    lines = [line for line in first.screen.splitlines() if line.startswith("step ") and "loss" in line]
    assert [line for line in lines if "validation" not in line] == [line for line in lines if "/6" in line]
    alone, together = metrics(tmp_path / "one"), metrics(tmp_path / "four")
    assert [line["step"] for line in together] == [1, 2, 3, 4, 5, 6]
    for shown, expected, line in zip((line for line in lines if "/6" in line), alone, together, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9)
        assert f"loss {expected['loss']:.4f}" in shown
    assert together[-1]["validation_loss"] == pytest.approx(alone[-1]["validation_loss"], rel=1e-9)
    assert "validation_loss" in together[2]
    assert "validation_loss" not in together[3]
    # The losses of single ranks differ, so that showing one of them would have been found.
    assert len({tuple(first.windows[1]), *(tuple(other.windows[1]) for other in others)}) == 4


def read_by(runs: list[RankRun], steps: range) -> tuple[list[int], list[bytes]]:
    """Sample numbers and windows of all ranks, in the order of the global batches."""
    numbers = [number for step in steps for run in runs for number in run.numbers[step]]
    windows = [window for step in steps for run in runs for window in run.windows[step]]
    return numbers, windows


def test_G9_every_sample_once_over_two_interruptions_on_other_worlds(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus")
    options = {"steps": STEPS, "evaluate_every": 100, "checkpoint_every": 2}
    run_folder(tmp_path / "whole", "dp=1 microbatch=4", data, **options)
    whole = read_by([run_one(rank_of, tmp_path / "whole")], range(1, STEPS + 1))
    assert whole[0] == list(range(STEPS * BATCH))

    place = tmp_path / "broken"
    folder = run_folder(place, "dp=2 zero=1 microbatch=2", data, **options)
    first = run_ranks(2, rank_of, place, None, 5)
    run_folder(place, "dp=4 zero=3 microbatch=1", data, **options)
    second = run_ranks(4, rank_of, place, folder.checkpoint(4), 7)
    run_folder(place, "dp=3 zero=0 microbatch=4", data, **options)
    third = run_ranks(3, rank_of, place, folder.checkpoint(6))
    assert [run.interrupted for run in (*first, *second, *third)] == [True] * 6 + [False] * 3

    parts = [read_by(first, range(1, 5)), read_by(second, range(5, 7)), read_by(third, range(7, STEPS + 1))]
    assert [number for numbers, _ in parts for number in numbers] == whole[0]
    assert [window for _, windows in parts for window in windows] == whole[1]
    assert [line["step"] for line in metrics(place)] == list(range(1, STEPS + 1))
    assert [line["samples_seen"] for line in metrics(place)] == [BATCH * step for step in range(1, STEPS + 1)]
    for line, expected in zip(metrics(place), metrics(tmp_path / "whole"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["learning_rate"] == pytest.approx(expected["learning_rate"], rel=1e-12)


@pytest.mark.parametrize("strategy", ["dp=2 zero=0 microbatch=3", "dp=2 zero=3 microbatch=2"])
def test_resume_on_the_same_layout_is_exact_bit_for_bit(tmp_path: Path, strategy: str) -> None:
    data = corpus(tmp_path / "corpus")
    options = {"steps": 6, "evaluate_every": 2, "checkpoint_every": 3}
    whole = run_folder(tmp_path / "whole", strategy, data, **options)
    run_ranks(2, rank_of, tmp_path / "whole")
    broken = run_folder(tmp_path / "broken", strategy, data, **options)
    run_ranks(2, rank_of, tmp_path / "broken", None, 5)
    run_ranks(2, rank_of, tmp_path / "broken", broken.checkpoint(3))
    keys = ("step", "loss", "grad_norm", "clipped_norm", "learning_rate", "samples_seen")
    exact = [[line.get(key) for key in (*keys, "validation_loss")] for line in metrics(tmp_path / "whole")]
    assert [[line.get(key) for key in (*keys, "validation_loss")] for line in metrics(tmp_path / "broken")] == exact
    assert tensors(whole, 6) == tensors(broken, 6)


def tensors(folder: RunFolder, step: int) -> list[tuple[str, str]]:
    """Name and hash of every stored piece, whichever rank wrote it."""
    found = []
    for file in folder.checkpoint(step).glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            found.append((name, hashlib.sha256(tensor.numpy().tobytes()).hexdigest()))
    return sorted(found)


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "run",
        "dp=1 microbatch=12",
        corpus(tmp_path / "corpus"),
        steps=5,
        checkpoint_every=1,
        keep_checkpoints=2,
    )
    run_one(rank_of, folder.path)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-000004", "step-000005"]
    assert folder.read_result()["checkpoint"] == "step-000005"
    assert folder.read_result()["steps"] == 5


def test_changed_optimizer_numbers_hold_from_the_resume_on(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus")
    folder = run_folder(tmp_path / "run", "dp=1 microbatch=12", data, steps=4, checkpoint_every=2)
    run_one(rank_of, folder.path, None, 4)
    text = folder.plan.read_text()
    folder.plan.write_text(text.replace("learning_rate = 0.003", "learning_rate = 0.5"))
    run_one(rank_of, folder.path, folder.checkpoint(2))
    rates = [line["learning_rate"] for line in metrics(folder.path)]
    assert rates == pytest.approx([0.0015, 0.003, 0.5, 0.0])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rope_theta = 10000.0", "rope_theta = 500.0", "rope_theta was 10000.0 and is 500.0 now"),
        ("hidden_size = 16", "hidden_size = 32", "another model"),
        ('name = "adamw"', 'name = "sgd"', "optimizer was adamw and is sgd now"),
        ("seed = 3", "seed = 4", "seed was 3 and is 4 now"),
        ("sequence = 16", "sequence = 8", "sequence was 16 and is 8 now"),
    ],
)
def test_resume_of_another_run_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    data = corpus(tmp_path / "corpus")
    folder = run_folder(tmp_path / "run", "dp=1 microbatch=12", data, steps=2, checkpoint_every=1)
    run_one(rank_of, folder.path)
    folder.plan.write_text(folder.plan.read_text().replace(old, new))
    with pytest.raises(RankError, match=says):
        run_one(rank_of, folder.path, folder.checkpoint(1))


def test_resume_on_a_changed_corpus_is_refused(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus")
    folder = run_folder(tmp_path / "run", "dp=1 microbatch=12", data, steps=2, checkpoint_every=1)
    run_one(rank_of, folder.path)
    (data / "03.txt").write_bytes(b"x" * 5000)
    with pytest.raises(RankError, match=r"bytes was .* and is .* now"):
        run_one(rank_of, folder.path, folder.checkpoint(1))


def other_text(path: Path) -> str:
    """Rank 1 sees another corpus than rank 0, as on a machine with files of its own."""
    import torch.distributed as dist

    from meshwright.errors import DataError
    from meshwright.train.data import ByteCorpus
    from meshwright.train.loop import _require_same_corpus

    corpus = ByteCorpus(str(path / "corpus" if dist.get_rank() == 0 else path / "other"), sequence=16)
    try:
        _require_same_corpus(corpus)
    except DataError as error:
        return str(error)
    return ""


def test_ranks_that_see_different_text_all_say_so(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus")
    corpus(tmp_path / "other", files=6)
    for text in run_ranks(3, other_text, tmp_path):
        assert "rank 0 and rank 1 see different text" in text
        assert "7 files" in text
        assert "6 of" in text


def test_few_windows_leave_no_validation(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus", files=1, size=60)
    folder = run_folder(tmp_path / "run", "dp=2 microbatch=6", data, steps=2, evaluate_every=1)
    run_ranks(2, rank_of, folder.path)
    assert folder.read_result()["validation_loss"] is None


def test_a_rank_without_validation_windows_takes_part(tmp_path: Path) -> None:
    data = corpus(tmp_path / "corpus")
    losses = []
    for world, zero in ((1, 0), (3, 3)):
        folder = run_folder(
            tmp_path / f"run{world}", f"dp={world} zero={zero} microbatch=2", data, steps=1, evaluate_samples=2
        )
        run_ranks(world, rank_of, folder.path)
        losses.append(folder.read_result()["validation_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
