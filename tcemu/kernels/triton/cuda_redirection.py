"""Programs that name the device "cuda" on a machine without a GPU: their tensors are made on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tcemu.kernels.triton.device_properties import PROPERTIES, WARP_SIZE


@contextmanager
def cuda_on_cpu(capability: int, name: str, note_address: Callable[[Any, int], None] | None = None) -> Iterator[None]:
    """Let torch make tensors of the device "cuda" on the CPU, and answer questions about the device. Without torch it does nothing.

    A copy between the host and the device stays a copy, so that a kernel that writes one of the two leaves the other alone.

    Args:
        capability: Ten times the compute capability.
        name: Name of the GPU.
        note_address: Called with each tensor whose address is asked for, and the address.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        return "cpu" if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value

    copies = (torch.Tensor.cuda, torch.Tensor.cpu)

    class CudaOnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in copies:
                return args[0].clone()
            if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
                return True
            if func is torch.Tensor.data_ptr and note_address is not None:
                address = func(*args)
                note_address(args[0], address)
                return address
            moved_args, moved_kwargs = tuple(map(on_cpu, args)), {key: on_cpu(value) for key, value in kwargs.items()}
            named = any(x is not y for x, y in zip((*args, *kwargs.values()), (*moved_args, *moved_kwargs.values()), strict=True))
            result = func(*moved_args, **moved_kwargs)
            if func is torch.Tensor.to and named and result is args[0]:
                return result.clone()
            return result

    properties = SimpleNamespace(
        name=name, major=capability // 10, minor=capability % 10, multi_processor_count=PROPERTIES[capability].processors,
        warp_size=WARP_SIZE, total_memory=0,
    )  # fmt: skip
    answers = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "synchronize": lambda device=None: None,
        "empty_cache": lambda: None, "get_device_capability": lambda device=None: divmod(capability, 10),
        "get_device_name": lambda device=None: name, "get_device_properties": lambda device=None: properties,
        "set_device": lambda device: None,
    }  # fmt: skip
    with ExitStack() as stack:
        for attribute, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, attribute, answer))
        stack.enter_context(CudaOnCpu())
        yield
