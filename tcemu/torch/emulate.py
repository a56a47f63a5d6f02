"""`emulate`: a torch module, its matrix products by a policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tcemu.emulation.policy import Policy
from tcemu.emulation.report import Entry, Report, positional, unused
from tcemu.torch.decisions import Decisions
from tcemu.torch.modes import Products
from tcemu.torch.surveys import Survey
from tcemu.torch.watching import Watcher

MARK = "_tcemu_emulation"
WEIGHTS = "parameters of the modules, and views of them"


class Emulation:
    """A model whose products are emulated, until `remove()`. Made by `emulate`. It is called as the model is, and is a context manager."""

    def __init__(self, model: torch.nn.Module, policy: Policy, convolutions: bool):
        self.model, self.decisions = model, Decisions(policy, convolutions)
        self._before: list[tuple[torch.nn.Module, Any]] = []
        for path, module in model.named_modules():
            own = vars(module).get("forward")
            if MARK in vars(module) or hasattr(own, MARK):
                self.remove()
                raise ValueError(f"emulate: {path or 'the model'} is emulated already; .remove() what emulate gave first")
            self._before.append((module, own))
            module.forward = self._around(path, module, module.forward)
        vars(model)[MARK] = self

    def _around(self, path: str, module: torch.nn.Module, forward: Callable) -> Callable:
        decisions, tag, is_root = self.decisions, self.decisions.tag, path == ""

        def within(*args: Any, **kwargs: Any) -> Any:
            if is_root and not decisions.is_planned:
                self._plan(args, kwargs)
            with Products(decisions, tag, path, module):
                return forward(*args, **kwargs)

        setattr(within, MARK, True)
        return within

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """What is replaced and what is left in a call with these arguments; nothing is computed, and no state of the model changes.

        The forward products. Those of a backward pass are by the recipes' own, and `tcemu.torch.watch` lists what else there is.
        Raises what the model raises where its course depends on values: there `tcemu.torch.watch` lists a run.
        """
        entries = self._survey(args, kwargs)
        if not self.decisions.is_planned:
            self.decisions.settle([entry.product for entry in entries if entry.product is not None])
            entries = self._survey(args, kwargs)
        for line in unused(self.decisions.policy, entries) + positional(entries):
            warnings.warn(f"emulate({type(self.model).__name__}): {line}", stacklevel=2)
        return Report(tuple(entries), WEIGHTS)

    def _plan(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("emulate: this policy must know all products before the first; call .report(...) once, then compile")
        self.report(*args, **kwargs)

    def _survey(self, args: tuple, kwargs: dict[str, Any]) -> list[Entry]:
        decisions, planned = self.decisions, self.decisions.is_planned
        watcher = Watcher()
        survey = Survey(watcher)
        decisions.is_planned, decisions.survey = True, survey  # as far as a survey goes
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as fake, watcher:
                given = pytree.tree_map_only(torch.Tensor, fake.from_tensor, (args, kwargs))
                self.model(*given[0], **given[1])
            return survey.entries
        finally:
            decisions.is_planned, decisions.survey = planned, None

    def remove(self) -> None:
        """The model as it was before."""
        for module, own in self._before:
            if own is None:
                vars(module).pop("forward", None)
            else:
                module.forward = own
        self._before.clear()
        if vars(self.model).get(MARK) is self:
            del vars(self.model)[MARK]

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"emulate({type(self.model).__name__}, {self.decisions.policy})"


def emulate(model: torch.nn.Module, policy: Policy, *, convolutions: bool = False) -> Emulation:
    """A torch model, in place, with every matrix product by the policy's choice, until `.remove()` of the result.

    policy: as `tcemu.emulate` takes it: a Recipe or its name, rules from patterns to choices, a function of a `Product`, or one of
    `tcemu.policies`; also `tcemu.torch.as_measured`. A choice is a Recipe, its name, a callable like `jax.lax.dot_general`, or None.
    A product's name is the path of its module, "/", and its kind: "layers.0.up/linear", "attention/scores"; where a kind repeats in one
    call of a module, ".1" and so on follow it. `parameters` are names of the state_dict. An operand that is a parameter, or a view of one,
    is a weight; others are activations.
    convolutions: whether the policy's choice holds for convolutions, as products of patches; without it they are left.

    The forward of each module is wrapped: hooks, parameters and the state_dict stay. Taken are linear, matmul in all its forms (@, mm, bmm,
    mv, dot, addmm, baddbmm, addbmm, addmv), einsum and tensordot, convolutions, scaled_dot_product_attention in torch's math form ("scores"
    and "values"), and nn.MultiheadAttention part by part; also what torch would do there in one kernel. The bias of a linear layer
    by a recipe is added before the result is rounded to its dtype. Kernels with other products, as nn.LSTM's, are left, and `.report()`
    lists them.
    Backward products are the recipe's own. Autocast holds: operands are brought to its dtype first. Works under
    `torch.compile(fullgraph=True)`, `torch.func` and in checkpoints of modules; a checkpoint around other functions computes their products
    again outside the modules, as they are. A recipe that rounds stochastically draws from torch's generator.
    A policy that replaces nothing, and a rule that fits no product, are said by a warning of `.report()`.
    Raises TypeError and ValueError as `tcemu.emulate`, and ValueError for a model that is emulated already.
    """
    return Emulation(model, policy, convolutions)
