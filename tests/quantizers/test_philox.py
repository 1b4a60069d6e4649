from __future__ import annotations

import pytest
import torch

from te_ops.quantizers import philox_u32, philox_u32_at, philox_uniform
from te_ops.quantizers.philox import philox_block

MASK = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10 in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


# Known answers of the Random123 library.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert philox(counter, key) == words
    tensors = tuple(torch.tensor(c) for c in counter)
    ours = philox_block(tensors, (torch.tensor(key[0]), torch.tensor(key[1])))
    assert [int(w) for w in ours] == words


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63)])
@pytest.mark.parametrize("stream", [0, 3, MASK])
def test_words_follow_seed_stream_and_index(seed, stream):
    ours = philox_u32(11, torch.tensor(seed), stream).tolist()
    key = (seed & MASK, (seed >> 32) & MASK)
    assert ours == [philox((i // 4, 0, stream, 0), key)[i % 4] for i in range(11)]


def test_far_indices_use_the_second_counter_word():
    seed = torch.tensor(7)
    offset = 2**36 + 5
    ours = philox_u32(6, seed, offset=offset)
    block = [(offset + i) // 4 for i in range(6)]
    assert ours.tolist() == [
        philox((b & MASK, b >> 32, 0, 0), (7, 0))[(offset + i) % 4] for i, b in enumerate(block)
    ]


def test_a_number_does_not_depend_on_the_launch():
    seed = torch.tensor(42)
    whole = philox_u32(1000, seed, 2)
    assert torch.equal(philox_u32(17, seed, 2, offset=333), whole[333:350])
    assert torch.equal(philox_uniform((10, 100), seed, 2).view(-1), philox_uniform(1000, seed, 2))
    index = torch.tensor([[999, 0, 5], [5, 4, 998]])
    assert torch.equal(philox_u32_at(index, seed, 2), whole[index])
    assert philox_uniform((0, 3), seed).shape == (0, 3)
    assert philox_uniform((), seed).shape == ()


def test_streams_and_seeds_differ():
    a, b = torch.tensor(1), torch.tensor(2)
    draws = [philox_u32(64, a, 0), philox_u32(64, a, 1), philox_u32(64, b, 0)]
    for i in range(3):
        assert not torch.equal(draws[i], draws[i - 1])


def test_uniforms_fill_the_half_open_interval_evenly():
    u = philox_uniform(200_000, torch.tensor(5))
    assert u.dtype is torch.float32
    assert u.min() >= 0.0
    assert u.max() < 1.0
    counts = torch.histc(u, 50, 0.0, 1.0)
    assert (counts - 4000).abs().max() < 6 * 4000**0.5
    assert torch.equal(u * 2**24, (u * 2**24).round())


def test_seed_may_have_one_dimension():
    assert torch.equal(philox_u32(5, torch.tensor([9])), philox_u32(5, torch.tensor(9)))
