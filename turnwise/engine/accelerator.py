"""What torch does on a device, whatever its kind: choice, memory, random states, collective operations.

torch is imported when it is needed: commands that only look at configurations start without it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from turnwise.errors import ConfigError
from turnwise.placement.devices import AUTO, CPU, CUDA, KINDS

if TYPE_CHECKING:
    import torch


def accelerator() -> str | None:
    """Return the kind of accelerator that torch has here; None without one."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; ``auto`` is the accelerator, or the CPU without one. It may not be there."""
    import torch

    return torch.device((accelerator() or CPU) if name == AUTO else name)


def require_device(name: str, key: str) -> torch.device:
    """Return the device of a name that a configuration key has.

    Raises:
        ConfigError: There is no such device here.
    """
    import torch

    try:
        device = resolve_device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{key} is {name!r}, which is not available here (auto picks one): {error}") from error
    return device


def main_memory() -> torch.device:
    """Return the CPU as a device."""
    import torch

    return torch.device(CPU)


def on_cpu(device: torch.device) -> bool:
    """Return whether tensors on a device are in main memory."""
    return device.type == CPU


def compiles_attention(device: torch.device) -> bool:
    """Return whether flex attention has compiled kernels on a device."""
    return device.type in KINDS and KINDS[device.type].compiles_attention


@cache
def _autocast_experts(kind: str) -> None:
    """Have autocast cast the operands of grouped matrix products, by which experts compute, as those of others."""
    import torch

    torch.library.register_autocast("aten::_grouped_mm", kind, torch.bfloat16)


def autocast(device: torch.device, compute_dtype: str) -> torch.autocast:
    """Return the context in which matrix products, those of experts included, compute in ``compute_dtype``."""
    import torch

    if enabled := compute_dtype == "bfloat16":
        _autocast_experts(device.type)
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def records_graphs(device: torch.device) -> bool:
    """Return whether launches of kernels can be recorded on a device, and repeated as one."""
    return device.type in KINDS and KINDS[device.type].records_graphs


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton is there, and its kernels can be recorded on a device."""
    return records_graphs(device) and importlib.util.find_spec("triton") is not None


class GraphMemory:
    """Memory that recorded graphs of a device share: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = _module().graph_pool_handle() if records_graphs(device) else None


def recorded(work: Callable[[], None], memory: GraphMemory) -> Callable[[], None]:
    """Run work, which reads and writes tensors at fixed addresses, and return a call that repeats its kernels.

    On a device without graphs the call is the work itself.
    """
    if memory.pool is None:
        work()
        return work
    module = _module()
    # What allocates or chooses kernels at its first call does so before the recording, on another stream.
    side = module.Stream(memory.device)
    side.wait_stream(module.current_stream(memory.device))
    with module.stream(side):
        work()
    module.current_stream(memory.device).wait_stream(side)
    graph = module.CUDAGraph()
    with module.graph(graph, pool=memory.pool, capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def avoid_planned_attention(device: torch.device) -> None:
    """Leave out attention kernels that are planned anew for each length: a plan takes longer than decoding a token."""
    import torch

    if device.type == CUDA:
        torch.backends.cuda.enable_cudnn_sdp(False)


def device_count() -> int:
    """Return the number of accelerators of this process; 0 without one."""
    import torch

    return torch.accelerator.device_count()


def use_device(number: int) -> None:
    """Make an accelerator the current one, by its number modulo their count."""
    import torch

    torch.accelerator.set_device_index(number % device_count())


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory."""
    import torch

    return int(torch.accelerator.get_memory_info(device)[1])


def peak_bytes(device: torch.device | None = None) -> int:
    """Return the most bytes allocated so far on an accelerator (default: the current one); 0 without one."""
    import torch

    if accelerator() is None or (device is not None and on_cpu(device)):
        return 0
    return int(torch.accelerator.max_memory_allocated(device))


def used_bytes() -> int:
    """Return the bytes in use on the accelerator that this process uses, of all processes; 0 where it uses none."""
    import torch

    if accelerator() is None or not _module().is_initialized():
        return 0
    free, total = torch.accelerator.get_memory_info()
    return int(total - free)


def release_cached() -> None:
    """Give memory that torch keeps for later back to the accelerator."""
    import torch

    if accelerator() is not None:
        torch.accelerator.empty_cache()


def collectives(kind: str) -> str:
    """Return the backend of collective operations on a kind of device, for messages."""
    return KINDS[kind].collectives if kind in KINDS else "gloo"


def has_collectives(kind: str) -> bool:
    """Return whether this torch was built with the backend of a kind."""
    import torch.distributed as dist

    return dist.is_available() and bool(dist.is_backend_available(collectives(kind)))


def process_group_backend(kind: str) -> str:
    """Return the backends of a process group whose tensors are on a kind of device, and in main memory."""
    return collectives(kind) if kind == CPU else f"{CPU}:{collectives(CPU)},{kind}:{collectives(kind)}"


def random_states() -> list[torch.Tensor]:
    """Return the states of the random generators of all accelerators."""
    return list(_module().get_rng_state_all()) if accelerator() is not None else []


def restore_random_states(states: Sequence[torch.Tensor]) -> None:
    """Restore the states of as many accelerators; those of another number of them are left out."""
    if accelerator() is not None and len(states) == device_count():
        _module().set_rng_state_all(list(states))


def _module() -> Any:
    import torch

    return torch.get_device_module(accelerator())
