"""Makes digits.npz: `python -m tcemu.faces.data.train_digits [FILE]`. Needs scikit-learn, for the images alone; nothing else here does.

The classifier is a perceptron of 64, 64 and 10 units, trained by Adam in NumPy float64 from a fixed seed and stored in float32.
The last bits of the weights follow the BLAS that trains them, so a new run may differ there.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

FIRST_TEST = 1157  # a writer's form begins here: each form repeats the same text of about 130 digits, so none lies in both parts
HIDDEN, EPOCHS, BATCH, RATE, DECAY = 64, 60, 32, 2e-3, 1e-4


def shift_images(images: np.ndarray) -> np.ndarray:
    """The images, and each moved by one pixel in the four directions, `[5 * n, 8, 8]`: nine forms are few writers."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    return np.concatenate([padded[:, y : y + 8, x : x + 8] for y, x in ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))])


def train(x: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Weights and biases `[64, 64], [64], [64, 10], [10]` that minimise the cross-entropy of `labels [n]` given `x [n, 64]`."""
    weights = [
        rng.normal(0, (2 / 64) ** 0.5, (64, HIDDEN)),
        np.zeros(HIDDEN),
        rng.normal(0, (2 / HIDDEN) ** 0.5, (HIDDEN, 10)),
        np.zeros(10),
    ]
    first = [np.zeros_like(w) for w in weights]
    second = [np.zeros_like(w) for w in weights]
    step = 0
    for epoch in range(EPOCHS):
        rate = RATE * 0.5 * (1 + np.cos(np.pi * epoch / EPOCHS))
        for rows in np.array_split(rng.permutation(len(x)), len(x) // BATCH):
            step += 1
            hidden = np.maximum(x[rows] @ weights[0] + weights[1], 0)
            logits = hidden @ weights[2] + weights[3]
            p = np.exp(logits - logits.max(1, keepdims=True))
            error = (p / p.sum(1, keepdims=True) - np.eye(10)[labels[rows]]) / len(rows)
            back = (error @ weights[2].T) * (hidden > 0)
            gradients = [x[rows].T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
            for i, g in enumerate(gradients):
                g = g + DECAY * weights[i]
                first[i] = 0.9 * first[i] + 0.1 * g
                second[i] = 0.999 * second[i] + 0.001 * g * g
                scale = np.sqrt(second[i] / (1 - 0.999**step)) + 1e-8
                weights[i] = weights[i] - rate * first[i] / (1 - 0.9**step) / scale
    return weights


def main(path: Path) -> None:
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

    digits: Any = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    known = shift_images(images[:FIRST_TEST])
    weights = train(known.reshape(-1, 64) / 16, np.tile(labels[:FIRST_TEST], 5), np.random.default_rng(0))
    w1, b1, w2, b2 = (w.astype(np.float32) for w in weights)
    np.savez_compressed(path, images=images, labels=labels, first_test=np.int32(FIRST_TEST), w1=w1, b1=b1, w2=w2, b2=b2)
    for name, part in (("train", slice(FIRST_TEST)), ("test", slice(FIRST_TEST, None))):
        logits = np.maximum(images[part].reshape(-1, 64) / 16 @ w1 + b1, 0) @ w2 + b2
        print(f"{name}: {(logits.argmax(1) == labels[part]).mean():.2%} of {len(logits)} right")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("digits.npz"))
