"""Decoding kernels on a GPU, against attention of torch: rows of several pools, written and attended to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.engine.gpu import DEVICE, MARKS, ON_DEVICE
from turnwise.engine.batching.kv_cache import Geometry, KVPool

pytestmark = [*MARKS, ON_DEVICE]
# Pool, row, position of the new token; the last is padding.
PLACES = ((0, 1, 40), (1, 3, 150), (0, 4, 0), (1, 0, 191), (2, 0, 1500), (None, 0, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 16])
@pytest.mark.parametrize(
    ("geometry", "group", "window"),
    [
        (Geometry(3, 2, 128, 128), 6, None),
        (Geometry(3, 2, 64, 64), 4, 100),
        (Geometry(3, 1, 24, 24), 2, None),
        (Geometry(3, 2, 32, 16), 1, 5),
    ],
)
def test_rows_of_any_pool_are_written_and_attended_to(
    geometry: Geometry, group: int, window: int | None, parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnwise.engine.decoding import kernels

    monkeypatch.setattr(kernels, "_MOST_SPLITS", parts)
    torch.manual_seed(0)
    pools = [KVPool(geometry, size, dtype, torch.device(DEVICE), max_rows=8) for size in (64, 192, 2048)]
    lines = np.zeros((4, len(PLACES)), dtype=np.int64)
    for pool in pools:
        pool.resize(5, np.zeros(0, dtype=np.int64))
        for tensor in (*pool.flat_keys, *pool.flat_values):
            tensor.normal_()
    for token, (number, row, position) in enumerate(PLACES):
        lines[0, token] = position
        if number is not None:
            address, lines[2, token] = pools[number].addresses(np.array([row]))
            lines[1, token], lines[3, token] = address[0], pools[number].capacity
    rows = torch.from_numpy(lines).to(DEVICE)
    count, heads = len(PLACES), geometry.heads
    query = torch.randn(heads * group, count, geometry.key_dim, device=DEVICE, dtype=dtype).transpose(0, 1)
    key = torch.randn(heads, count, geometry.key_dim, device=DEVICE, dtype=dtype).transpose(0, 1)
    value = torch.randn(heads, count, geometry.value_dim, device=DEVICE, dtype=dtype).transpose(0, 1)
    within = 1e-5 if dtype == torch.float32 else 2e-2
    for layer in (0, 2):
        kernels.store(key, value, rows, geometry, layer)
        out = kernels.attend(query, rows, geometry, layer, None, window)
        assert (out.shape, out.dtype) == ((count, heads * group, geometry.value_dim), dtype)
        for token, (number, row, position) in enumerate(PLACES):
            if number is None:
                continue
            keys, values = pools[number].keys[layer][row], pools[number].values[layer][row]
            assert torch.equal(keys[:, position], key[token])
            assert torch.equal(values[:, position], value[token])
            first = 0 if window is None else max(0, position + 1 - window)
            seen = [cached[:, first : position + 1].float().repeat_interleave(group, 0) for cached in (keys, values)]
            scores = (seen[0] @ query[token].float().unsqueeze(2)).squeeze(2) * geometry.key_dim**-0.5
            expected = (scores.softmax(-1).unsqueeze(1) @ seen[1]).squeeze(1)
            torch.testing.assert_close(out[token].float(), expected, atol=within, rtol=within)
