"""`watch`: every product of a run of torch, as its dispatcher sees it, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tcemu.emulation.placing import placed, undecided
from tcemu.linalg.recipes import Recipe, as_recipe
from tcemu.results import Result, Table
from tcemu.text import columns
from tcemu.torch.exchange import DTYPES
from tcemu.torch.products import matmul

PRODUCTS = {  # of aten -> where its operands stand among the arguments
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1), "matmul": (0, 1), "linear": (0, 1), "_scaled_mm": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2), "addmv": (1, 2), "_addmm_activation": (1, 2), "_int_mm": (0, 1),
    "convolution": (0, 1), "_convolution": (0, 1), "mkldnn_convolution": (0, 1), "convolution_backward": (0, 2), "_grouped_mm": (0, 1),
    "_scaled_grouped_mm": (0, 1), "_trilinear": (0, 2), "bilinear": (0, 1), "_euclidean_dist": (0, 1), "linalg_matrix_power": (0, 0),
}  # fmt: skip
FUSED = {  # beginnings of names of kernels that hold products -> what they are, where the first two operands are shown
    "_scaled_dot_product": "attention as one kernel",
    "_flash_attention": "attention as one kernel",
    "_efficient_attention": "attention as one kernel",
    "_native_multi_head_attention": "multi-head attention as one kernel",
    "_transformer_encoder_layer_fwd": "a transformer layer as one kernel",
    "mkldnn_rnn_layer": "a recurrent layer as one kernel",
    "_thnn_fused": "a recurrent cell as one kernel",
    "_cudnn_rnn": "a recurrent layer as one kernel",
    "lstm": "a recurrent layer as one kernel",
    "gru": "a recurrent layer as one kernel",
    "rnn_": "a recurrent layer as one kernel",
}
OWN = "tcemu"


class Seen(NamedTuple):
    """One product that reached the dispatcher."""

    name: str  # of the operator
    operands: tuple[torch.Tensor, ...]
    args: tuple
    kwargs: dict[str, Any]
    result: Any
    why: str  # what hides its products, or ""


def seen(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> Seen | None:
    """What a call of an operator is, if it is a product."""
    space, _, name = func._schema.name.partition("::")
    at, why = PRODUCTS.get(name), ""
    if space == OWN:
        at, why = (0, 1), f"emulated{', its gradients' if name.endswith('_backward') else ''}"
    elif at is None:
        found = [said for start, said in FUSED.items() if name.startswith(start)]
        if not found:
            return None
        at, why = (0, 1), found[0]
    operands = tuple(args[place] for place in at if place < len(args) and isinstance(args[place], torch.Tensor))
    return Seen(f"{space}.{name}", operands, args, kwargs, result, why)


class Watcher(TorchDispatchMode):
    """Keeps all products, with their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = seen(func, args, kwargs or {}, result)
        if found is not None:
            self.seen.append(found)
        return result


@dataclass(frozen=True)
class Line:
    """A product, and how often it ran.

    name: the operator. operands, result: in words. backward: the node of the backward pass that ran it, "" in the forward pass. weight:
    which operand is a parameter or a view of one, "lhs", "rhs" or "". runs: how often. why: what hides products in it, "" for a plain one.
    by: the recipe that it was held against, or why it was not; changed: elements that would be another number by it, of all; change: the
    norm of the difference over that of the result.
    """

    name: str
    operands: str
    result: str
    backward: str
    weight: str
    why: str
    by: str
    runs: int = 0
    changed: int | None = None
    elements: int | None = None
    squared_error: float = 0.0
    squared_size: float = 0.0

    @property
    def change(self) -> float | None:
        """The relative difference that the recipe makes."""
        if self.changed is None:
            return None
        return (self.squared_error / self.squared_size) ** 0.5 if self.squared_size else float("nan") if self.squared_error else 0.0


class Watched(Result):
    """The products of a run: a sequence of `Line`; str() is a table, `records()` for pandas."""

    def __init__(self) -> None:
        self.lines: dict[tuple, Line] = {}

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines.values())

    def __getitem__(self, index: int) -> Line:
        return list(self.lines.values())[index]

    def __str__(self) -> str:
        if not self.lines:
            return "no products"
        heads = ["product", "operands", "result", "pass", "weight", "runs"]
        compared = any(line.by for line in self)
        rows = []
        for line in self:
            named = f"{line.name} ({line.why})" if line.why else line.name
            row = [named, line.operands, line.result, f"backward, {line.backward}" if line.backward else "forward", line.weight]
            row.append(str(line.runs))
            if compared:
                row += [line.by, "" if line.changed is None else f"{line.changed} of {line.elements}"]
                row.append("" if line.change is None else f"{line.change:.2e}")
            rows.append(row)
        heads += ["by", "changed", "rel. change"] if compared else []
        return "\n".join(columns(heads, rows, left=(0, 1, 2, 3, 4, 6) if compared else (0, 1, 2, 3, 4)))

    def __repr__(self) -> str:
        return f"<Watched: {sum(line.runs for line in self)} products, {len(self)} kinds>"

    def table(self) -> Table:
        """A row for each kind of product."""
        heads = ("product", "operands", "result", "backward", "weight", "why", "runs", "by", "changed", "elements", "change")
        rows = tuple(
            (x.name, x.operands, x.result, x.backward, x.weight, x.why, x.runs, x.by, x.changed, x.elements, x.change) for x in self
        )
        return Table(repr(self)[1:-1], heads, rows, {})


class watch(TorchDispatchMode):
    """`with tcemu.torch.watch() as report:` lists every matrix product of what runs in it, forward and backward, a line for each kind.

    recipe: a Recipe, or its name. Each plain product is then computed by it too, and the line says how many elements of its results would
    be other numbers, and by how much. Products of a backward pass are computed by the recipe's own for gradients, where it is known which
    operand is the weight, or where that makes no difference. The run itself is as it was.
    Compiled functions run in it as if they were not compiled: torch gives a dispatch mode no other view of them. A backward pass is seen
    while the mode is open. What runs in kernels that hold several products is one line, with what it is.
    """

    def __init__(self, recipe: Recipe | str | None = None) -> None:
        super().__init__()
        self.recipe = None if recipe is None else as_recipe(recipe)
        self.report, self._weights = Watched(), set()

    def __enter__(self) -> Watched:
        super().__enter__()
        return self.report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._weights |= {_storage(arg) for arg in args if isinstance(arg, torch.nn.Parameter)}
        found = seen(func, args, kwargs or {}, result)
        if found is not None:
            self._add(found)
        return result

    def _add(self, found: Seen) -> None:
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        backward = "" if torch._C._current_graph_task_id() == -1 else node.name() if node is not None else "backward"
        backward = "tcemu" if backward.startswith("GeneratedBackwardFor_tcemu") else backward
        sides = [side for side, x in zip(("lhs", "rhs"), found.operands, strict=False) if _storage(x) in self._weights]
        facts = Line(
            name=found.name,
            operands=" · ".join(described(x) for x in found.operands),
            result=described(found.result) if isinstance(found.result, torch.Tensor) else "",
            backward=backward,
            weight=" ".join(sides),
            why=found.why,
            by="",
        )
        compared = self._compared(found, backward, sides) if self.recipe is not None and not found.why else None
        if compared is not None:
            facts = replace(facts, by=compared[0])
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

    def _compared(self, found: Seen, backward: str, sides: list[str]) -> tuple[str, torch.Tensor | None]:
        """By which recipe, and its result; or why there is none."""
        assert self.recipe is not None
        a, b = found.operands[:2]
        name = found.name.removeprefix("aten.")
        if name not in ("mm", "bmm", "addmm", "baddbmm") or a.dtype not in DTYPES or found.kwargs:
            return "not compared", None
        if self.recipe.stochastic:
            return "not compared: it rounds stochastically", None
        other = "gradient" if backward else "activation"
        left, right = ("weight" if side in sides else other for side in ("lhs", "rhs"))
        roles = ("gradient", "activation") if (left, right) == ("gradient", "gradient") else (left, right)
        if undecided(self.recipe, roles) or (roles == ("gradient", "activation") and not _same_gradients(self.recipe)):
            return "not compared: which operand is which is not known", None
        run, said = placed(self.recipe, roles)
        swap = run.a == "rhs"
        with torch.no_grad():
            bias = found.args[0] if name in ("addmm", "baddbmm") else None
            x, y = (b.mT, a.mT) if swap else (a, b)
            d = matmul(x.detach(), y.detach(), recipe=run.recipe, dtype=found.result.dtype)
            d = d.mT if swap else d
            return said, d if bias is None else d + bias.detach()


def _same_gradients(recipe: Recipe) -> bool:
    """Both products of a backward pass are by one recipe, whose operands are alike."""
    return recipe.gradients is None or (
        recipe.gradients[0] == recipe.gradients[1] and not undecided(recipe.gradients[0], ("constant", "constant"))
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def described(tensor: torch.Tensor) -> str:
    """A tensor in words, as "float32[4,8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"
