"""What stands around a module's forward: a function mode, in which every product is decided on and computed."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from tcemu.torch.decisions import Decisions, Numbers, decide_on
from tcemu.torch.exchange import DTYPES
from tcemu.torch.functions import TAKEN
from tcemu.torch.products import convolution_op, dot_general_op, matmul_op

if TYPE_CHECKING:
    from tcemu.torch.decisions import Taken


class Products(TorchFunctionMode):
    """The products of one call of one module. Those of its parts belong to modes of their own."""

    def __init__(self, decisions: Decisions, tag: str, path: str, module: torch.nn.Module):
        super().__init__()
        self.decisions, self.tag, self.path, self.module = decisions, tag, path, module
        self.counts: dict[str, int] = {}
        self.opening = False  # a function of several products is run part by part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.decisions.survey is not None:
            return self.decisions.survey.listing(self, func, args, kwargs or {})
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A function of torch, or what takes its place."""
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
            return torch.unflatten(*args, **kwargs)  # the method calls super(), where torch.compile of torch 2.11 stops
        handler = TAKEN.get(func)
        return func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)

    # ---- one product

    def name(self, kind: str) -> str:
        """The name of the next product of a kind."""
        count = self.counts.get(kind, 0)
        self.counts[kind] = count + 1
        own = f"{kind}.{count}" if count else kind
        return f"{self.path}/{own}" if self.path else own

    def dot_general(
        self, kind: str, operands: tuple[torch.Tensor, torch.Tensor], numbers: Numbers, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """A product with the axes of `jax.lax.dot_general`, bias added to its last axis; None where the policy leaves it."""
        taken = self.take(kind, operands, numbers)
        if taken is None:
            return None
        return self.run(taken, operands, numbers, bias)

    def take(self, kind: str, operands: tuple[torch.Tensor, torch.Tensor], numbers: Numbers) -> Taken | None:
        """What takes the place of a product; of the operands, shapes and dtypes count."""
        return self._taken(kind, "dot_general", operands, numbers, _shape(operands, numbers))

    def run(self, taken: Taken, operands: tuple[torch.Tensor, torch.Tensor], numbers: Numbers, bias: Any = None) -> torch.Tensor:
        """A product by what takes its place."""
        dtype = _autocast(operands[0])
        lhs, rhs, bias = (_cast(value, dtype) for value in (*operands, bias))
        if self.decisions.capture is not None:
            self.decisions.captured(taken.name, (lhs, rhs), numbers)
        (left, right), (left_batch, right_batch) = numbers
        shape, result, seed = _shape(operands, numbers), torch.promote_types(lhs.dtype, rhs.dtype), _seed(taken)
        if taken.recipe and rhs.ndim == 2 and not left_batch and tuple(left) == (lhs.ndim - 1,):
            flat = lhs.reshape(-1, lhs.shape[-1]) if lhs.ndim != 2 else lhs
            b = rhs.mT if tuple(right) == (1,) else rhs
            return matmul_op(flat, b, bias, None, None, seed, taken.recipe, result).reshape(shape)
        d = dot_general_op(lhs, rhs, seed, taken.by, list(left), list(right), list(left_batch), list(right_batch), result)
        return d if bias is None else d + bias

    def convolution(self, operands: tuple[torch.Tensor, torch.Tensor], windows: tuple[Any, ...]) -> torch.Tensor | None:
        """A convolution of [batch, features, *space] with [features, features of a group, *window]; windows: stride, padding (low and high
        of each axis), dilation, groups. None where the policy leaves it."""
        dtype = _autocast(operands[0])
        x, w = operands
        stride, padding, dilation, groups = windows
        reach = [(size - 1) * step + 1 for size, step in zip(w.shape[2:], dilation, strict=True)]
        extent = [n + low + high for n, low, high in zip(x.shape[2:], padding[::2], padding[1::2], strict=True)]
        space = [(n - r) // s + 1 for n, r, s in zip(extent, reach, stride, strict=True)]
        axes = tuple(range(x.ndim))
        shape = (x.shape[0], w.shape[0], *space)
        taken = self._taken("conv", "conv_general_dilated", (x, w), (axes, axes, axes), shape)
        if taken is None:
            return None
        x, w = _cast(x, dtype), _cast(w, dtype)
        if self.decisions.capture is not None:
            self.decisions.captured(taken.name, (x, w), windows)
        return convolution_op(
            x, w, _seed(taken), taken.by, list(stride), list(padding), list(dilation), groups, torch.promote_types(x.dtype, w.dtype)
        )

    def _taken(self, kind: str, primitive: str, operands: tuple[torch.Tensor, torch.Tensor], numbers: Any, shape: Any) -> Taken | None:
        lhs, rhs = operands
        dtypes = [_dtype(x, _autocast(lhs)) for x in operands]
        left, right, result = (tuple(index(n) for n in sizes) for sizes in (lhs.shape, rhs.shape, shape))  # numbers, also while compiling
        facts = (primitive, left, str(dtypes[0]), right, str(dtypes[1]), numbers, result)
        weights = (self._weight(lhs), self._weight(rhs))
        fits = dtypes[0] in DTYPES and dtypes[1] in DTYPES and lhs.device == rhs.device
        return decide_on(self.tag, self.name(kind), facts, weights, fits)

    def _weight(self, tensor: torch.Tensor) -> str | None:
        """The path of the parameter that a tensor is, or is a view of; "" where it is of another module. None: it is none."""
        base = tensor if isinstance(tensor, torch.nn.Parameter) else tensor._base
        if not isinstance(base, torch.nn.Parameter):
            return None
        for name, parameter in self.module.named_parameters():
            if parameter is base:
                return f"{self.path}.{name}" if self.path else name
        return ""


def _autocast(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype to which autocast brings the operands of products here."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The tensor's own, or that of autocast."""
    return tensor.dtype if dtype is None or tensor.dtype not in DTYPES else dtype


def _cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if tensor is None else tensor.to(_dtype(tensor, dtype))


def _shape(operands: tuple[torch.Tensor, torch.Tensor], numbers: Numbers) -> tuple[int, ...]:
    """That of the product."""
    (lhs, rhs), ((left, right), (left_batch, right_batch)) = operands, numbers
    rows = [n for at, n in enumerate(lhs.shape) if at not in (*left, *left_batch)]
    columns = [n for at, n in enumerate(rhs.shape) if at not in (*right, *right_batch)]
    return (*(lhs.shape[at] for at in left_batch), *rows, *columns)


def _seed(taken: Taken) -> torch.Tensor | None:
    """Random bits from torch's own generator, so that a checkpoint, which sets it back, draws the same again."""
    return torch.randint(0, 2**31 - 1, ()) if taken.seeded else None
