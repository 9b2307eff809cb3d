"""A model's weights by the names of its checkpoint, which transformers renames, fuses or transposes when it loads.

The experts of a mixture, for one, are a matrix each in the checkpoint and one tensor in the model. Weights on their way
to servers and to disk have the checkpoint's names, which other engines know.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from turnwise.errors import FormatError

TensorType = tuple[torch.dtype, tuple[int, ...]]


class CheckpointNames:
    """Converts the weights of a model to the tensors of its checkpoint and back, one parameter at a time.

    Attributes:
        parts: The names in the checkpoint of what each parameter or saved buffer is made of, by its name in the model.
        types: Type and shape of each tensor of the checkpoint, by name.
    """

    def __init__(self, model: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Read the names of weights.

        Args:
            model: A model of transformers, on any device.
            weights: Those of its parameters and saved buffers that are converted, by name; only their type and shape
                are read.

        Raises:
            FormatError: A tensor of the checkpoint is made of more than one parameter.
        """
        self._model = model
        conversions = model.__dict__.get("_weight_conversions")
        if conversions is None:
            # What a model that was not loaded would be loaded with; no prefix of its names was lost.
            mapping = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [conversion for conversion in mapping if not isinstance(conversion, PrefixChange)]
        self._renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        self._converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        self.parts: dict[str, tuple[str, ...]] = {}
        self.types: dict[str, TensorType] = {}
        # Those that are only renamed, if at all.
        self._unconverted: set[str] = set()
        for name, tensor in weights.items():
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            split = self.split(name, meta)
            if shared := self.types.keys() & split:
                raise FormatError(
                    f"{type(model).__name__} has {name} and other parameters in the checkpoint's {min(shared)}: its "
                    "weights cannot be sent one after the other"
                )
            self.parts[name] = tuple(split)
            if [id(part) for part in split.values()] == [id(meta)]:
                self._unconverted.add(name)
            self.types |= {part: (whole.dtype, tuple(whole.shape)) for part, whole in split.items()}

    def split(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the checkpoint's tensors of a parameter, as views of it where that is possible."""
        if name in self._unconverted:
            return dict.fromkeys(self.parts[name], tensor)
        split: dict[str, torch.Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return split

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a parameter from the tensors of a checkpoint; it is one of these where nothing is converted."""
        if name in self._unconverted:
            return tensors[self.parts[name][0]]
        converter = None
        for part in sorted(self.parts[name], key=dot_natural_key):
            _, pattern = rename_source_key(part, self._renamings, self._converters)
            if pattern is None:
                return tensors[part]
            if converter is None:
                matching = (converter for converter in self._converters if pattern in converter.source_patterns)
                converter = deepcopy(next(matching))
            converter.add_tensor(name, part, pattern, tensors[part])
        assert converter is not None, "a parameter has parts"
        joined = converter.convert(name, model=self._model, config=self._model.config)[name]
        whole: torch.Tensor = joined[0] if isinstance(joined, list) else joined
        return whole
