"""Elements in words by NumPy's bits alone, for tests that must not use tcemu's packing: element i of `bits` bits begins at bit i * bits."""

import numpy as np


def to_bits(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [..., words] -> the bits of each element, uint8 [..., elements, bits], lowest first."""
    words = np.ascontiguousarray(words).astype("<u4")
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(*words.shape[:-1], -1, bits)


def to_words(elements: np.ndarray) -> np.ndarray:
    """The inverse of `to_bits`."""
    flat = elements.reshape(*elements.shape[:-2], -1)
    return np.packbits(flat, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def random_words(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)
