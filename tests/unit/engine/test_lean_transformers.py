"""transformers without torch's compiler: the model computes the same, and the compiler is there for who asks later."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

from support.tiny_lm import logprobs, make_model, random_prompt, save_model

PROGRAM = textwrap.dedent(
    """
    import sys

    import torch

    from turnwise.engine.causal_lm import CausalLM
    from turnwise.engine.lean_transformers import lean_transformers

    with lean_transformers():
        CausalLM(sys.argv[1])
    heavy = {"torch._dynamo", "torch.distributed.tensor"} & set(sys.modules)
    assert not heavy, heavy
    assert torch.distributed.is_available()

    from transformers import AutoModelForCausalLM

    # The masks of this path want the real thing.
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    ids = torch.tensor([[int(each) for each in sys.argv[2].split()]])
    with torch.no_grad():
        logits = model(ids).logits[0].log_softmax(-1)
    print(*(float(row[token]) for row, token in zip(logits, ids[0, 1:])))
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)) == 1
    """
)


def test_a_model_computes_the_same_without_the_compiler(tmp_path: Path) -> None:
    model = make_model("qwen3")
    ids = random_prompt(np.random.default_rng(0), 20)
    path = save_model(model, tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), " ".join(map(str, ids))],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose([float(each) for each in done.stdout.split()], logprobs(model, ids, 1), atol=1e-5)
