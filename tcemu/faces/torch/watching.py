"""`watch`: every product of a run of torch as its dispatcher sees it, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tcemu.base.results import Result, Table
from tcemu.base.text import table_lines
from tcemu.faces.torch.exchange import DTYPES
from tcemu.faces.torch.kernel_functions import OPERATOR as KERNEL_OPERATOR
from tcemu.faces.torch.matrix_products import matmul
from tcemu.operations.products.recipes import Recipe, as_recipe
from tcemu.uses.emulation.decisions import is_undecided, place_recipe

OPERAND_POSITIONS = {  # positions of the operands among the arguments of aten's operators
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1), "matmul": (0, 1), "linear": (0, 1), "_scaled_mm": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2), "addmv": (1, 2), "_addmm_activation": (1, 2), "_int_mm": (0, 1),
    "convolution": (0, 1), "_convolution": (0, 1), "mkldnn_convolution": (0, 1), "convolution_backward": (0, 2), "_grouped_mm": (0, 1),
    "_scaled_grouped_mm": (0, 1), "_trilinear": (0, 2), "bilinear": (0, 1), "_euclidean_dist": (0, 1), "linalg_matrix_power": (0, 0),
}  # fmt: skip
FUSED_KERNELS = {  # the beginnings of the names of kernels that contain products, by kind; their first two arguments are shown
    "attention": ("_scaled_dot_product", "_flash_attention", "_efficient_attention"),
    "multi-head attention": ("_native_multi_head_attention",),
    "a transformer layer": ("_transformer_encoder_layer_fwd",),
    "a recurrent cell": ("_thnn_fused",),
    "a recurrent layer": ("mkldnn_rnn_layer", "_cudnn_rnn", "lstm", "gru", "rnn_"),
}
NAMESPACE = "tcemu"


class DispatchedProduct(NamedTuple):
    """One product that reached the dispatcher."""

    name: str  # name of the operator
    operands: tuple[torch.Tensor, ...]
    args: tuple
    kwargs: dict[str, Any]
    result: Any
    hiding_kernel: str  # kind of kernel that hides its products, or ""


def find_product(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> DispatchedProduct | None:
    """Return a call of an operator as a product, or None if it is none."""
    space, _, name = func._schema.name.partition("::")
    if space == NAMESPACE and name.removesuffix("_backward") == KERNEL_OPERATOR:
        return None
    positions, hiding_kernel = OPERAND_POSITIONS.get(name), ""
    if space == NAMESPACE:
        positions, hiding_kernel = (0, 1), f"emulated{', its gradients' if name.endswith('_backward') else ''}"
    elif positions is None:
        kind = next((kind for kind, starts in FUSED_KERNELS.items() if name.startswith(starts)), None)
        if kind is None:
            return None
        positions, hiding_kernel = (0, 1), f"{kind} as one kernel"
    operands = tuple(args[place] for place in positions if place < len(args) and isinstance(args[place], torch.Tensor))
    return DispatchedProduct(f"{space}.{name}", operands, args, kwargs, result, hiding_kernel)


class ProductRecorder(TorchDispatchMode):
    """A mode that records all products with their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[DispatchedProduct] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = find_product(func, args, kwargs or {}, result)
        if found is not None:
            self.products.append(found)
        return result


@dataclass(frozen=True)
class ProductLine:
    """A product of a run.

    Attributes:
        name: The operator.
        operands: Dtypes and shapes of the operands as text.
        result: Dtype and shape of the result as text.
        backward: Node of the backward pass that ran it, "" in the forward pass.
        weight: Operands that are parameters or views of them: "lhs", "rhs" or "".
        fused_kind: Kind of kernel that hides products, "" for a plain product.
        method: The recipe that it was compared with, or why it was not compared.
        runs: Number of runs.
        changed: Number of elements that would be another number by the recipe.
        elements: Number of all elements.
        squared_error: Squared norm of the difference.
        squared_size: Squared norm of the result.
    """

    name: str
    operands: str
    result: str
    backward: str
    weight: str
    fused_kind: str
    method: str
    runs: int = 0
    changed: int | None = None
    elements: int | None = None
    squared_error: float = 0.0
    squared_size: float = 0.0

    @property
    def relative_change(self) -> float | None:
        """Norm of the difference that the recipe makes, over the norm of the result."""
        if self.changed is None:
            return None
        return (self.squared_error / self.squared_size) ** 0.5 if self.squared_size else float("nan") if self.squared_error else 0.0


class WatchReport(Result):
    """The products of a run: a sequence of `ProductLine`; str() is a table, and `records()` is what pandas takes."""

    def __init__(self) -> None:
        self.lines: dict[tuple, ProductLine] = {}

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[ProductLine]:
        return iter(self.lines.values())

    def __getitem__(self, index: int) -> ProductLine:
        return list(self.lines.values())[index]

    def __str__(self) -> str:
        if not self.lines:
            return "no products"
        heads = ["product", "operands", "result", "pass", "weight", "runs"]
        compared = any(line.method for line in self)
        rows = []
        for line in self:
            named = f"{line.name} ({line.fused_kind})" if line.fused_kind else line.name
            row = [named, line.operands, line.result, f"backward, {line.backward}" if line.backward else "forward", line.weight]
            row.append(str(line.runs))
            if compared:
                row += [line.method, "" if line.changed is None else f"{line.changed} of {line.elements}"]
                row.append("" if line.relative_change is None else f"{line.relative_change:.2e}")
            rows.append(row)
        heads += ["by", "changed", "rel. change"] if compared else []
        return "\n".join(table_lines(heads, rows, left=(0, 1, 2, 3, 4, 6) if compared else (0, 1, 2, 3, 4)))

    def __repr__(self) -> str:
        return f"<Watched: {sum(line.runs for line in self)} products, {len(self)} kinds>"

    def table(self) -> Table:
        """Return a table with a row for each kind of product."""
        heads = ("product", "operands", "result", "backward", "weight", "why", "runs", "by", "changed", "elements", "change")
        rows = tuple(
            (x.name, x.operands, x.result, x.backward, x.weight, x.fused_kind, x.runs, x.method, x.changed, x.elements, x.relative_change)
            for x in self
        )
        return Table(repr(self)[1:-1], heads, rows, {})


class watch(TorchDispatchMode):
    """List every matrix product that runs in `with tcemu.torch.watch() as report:`, forward and backward, with a line for each kind.

    The run itself is unchanged. Compiled functions run as if they were not compiled: torch shows them to a dispatch mode in no other way. A
    backward pass is seen while the mode is open. A kernel with several products is one line, with its kind.

    Args:
        recipe: A Recipe, or its name. Each plain product is then computed by it too, and the line shows how many elements of its results
            would be other numbers, and by how much. Products of a backward pass are computed by the recipe's recipes for gradients if it
            is known which operand is the weight, or if that makes no difference.
    """

    def __init__(self, recipe: Recipe | str | None = None) -> None:
        super().__init__()
        self.recipe = None if recipe is None else as_recipe(recipe)
        self.report, self._weights = WatchReport(), set()

    def __enter__(self) -> WatchReport:
        super().__enter__()
        return self.report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._weights |= {_storage_id(arg) for arg in args if isinstance(arg, torch.nn.Parameter)}
        found = find_product(func, args, kwargs or {}, result)
        if found is not None:
            self._add(found)
        return result

    def _add(self, found: DispatchedProduct) -> None:
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        backward = "" if torch._C._current_graph_task_id() == -1 else node.name() if node is not None else "backward"
        backward = "tcemu" if backward.startswith("GeneratedBackwardFor_tcemu") else backward
        sides = [side for side, x in zip(("lhs", "rhs"), found.operands, strict=False) if _storage_id(x) in self._weights]
        facts = ProductLine(
            name=found.name,
            operands=" · ".join(describe_tensor(x) for x in found.operands),
            result=describe_tensor(found.result) if isinstance(found.result, torch.Tensor) else "",
            backward=backward,
            weight=" ".join(sides),
            fused_kind=found.hiding_kernel,
            method="",
        )
        compared = self._compare_product(found, backward, sides) if self.recipe is not None and not found.hiding_kernel else None
        if compared is not None:
            facts = replace(facts, method=compared[0])
        line = self.report.lines.get(key := tuple(vars(facts).values()), facts)
        line = replace(line, runs=line.runs + 1)
        if compared is not None and compared[1] is not None:
            result, other = found.result.detach(), compared[1]
            difference = result.double() - other.double()
            line = replace(
                line,
                changed=(line.changed or 0) + int((result != other).sum()),
                elements=(line.elements or 0) + result.numel(),
                squared_error=line.squared_error + float((difference**2).sum()),
                squared_size=line.squared_size + float((result.double() ** 2).sum()),
            )
        self.report.lines[key] = line

    def _compare_product(self, found: DispatchedProduct, backward: str, sides: list[str]) -> tuple[str, torch.Tensor | None]:
        """Return the name of the recipe and its result, or why there is no result."""
        assert self.recipe is not None
        a, b = found.operands[:2]
        name = found.name.removeprefix("aten.")
        if name not in ("mm", "bmm", "addmm", "baddbmm") or a.dtype not in DTYPES or found.kwargs:
            return "not compared", None
        if self.recipe.is_stochastic:
            return "not compared: it rounds stochastically", None
        other = "gradient" if backward else "activation"
        left, right = ("weight" if side in sides else other for side in ("lhs", "rhs"))
        roles = ("gradient", "activation") if (left, right) == ("gradient", "gradient") else (left, right)
        if is_undecided(self.recipe, roles) or (roles == ("gradient", "activation") and not _shares_gradient_recipe(self.recipe)):
            return "not compared: which operand is which is not known", None
        dot_general, recipe_name = place_recipe(self.recipe, roles)
        swap = dot_general.a == "rhs"
        with torch.no_grad():
            bias = found.args[0] if name in ("addmm", "baddbmm") else None
            x, y = (b.mT, a.mT) if swap else (a, b)
            d = matmul(x.detach(), y.detach(), recipe=dot_general.recipe, dtype=found.result.dtype)
            d = d.mT if swap else d
            return recipe_name, d if bias is None else d + bias.detach()


def _shares_gradient_recipe(recipe: Recipe) -> bool:
    """Return whether both products of a backward pass are computed by one recipe that treats its operands alike."""
    return recipe.gradients is None or (
        recipe.gradients[0] == recipe.gradients[1] and not is_undecided(recipe.gradients[0], ("constant", "constant"))
    )


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape as text: "float32[4,8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"
