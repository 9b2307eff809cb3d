"""The contract of weight writers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from turnwise.model.core import AdapterInfo, Replica, WeightManifest


class WeightWriter(ABC):
    """Brings a version of the weights to all replicas.

    Attributes:
        written_bytes: Bytes of all weights that were written so far. A version with the weights of the one before it
            adds none.
    """

    written_bytes: int = 0

    @abstractmethod
    async def sync(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        replicas: Sequence[Replica],
        version: int,
        *,
        adapter: AdapterInfo | None = None,
    ) -> WeightManifest:
        """Write the weights and have every replica load them; those of the version before only get the new number.

        Args:
            tensors: (Hugging Face name, tensor), read while this runs.
            replicas: The servers that load them.
            version: What they report from then on.
            adapter: What the tensors are where they are an adapter's; None: all weights.

        Returns:
            The manifest; what it names stays readable until the next ``sync`` has succeeded.

        Raises:
            InferenceError: A replica did not load them.
            TrainError: The weights cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Remove what was written. Closing twice is no error."""
