"""Functions run by graphs that `torch.compile` wrote elsewhere: Dynamo and AOTAutograd capture a function here too, for its operands alone.

What a graph computes comes from the cache folder, which `tcemu.inductor` reads. The capture here says which tensors are its operands, what
becomes of its results, and how a backward graph takes part in autograd.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcemu.base.errors import NotModelled

RunGraph = Callable[[Any, tuple[torch.Tensor, ...]], tuple[Any, ...]]  # a graph and its operands to its results


def compile_with_graphs(function: Callable[..., Any], graphs: Any, run: RunGraph) -> Callable[..., Any]:
    """Return a function that calls the compiled graphs of a folder.

    Args:
        function: A module or a function, which is captured as one graph; or the `step` of an optimizer, which Dynamo captures in parts.
        graphs: Graphs of `tcemu.inductor`.
        run: Called with a graph and its operands.

    Returns:
        A function of the same arguments. It raises NotModelled where the folder has no graph for them.
    """
    capture = lambda captured, operands: _capture(captured, operands, graphs, run)
    optimizer, exceptions = find_optimizer(function), importlib.import_module("torch._dynamo.exc")
    compiled = torch.compile(function, backend=capture, fullgraph=optimizer is None, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        if optimizer is not None:
            _choose_as_on_gpu(optimizer)
        try:
            return compiled(*args, **kwargs)
        except exceptions.BackendCompilerFailed as error:
            raise error.inner_exception from None
        except exceptions.Unsupported as error:
            raise NotModelled(f"compiled: Dynamo captures no single graph of it (fullgraph=True): {error}") from error

    return call


def find_optimizer(function: Callable[..., Any]) -> torch.optim.Optimizer | None:
    """Return the optimizer whose `step` a function is, or None."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.optim.Optimizer) else None


def _choose_as_on_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the options that it has where `torch.compile` captures its step for parameters on a GPU.

    Source: PyTorch 2.11.0, torch/_dynamo/variables/optimizer.py (`_set_capturable`) and torch/optim/optimizer.py
    (`_default_to_fused_or_foreach`).
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
        if "capturable" in group and not any(p in optimizer.state for p in group["params"]):
            group["capturable"] = True


def _capture(captured: Any, operands: Sequence[torch.Tensor], graphs: Any, run: RunGraph) -> Any:
    """Return what runs a function that Dynamo has captured, in place of a compiler's code."""
    backends, autograd = map(importlib.import_module, ("torch._dynamo.backends.common", "torch._functorch.aot_autograd"))  # take seconds
    names, training = {node.name for node in captured.graph.nodes}, list[Any]()

    def boxed(graph: Any, nodes: Sequence[Any], keeps: Callable[[], bool] = bool) -> Any:
        def call(*given: torch.Tensor) -> tuple[Any, ...]:
            if keeps():  # retain_graph=True: a backward graph may write to what was saved
                given = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in given)
            return _check_results(graph, run(graph, given), nodes)

        return autograd.make_boxed_func(call)

    def find_inference(module: Any, given: Sequence[torch.Tensor]) -> Any:
        return boxed(graphs.find(given, len(_outputs(module)), names | _operators(module)), _outputs(module))

    def split(joint: Any, given: Sequence[Any], *, num_fwd_outputs: int, **_: Any) -> tuple[Any, Any]:
        primals, tangents = ([x for x in joint.graph.nodes if x.name.startswith(name)] for name in ("primals_", "tangents_"))
        results, gradients = _outputs(joint)[:num_fwd_outputs], _outputs(joint)[num_fwd_outputs:]
        types = [[x.meta["val"] for x in nodes] for nodes in (primals, tangents)]
        sources = names | _operators(joint)
        found = graphs.find_training(types[0], num_fwd_outputs, types[1], [x is not None for x in gradients], sources)
        training[:] = [(found.forward, results), (found.backward, gradients)]
        return _split(joint, primals, tangents, results, gradients, found.saved)

    return backends.aot_autograd(
        fw_compiler=lambda *_: boxed(*training[0]),
        bw_compiler=lambda *_: boxed(*training[1], keeps=torch._C._autograd._get_current_graph_task_keep_graph),
        inference_compiler=find_inference,
        partition_fn=split,
        keep_inference_input_mutations=True,
    )(captured, operands)


def _check_results(graph: Any, results: tuple[Any, ...], nodes: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results, those that are not saved among which have the shapes and dtypes that the model here gives."""
    for number, (x, node) in enumerate(zip(results, nodes, strict=False)):
        expected: Any = node.meta["val"] if isinstance(node, torch.fx.Node) else None
        if isinstance(x, torch.Tensor) and isinstance(expected, torch.Tensor) and (x.shape, x.dtype) != (expected.shape, expected.dtype):
            raise NotModelled(
                f"{graph.path.name}: result {number} is {x.dtype}{list(x.shape)}, and the model here gives {expected.dtype}"
                f"{list(expected.shape)}: the graph is another model's"
            )
    return results


def _operators(module: Any) -> set[str]:
    """Return the names of PyTorch's operators that a module calls, as "aten.gelu"."""
    return {str(x.target).rpartition(".")[0] for x in module.graph.nodes if isinstance(x.target, torch._ops.OpOverload)}


def _outputs(module: Any) -> list[Any]:
    return pytree.tree_leaves(module.graph.output_node().args)


def _split(
    joint: Any, primals: Sequence[Any], tangents: Sequence[Any], results: Sequence[Any], gradients: Sequence[Any], saved: Sequence[Any]
) -> tuple[Any, Any]:
    """Return a forward and a backward module with the operands and results of compiled graphs, as AOTAutograd's partitioners do.

    The modules compute nothing: AOTAutograd learns from them what it hands from the one graph to the other.

    Args:
        joint: Module with the forward and the backward pass.
        primals: Nodes of its operands.
        tangents: Nodes of the gradients of its results.
        results: Nodes of its results.
        gradients: Nodes of the gradients of its operands, or None.
        saved: Names and types of the saved tensors; a name of an operand is that operand.
    """
    with primals[0].meta["val"].fake_mode:
        values = {name: torch.empty_strided(x.shape, x.strides, dtype=x.dtype) for name, x in saved}
    values |= {x.name: x.meta["val"] for x in (*primals, *tangents)}

    def build(inputs: Sequence[str], outputs: Sequence[Any]) -> Any:
        graph = torch.fx.Graph()
        nodes = {name: graph.placeholder(name) for name in inputs}

        def find_node(output: Any) -> Any:
            name = str(getattr(output, "name", output or ""))
            if not name or name in nodes:
                return nodes.get(name, output)
            value = values[name] if name in values else output.meta["val"]
            node = graph.call_function(torch.ops.aten.empty_strided.default, (list(value.shape), list(value.stride())))
            node.meta["val"] = value
            return node

        for name, node in nodes.items():
            node.meta["val"] = values[name]
        graph.output(tuple(map(find_node, outputs)))
        return torch.fx.GraphModule(joint, graph)

    names = [name for name, _ in saved]
    return build([x.name for x in primals], [*results, *names]), build([*names, *(x.name for x in tangents)], gradients)
