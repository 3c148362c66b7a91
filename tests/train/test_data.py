"""The corpus and the order of its samples."""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import DataError
from meshwright.train.data import ByteCorpus, default_corpus
from meshwright.train.order import SampleOrder, permuted


def write(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        place = folder / name.replace("__", "/").replace("_txt", ".txt")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return folder


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Root may read everything; these tests must not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


class TestOrder:
    @given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
    @settings(max_examples=40, deadline=None)
    def test_permutation_is_a_bijection(self, size: int, key: int) -> None:
        assert sorted(permuted(n, size, key) for n in range(size)) == list(range(size))

    @given(size=st.integers(1, 2**40), key=st.integers(0, 2**64 - 1), data=st.data())
    @settings(max_examples=60, deadline=None)
    def test_large_permutation_stays_in_range_and_keeps_apart(self, size: int, key: int, data: st.DataObject) -> None:
        positions = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
        images = {permuted(n, size, key) for n in positions}
        assert len(images) == len(positions)
        assert all(0 <= image < size for image in images)

    @given(
        windows=st.integers(1, 200),
        seed=st.integers(0, 2**63 - 1),
        start=st.integers(0, 500),
        layout=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]),
    )
    @settings(max_examples=60, deadline=None)
    def test_order_is_the_same_for_every_layout(
        self, windows: int, seed: int, start: int, layout: tuple[int, int]
    ) -> None:
        ranks, share = layout
        orders = [SampleOrder(windows, seed) for _ in range(ranks)]
        parts = [[order(start + rank * share + row) for row in range(share)] for rank, order in enumerate(orders)]
        assert [window for part in parts for window in part] == [
            SampleOrder(windows, seed)(start + row) for row in range(ranks * share)
        ]

    def test_every_epoch_visits_every_window_once_in_another_order(self) -> None:
        order = SampleOrder(101, seed=7)
        epochs = [[order(epoch * 101 + n) for n in range(101)] for epoch in range(3)]
        assert all(sorted(epoch) == list(range(101)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert [SampleOrder(101, seed=8)(n) for n in range(101)] != epochs[0]

    def test_the_order_looks_random(self) -> None:
        order = SampleOrder(10_000, seed=0)
        first = [order(n) for n in range(2_000)]
        assert abs(sum(first) / len(first) - 5_000) < 300
        assert sum(b - a == 1 for a, b in itertools.pairwise(first)) < 10

    def test_the_order_is_pinned(self) -> None:
        """Another order would make every old checkpoint resume with samples that it has seen."""
        assert [SampleOrder(1000, seed=0)(n) for n in range(8)] == PINNED


PINNED = [515, 241, 256, 242, 60, 859, 944, 369]


class TestCorpus:
    def test_files_are_one_stream_across_borders(self, tmp_path: Path) -> None:
        folder = write(tmp_path, b_txt=b"efghij", a_txt=b"abcd", c_txt=b"", d__e_txt=b"klmnopq", d__hidden=b"x\0y")
        corpus = ByteCorpus(str(folder), sequence=4, validation_every=2)
        assert corpus.bytes == 17
        assert [corpus.window(n) for n in range(corpus.windows)] == [b"abcde", b"efghi", b"ijklm", b"mnopq"]
        assert [corpus.train_window(n) for n in range(corpus.train_windows)] == [b"abcde", b"ijklm"]
        assert [corpus.validation_window(n) for n in range(corpus.validation_windows)] == [b"efghi", b"mnopq"]

    @given(
        sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12),
        sequence=st.integers(1, 9),
        every=st.integers(2, 6),
    )
    @settings(max_examples=40, deadline=None)
    def test_windows_tile_any_files(
        self, tmp_path_factory: pytest.TempPathFactory, sizes: list[int], sequence: int, every: int
    ) -> None:
        if sum(sizes) <= sequence:
            return
        folder = tmp_path_factory.mktemp("corpus")
        whole = bytes(1 + n % 255 for n in range(sum(sizes)))
        at = 0
        for index, size in enumerate(sizes):
            (folder / f"{index:02d}").write_bytes(whole[at : at + size])
            at += size
        corpus = ByteCorpus(str(folder), sequence=sequence, validation_every=every)
        windows = [corpus.window(n) for n in range(corpus.windows)]
        assert windows == [whole[n * sequence : n * sequence + sequence + 1] for n in range((at - 1) // sequence)]
        train = [corpus.train_window(n) for n in range(corpus.train_windows)]
        held = [corpus.validation_window(n) for n in range(corpus.validation_windows)]
        assert train == [w for n, w in enumerate(windows) if n % every != every - 1]
        assert held == [w for n, w in enumerate(windows) if n % every == every - 1]
        corpus.close()

    def test_more_files_than_may_be_open(self, tmp_path: Path) -> None:
        for index in range(300):
            (tmp_path / f"{index:03d}.txt").write_bytes(bytes([65 + index % 26] * 10))
        corpus = ByteCorpus(str(tmp_path), sequence=10)
        before = len(os.listdir("/proc/self/fd"))
        for index in range(corpus.windows):
            corpus.window(index)
        assert len(os.listdir("/proc/self/fd")) - before <= 128
        corpus.close()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_file_and_glob(self, tmp_path: Path) -> None:
        folder = write(tmp_path, a_txt=b"aaaa", b_md=b"bbbb", c__d_txt=b"dddd")
        assert ByteCorpus(str(folder / "a.txt"), sequence=3).window(0) == b"aaaa"
        assert ByteCorpus(f"{folder}/**/*.txt", sequence=7).window(0) == b"aaaadddd"

    def test_default_corpus_is_the_standard_library(self) -> None:
        corpus = ByteCorpus("", sequence=128)
        assert corpus.bytes > 5e6
        assert Path(sysconfig.get_path("stdlib"), "ast.py") in corpus.files
        assert not any("site-packages" in str(file) for file in default_corpus())

    def test_fingerprint_knows_order_and_sizes_but_not_the_place(self, tmp_path: Path) -> None:
        one = write(tmp_path / "one", a_txt=b"aaaa", b_txt=b"bb")
        two = write(tmp_path / "two", a_txt=b"cccc", b_txt=b"dd")
        three = write(tmp_path / "three", a_txt=b"cc", b_txt=b"dddd")
        prints = [ByteCorpus(str(folder), sequence=2).fingerprint() for folder in (one, two, three)]
        assert prints[0] == prints[1] != prints[2]
        assert prints[0]["files"] == 2
        assert prints[0]["bytes"] == 6

    def test_hidden_files_and_folders_are_left_out(self, tmp_path: Path) -> None:
        write(tmp_path, a_txt=b"abcd", **{".git__b_txt": b"bbbb", ".c_txt": b"cccc"})
        assert ByteCorpus(str(tmp_path), sequence=2).bytes == 4


class TestWrongCorpus:
    @pytest.mark.parametrize(
        ("path", "text"),
        [
            ("missing.txt", "no corpus at"),
            ("a.txt/below", "no corpus at"),
            ("*.nothing", "no file matches"),
            ("empty.txt", "is empty"),
            ("folder", "is empty"),
            ("short.txt", "shorter than one sample"),
            ("\0", "cannot read corpus"),
        ],
    )
    def test_one_clear_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, text: str) -> None:
        write(tmp_path, a_txt=b"abcd" * 100, empty_txt=b"", short_txt=b"a" * 64, folder__bin=b"\0")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(DataError, match=text):
            ByteCorpus(path, sequence=64)

    def test_pipe_is_refused_without_reading_it(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DataError, match="not a regular file"):
            ByteCorpus(str(tmp_path / "pipe"), sequence=4)

    def test_unreadable(self, tmp_path_factory: pytest.TempPathFactory, as_nobody: None) -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as name:
            file = Path(name, "a.txt")
            file.write_bytes(b"abcdefgh")
            file.chmod(0)
            with pytest.raises(DataError, match="cannot read corpus file"):
                ByteCorpus(str(file), sequence=4)
            with pytest.raises(DataError, match="cannot read corpus file"):
                ByteCorpus(name, sequence=4)
            Path(name).chmod(0)
            with pytest.raises(DataError, match="cannot read corpus"):
                ByteCorpus(name, sequence=4)
            Path(name).chmod(0o700)

    def test_file_that_shrank_is_named(self, tmp_path: Path) -> None:
        folder = write(tmp_path, a_txt=b"a" * 40, b_txt=b"b" * 40)
        corpus = ByteCorpus(str(folder), sequence=8)
        corpus.window(5)
        (folder / "b.txt").write_bytes(b"b")
        with pytest.raises(DataError, match=r"b\.txt .* has become shorter"):
            corpus.window(6)
        (folder / "a.txt").unlink()
        with pytest.raises(DataError, match=r"cannot read .*a\.txt"):
            corpus.window(0)
