"""The whole weights of a policy, adapters merged, as its checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.engine.accelerator import on_cpu
from turnwise.engine.checkpoint_names import CheckpointNames, TensorType
from turnwise.engine.weights import WeightStream
from turnwise.errors import FormatError, TrainError
from turnwise.trainer.model.lora import LoRA, bare


class PolicyWeights:
    """The parameters and saved buffers of a model, tied ones once, whose adapters are merged when they are read.

    Attributes:
        names: Converts them to the tensors of the checkpoint.
    """

    def __init__(self, model: Any, lora: LoRA | None) -> None:
        """Note the tensors of a model, which may be sharded.

        Raises:
            TrainError: They cannot be sent one after the other.
        """
        self._lora = lora
        self._tensors: dict[str, Tensor] = {}
        with bare(lora):
            state = model.state_dict(keep_vars=True)
        seen = set()
        for name, tensor in state.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self._tensors[name] = tensor
        try:
            self.names = CheckpointNames(model, self._tensors)
        except FormatError as error:
            raise TrainError(f"model.path: {error}") from error

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the parameters in the bare model."""
        return iter(self._tensors)

    def parts(
        self, parameter: str, gathered: Callable[[Tensor], Tensor] = Tensor.detach, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of the checkpoint that a parameter has.

        They are live where the parameter is neither fused, adapted nor rounded: copy to keep.

        Args:
            parameter: Its name in the bare model.
            gathered: Makes a whole tensor of a sharded one.
            dtype: What parameters are rounded to; saved buffers are not. None for their own.
        """
        tensor = self._tensors[parameter]
        rounds = dtype is not None and isinstance(tensor, nn.Parameter)
        if self._lora is None:
            # A shard is rounded first: half of the bytes are gathered then.
            whole = gathered(tensor.detach().to(dtype) if rounds else tensor)
        else:
            whole = self._lora.whole_tensor(parameter, tensor, gathered)
            whole = whole.to(dtype) if rounds else whole
        return self.names.split(parameter, whole)

    def types(self, dtype: torch.dtype | None = None) -> dict[str, TensorType]:
        """Return type and shape of each tensor of the checkpoint, as :meth:`parts` makes them."""
        # Frozen matrices in bfloat16 are read as float32.
        bits = {torch.bfloat16: torch.float32}
        types = {part: (bits.get(kind, kind), shape) for part, (kind, shape) in self.names.types.items()}
        for parameter, tensor in self._tensors.items():
            if dtype is not None and isinstance(tensor, nn.Parameter):
                types |= {part: (dtype, types[part][1]) for part in self.names.parts[parameter]}
        return types

    def read(self, dtype: torch.dtype | None = None) -> WeightStream:
        """Return (name, tensor) of all tensors of the checkpoint, each parameter's when asked for."""
        # In main memory each is rounded piece by piece where it is written; of a fused one, parts are copied.
        unsplit = {
            name for name, tensor in self._tensors.items() if on_cpu(tensor.device) and len(self.names.parts[name]) == 1
        }
        parts = (self.parts(name, dtype=None if name in unsplit else dtype) for name in self)
        return WeightStream(self.types(dtype), (pair for part in parts for pair in part.items()))
