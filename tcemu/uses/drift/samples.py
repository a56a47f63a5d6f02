"""A program restricted to some elements of its result: the elements that each of its nodes must compute for them.

What a node reads depends on the shapes alone, so a `Sample` is built once and serves every arithmetic that is tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tcemu.uses.drift.programs import Node, Program

MAX_SAMPLED = 1 << 24  # elements that the nodes of a program compute for a sample
GATHERED = ("reshape", "transpose", "broadcast")  # nodes that only move elements
REDUCTIONS = ("reduce_max", "reduce_min", "amax")
SUMS = ("sum", "product")
ROWWISE = ("moment",)  # nodes that compute on the rows of a sum otherwise


@dataclass
class Sample:
    """The elements that a program reads and computes for some elements of its result.

    Attributes:
        size: Number of elements of the result.
        inputs: The elements that are read of each input: as its only reader reads them, else flat.
        positions: For each node and each of its operands, where the elements stand among those of the operand: for the operands of a sum
            an array [n, K], else [n]. None for an operand that is read as it stands.
        columns: For each node that is a sum, the number of each output, the number of all outputs, and the rank of its operand.
    """

    size: int = 0
    inputs: list[np.ndarray] = field(default_factory=list)
    positions: list[list[np.ndarray | None]] = field(default_factory=list)
    columns: dict[int, tuple[np.ndarray, int, int]] = field(default_factory=dict)


def take_sample(program: Program, inputs: list[np.ndarray], at: np.ndarray) -> Sample | None:
    """Return the sample of a program for flat indices of its result; None if it needs too many elements of an earlier node.

    Args:
        program: The program.
        inputs: The arrays that it reads.
        at: Flat indices, in any order.
    """
    shapes = infer_shapes(program, inputs)
    last = len(program.nodes) - 1
    at = _broadcast_positions(at, program.shape, shapes[last])
    needs: dict[tuple[str, int], list[np.ndarray]] = {("node", last): [at]}  # flat indices by operand
    flat: list[list[np.ndarray | None]] = [[] for _ in program.nodes]
    needed: dict[tuple[str, int], np.ndarray] = {}
    sample = Sample(len(at))
    count = 0
    for number in range(last, -1, -1):
        node = program.nodes[number]
        wanted = needs.pop(("node", number), [])
        own = at if number == last else _distinct(wanted)  # the last node keeps the order of `at`
        needed["node", number] = own
        operand_shapes = [inputs[i].shape if kind == "input" else shapes[i] for kind, i in node.inputs]
        if node.kind in SUMS:
            sample.columns[number] = own, math.prod(shapes[number]), len(operand_shapes[0])
        for ref, indices in zip(node.inputs, _operand_indices(node, own, shapes[number], operand_shapes), strict=True):
            flat[number].append(indices)
            count += 0 if indices is None else indices.size
            needs.setdefault(ref, []).append(np.zeros(1, np.int64) if indices is None else indices)
        if count > MAX_SAMPLED:
            return None
    for index, x in enumerate(inputs):
        wanted = needs.get(("input", index), [])
        if len(wanted) == 1:
            sample.inputs.append(_gather(x.reshape(-1), wanted[0]))
            continue
        own = needed["input", index] = _distinct([indices[indices >= 0] for indices in wanted])
        padded = any(indices.min(initial=0) < 0 for indices in wanted)  # the zero of a convolution's padding stands last
        sample.inputs.append(np.append(x.reshape(-1)[own], np.zeros(int(padded), x.dtype)))
    for node, operands in zip(program.nodes, flat, strict=True):
        pairs = zip(node.inputs, operands, strict=True)
        sample.positions.append([_positions(indices, needed.get(ref)) for ref, indices in pairs])
    return sample


def _distinct(indices: list[np.ndarray]) -> np.ndarray:
    found = np.sort(np.concatenate([x.reshape(-1) for x in indices])) if indices else np.zeros(0, np.int64)
    return found[np.append(True, found[1:] != found[:-1])[: len(found)]]


def _gather(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    found = x[indices]
    return np.where(indices < 0, np.zeros((), x.dtype), found) if indices.min(initial=0) < 0 else found


def _positions(indices: np.ndarray | None, needed: np.ndarray | None) -> np.ndarray | None:
    return None if indices is None or needed is None else np.where(indices < 0, -1, np.searchsorted(needed, indices))


def infer_shapes(program: Program, inputs: list[np.ndarray]) -> list[tuple[int, ...]]:
    """Return the shape of the value of each node."""
    shapes: list[tuple[int, ...]] = []
    for node in program.nodes:
        given = [inputs[i].shape if kind == "input" else shapes[i] for kind, i in node.inputs]
        shapes.append(node_shape(node, given))
    return shapes


def node_shape(node: Node, given: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a node's value from those of its operands."""
    facts = node.attributes
    if node.kind in ("reshape", "broadcast"):
        return tuple(facts["shape"])
    if node.kind == "transpose":
        return tuple(given[0][axis] for axis in facts["axes"])
    if node.kind in ("sum", *ROWWISE, *REDUCTIONS):
        axes = [axis % len(given[0]) for axis in facts["axes"]]
        return tuple(1 if i in axes else size for i, size in enumerate(given[0]) if i not in axes or facts.get("keepdims"))
    if node.kind == "product":
        if "windows" in facts:
            return _window_shape(node, given)
        free_a, free_b = product_axes(node, given)
        return tuple(given[0][i] for i in (*facts["axes"][1][0], *free_a)) + tuple(given[1][i] for i in free_b)
    return tuple(np.broadcast_shapes(*given))


def product_axes(node: Node, given: list[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Return the axes of both operands that are neither summed nor batch axes."""
    (left, right), (left_batch, right_batch) = node.attributes["axes"]
    a, b = given[:2]
    return [i for i in range(len(a)) if i not in (*left, *left_batch)], [i for i in range(len(b)) if i not in (*right, *right_batch)]


def _window_shape(node: Node, given: list[tuple[int, ...]]) -> tuple[int, ...]:
    lhs, rhs, _ = node.attributes["windows"]
    x, w = given[:2]
    sizes = zip(lhs[2:], rhs[2:], node.attributes["padding"], node.attributes["strides"], strict=True)
    return (x[lhs[0]], *((x[i] + sum(pad) - w[j]) // stride + 1 for i, j, pad, stride in sizes), w[rhs[0]])


# ---- indices of operands


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _offsets(shape: tuple[int, ...], axes: list[int]) -> np.ndarray:
    """Flat indices of all places along some axes, in the order of these axes."""
    strides, total = _strides(shape), np.zeros(1, np.int64)
    for axis in axes:
        total = (total[:, None] + np.arange(shape[axis]) * strides[axis]).reshape(-1)
    return total


def _coordinates(at: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return np.unravel_index(at, shape) if shape else ()


def _index(coordinates: Any, shape: tuple[int, ...], axes: list[int], like: np.ndarray) -> np.ndarray:
    """Flat indices from the coordinates along some axes, in the shape of `like`; the other coordinates are 0."""
    strides = _strides(shape)
    return sum((c * strides[axis] for c, axis in zip(coordinates, axes, strict=True)), np.zeros_like(like))


def _broadcast_positions(at: np.ndarray, shape: tuple[int, ...], own: tuple[int, ...]) -> np.ndarray:
    if shape == own:
        return at
    coordinates, lead = _coordinates(at, shape), len(shape) - len(own)
    axes = [i for i, size in enumerate(own) if size != 1]
    return _index([coordinates[lead + i] for i in axes], own, axes, at)


def _operand_indices(node: Node, at: np.ndarray, shape: tuple[int, ...], given: list[tuple[int, ...]]) -> list[np.ndarray | None]:
    """Flat indices of each operand's elements for the elements `at` of a node."""
    facts, coordinates = node.attributes, _coordinates(at, shape)
    if node.kind == "product":
        pair = (_window_indices if "windows" in facts else _product_indices)(node, at, coordinates, given)
        return [*pair, *(_broadcast_positions(at, shape, own) for own in given[2:])]
    if node.kind in ("sum", *ROWWISE, *REDUCTIONS):
        axes = [axis % len(given[0]) for axis in facts["axes"]]
        kept = [i for i in range(len(given[0])) if i not in axes]
        own = [coordinates[i] for i in kept] if facts.get("keepdims") else coordinates
        return [_index(own, given[0], kept, at)[:, None] + _offsets(given[0], axes)]
    if node.kind == "reshape":
        return [at]
    if node.kind == "transpose":
        return [_index(coordinates, given[0], list(facts["axes"]), at)]
    if node.kind == "broadcast":
        kept = [j for j, size in enumerate(given[0]) if size != 1]
        return [_index([coordinates[facts["axes"][j]] for j in kept], given[0], kept, at)]
    return [None if math.prod(own) == 1 else _broadcast_positions(at, shape, own) for own in given]


def _product_indices(node: Node, at: np.ndarray, coordinates: Sequence[np.ndarray], given: list[tuple[int, ...]]) -> list[np.ndarray]:
    (left, right), (left_batch, right_batch) = node.attributes["axes"]
    free_a, free_b = product_axes(node, given)
    batch, rest = coordinates[: len(left_batch)], coordinates[len(left_batch) :]
    base_a = _index([*batch, *rest[: len(free_a)]], given[0], [*left_batch, *free_a], at)
    base_b = _index([*batch, *rest[len(free_a) :]], given[1], [*right_batch, *free_b], at)
    return [base_a[:, None] + _offsets(given[0], list(left)), base_b[:, None] + _offsets(given[1], list(right))]


def _window_indices(node: Node, at: np.ndarray, coordinates: Sequence[np.ndarray], given: list[tuple[int, ...]]) -> list[np.ndarray]:
    lhs, rhs, _ = node.attributes["windows"]
    x, w = given[:2]
    image, *places, channel = coordinates
    sizes = [w[i] for i in rhs[2:]]
    window = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    along = [
        place[:, None] * stride + offsets - low
        for place, offsets, (low, _), stride in zip(places, window, node.attributes["padding"], node.attributes["strides"], strict=True)
    ]
    inside = np.all([(i >= 0) & (i < x[axis]) for i, axis in zip(along, lhs[2:], strict=True)], 0)
    patches = _index([image[:, None], *along], x, [lhs[0], *lhs[2:]], along[0])
    patches = np.where(inside[:, :, None], patches[:, :, None] + _offsets(x, [lhs[1]]), -1)
    kernels = _index([channel], w, [rhs[0]], at)[:, None] + _offsets(w, [*rhs[2:], rhs[1]])
    return [patches.reshape(len(at), math.prod(patches.shape[1:])), kernels]
