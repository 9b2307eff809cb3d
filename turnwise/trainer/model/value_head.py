"""The value head of a critic, on a model's hidden states, and its file beside a saved model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.errors import CheckpointError
from turnwise.placement.devices import CPU

HEAD_FILE = "critic.pt"


class ValueHead(nn.Module):
    """States of shape [N, hidden] to values of shape [N], in float32. Initialised to zero."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        # Not drawn before it is set to zero: nothing random in a run may depend on whether it has a critic.
        self.linear: nn.Linear = nn.utils.skip_init(nn.Linear, hidden, 1)  # type: ignore[no-untyped-call]
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the values."""
        values: Tensor = self.linear(states.float())[:, 0]
        return values

    def get_output_embeddings(self) -> nn.Linear:
        """Return the layer that an optimizer treats as the output matrix."""
        return self.linear


class ValueModel(nn.Module):
    """A model and its value head as one module, without the language-model head."""

    def __init__(self, model: Any, head: ValueHead) -> None:
        super().__init__()
        self.model = model
        self.head = head
        output = model.get_output_embeddings()
        if output.weight is not model.get_input_embeddings().weight:
            output.requires_grad_(False)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the layer that an optimizer treats as the output matrix."""
        return self.head.linear


def read_state(directory: Path, name: str) -> dict[str, Any]:
    """Read a file of tensors beside a saved model.

    Raises:
        CheckpointError: The file is missing or unreadable.
    """
    file = directory / name
    if not file.is_file():
        raise CheckpointError(f"checkpoint {directory} lacks {name}")
    try:
        state: dict[str, Any] = torch.load(file, map_location=CPU, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return state


def open_head(model: Any, directory: Path | None) -> ValueHead:
    """Return the value head for a model: the one that is saved in a directory, or a new one."""
    head = ValueHead(model.get_output_embeddings().weight.shape[1])
    if directory is not None and (directory / HEAD_FILE).is_file():
        head.load_state_dict(read_state(directory, HEAD_FILE)["head"])
    return head
