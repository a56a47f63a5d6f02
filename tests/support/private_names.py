"""Private names of other libraries that tcemu uses, by file.

The tests of torch and of Triton resolve theirs, so that a release without one is seen at once; those of JAX have tests of their own.
"""

PRIVATE_NAMES = {
    "tcemu/base/interrupts.py": ["os._exit"],
    "tcemu/base/jax_internals.py": ["tracer._trace"],
    "tcemu/cli.py": ["_command_parser(root, name)._actions", "argparse._SubParsersAction", "os._exit", "root._actions"],
    "tcemu/faces/commands/verify_commands.py": ["os._exit"],
    "tcemu/faces/torch/cpu_formulas.py": ["func._schema"],
    "tcemu/faces/torch/exact_operations.py": ["func._schema"],
    "tcemu/faces/torch/function_choices.py": [
        "torch.ops.aten._fused_rms_norm",
        "torch.ops.aten._fused_rms_norm_backward",
        "torch.ops.aten._scaled_dot_product_attention_math",
        "torch.ops.aten._scaled_dot_product_cudnn_attention",
        "torch.ops.aten._scaled_dot_product_efficient_attention",
        "torch.ops.aten._scaled_dot_product_flash_attention",
    ],
    "tcemu/faces/torch/function_handlers.py": ["torch._C"],
    "tcemu/faces/torch/gpu_emulation.py": [
        "func._schema",
        "node._sequence_nr",
        "torch._C",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch.autograd._get_sequence_nr",
    ],
    "tcemu/faces/torch/module_emulation.py": ["tensor._base"],
    "tcemu/faces/torch/operators.py": ["torch._C", "torch._C._are_functorch_transforms_active"],
    "tcemu/faces/torch/watching.py": [
        "func._schema",
        "tensor.untyped_storage()._cdata",
        "torch._C",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
    ],
    "tcemu/kernels/triton/interpretation.py": ["interpreter._patch_lang", "interpreter._prepare_dot_scaled_operand"],
    "tcemu/kernels/triton/interpreter_floats.py": ["interpreter._get_np_dtype", "interpreter._interpreter", "interpreter._ir"],
    "tcemu/kernels/ptx/runtime/kernel_arguments.py": ["ctypes._Pointer", "kind._length_", "kind._type_"],
    "tcemu/uses/drift/recorder.py": [
        "func._schema",
        "node._sequence_nr",
        "sys._getframe",
        "torch._C",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch._C._get_sdp_priority_order",
        "torch.autograd._get_sequence_nr",
    ],
}


def names_of(library: str) -> list[str]:
    """The names that begin with a library's own, as "torch._C._current_graph_task_id"."""
    return sorted({name for names in PRIVATE_NAMES.values() for name in names if name.startswith(f"{library}.")})
