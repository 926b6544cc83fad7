"""Philox4x32-10 (Salmon et al., SC 2011) in numpy, and the weights that dropout keeps by it."""

import numpy as np

MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox(counter, key):
    """Returns four words, uint32 ``[..., 4]``, for counters ``[..., 4]`` and a key of two words."""
    c = [np.asarray(counter)[..., i].astype(np.uint64) for i in range(4)]
    k = np.asarray(key).astype(np.uint64)
    for _ in range(ROUNDS):
        a, b = MULTIPLIERS[0] * c[0], MULTIPLIERS[1] * c[2]
        c = [(b >> HALF) ^ c[1] ^ k[0], b & LOW, (a >> HALF) ^ c[3] ^ k[1], a & LOW]
        k = (k + WEYL) & LOW
    return np.stack(c, axis=-1).astype(np.uint32)


def kept(rate, words, batch, head, queries, keys):
    """Returns whether each weight of a batch entry and head is kept, bool ``[queries, keys]``.

    ``queries`` and ``keys`` are positions in the whole sequence, ``words`` are the two words of the
    random key.
    """
    queries, keys = (np.asarray(x, np.uint32) for x in (queries, keys))
    blocks = np.unique(keys // 4)
    counter = np.zeros((len(queries), len(blocks), 4), np.uint32)
    counter[..., 0], counter[..., 1] = blocks, queries[:, None]
    counter[..., 2:] = head, batch
    numbers = philox(counter, words)
    numbers = numbers[:, np.searchsorted(blocks, keys // 4), keys % 4]
    return numbers >= threshold(rate)


def threshold(rate):
    """Returns the smallest random word that keeps a weight; the rate is float32, as in calls."""
    return np.uint32(min(np.round(np.float64(np.float32(rate)) * 2.0**32), 2.0**32 - 1))
