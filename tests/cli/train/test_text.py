from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from te_ops.cli.train.text import Sampler, read, validation_batches, windows
from te_ops.errors import Error


def test_a_file_is_split_and_its_entropy_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abab" * 100)
    text = read(str(path), 8)
    assert (len(text.train), len(text.validation)) == (380, 20)
    assert text.unigram_entropy() == pytest.approx(math.log(2))


def test_the_default_is_the_standard_library() -> None:
    text = read("", 129)
    assert len(text.train) > 1_000_000
    assert "standard library" in text.source
    assert 3.0 < text.unigram_entropy() < 3.6


@pytest.mark.parametrize(
    ("size", "message"), [(None, "No such file"), (100, "100 bytes are too few")]
)
def test_texts_that_cannot_serve(tmp_path: Path, size: int | None, message: str) -> None:
    path = tmp_path / "text"
    if size is not None:
        path.write_bytes(b"x" * size)
    with pytest.raises(Error, match=message):
        read(str(path), 33)


def test_targets_are_what_follows() -> None:
    made = windows(torch.arange(20, dtype=torch.uint8), torch.tensor([0, 5]), 3)
    assert made.tolist() == [[[0, 1, 2], [5, 6, 7]], [[1, 2, 3], [6, 7, 8]]]


def test_batches_depend_on_seed_and_position_only() -> None:
    symbols = torch.arange(200, dtype=torch.uint8)
    one, two = Sampler(symbols, 4, 8, seed=3), Sampler(symbols, 4, 8, seed=3)
    torch.manual_seed(5)
    first = one.next()
    assert torch.equal(first, two.next())
    later = Sampler(symbols, 4, 8, seed=9)
    assert not torch.equal(first, later.next())
    later.position = one.position
    assert torch.equal(one.next(), later.next())


def test_held_out_windows_spread_over_all_of_the_text() -> None:
    made = validation_batches(torch.arange(101, dtype=torch.uint8), batch=2, context=10, count=3)
    assert made.shape == (3, 2, 2, 10)
    assert made[0, 0, 0, 0] == 0
    assert made[-1, 1, -1, -1] == 100


def test_the_shortest_text_gives_a_window(tmp_path: Path) -> None:
    symbols = torch.arange(9, dtype=torch.uint8)
    assert Sampler(symbols, 2, 8, seed=0).next()[1, 0, -1] == 8
    assert validation_batches(symbols, 2, 8, 2)[1, 1, 1, -1] == 8
