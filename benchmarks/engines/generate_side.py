"""``transformers``' own ``generate``, with the log-probability of each sampled id as a user who trains needs it.

Settings:
    chunks: Into how many calls the requests are split (a batch runs until its longest row has its tokens).
    order: By what they are sorted before that: ``none``, ``prompt`` (its length) or ``new`` (how many ids each will
        get, which a user knows only where nothing ends a completion early).
    cache: ``cache_implementation``, or None for the default, a DynamicCache.
    logprobs: ``logits`` (``output_logits``, then log-softmax at the sampled ids) or ``processor`` (a LogitsProcessor
        that keeps the one number per id, so that no logits are kept).
    share: For several samples per prompt: read each prompt once, repeat its cache, and hand that to ``generate``
        (instead of ``num_return_sequences``).
    expand: For several samples per prompt without ``share``: ``num_return_sequences`` or ``rows``.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from engines.worker import Done, Work
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

DEFAULTS: dict[str, Any] = {
    "chunks": 1,
    "order": "none",
    "cache": None,
    "logprobs": "logits",
    "share": False,
    "expand": "num_return_sequences",
}
_PAD = 0


class Keep(LogitsProcessor):
    """Keeps the log-probability of each sampled id when the step after it begins."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self._before: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.finish(input_ids)
        self._before = scores
        return scores

    def finish(self, input_ids: torch.Tensor) -> None:
        if self._before is not None:
            self.kept.append(_at(self._before, input_ids[:, -1:]))


def _at(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)


class GenerateSide:
    """A model whose ``generate`` is called once per chunk."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().requires_grad_(False)

    @torch.inference_mode()
    def run(self, work: Work) -> Done:
        setting = {**DEFAULTS, **work.setting}
        count = len(work.prompts)
        places = list(range(count))
        if setting["order"] == "prompt":
            places.sort(key=lambda place: len(work.prompts[place]))
        elif setting["order"] == "new":
            places.sort(key=lambda place: work.new[place])
        size = -(-count // setting["chunks"])
        tokens: list[Any] = [()] * (count * work.samples)
        logprobs: list[Any] = [()] * (count * work.samples)
        for start in range(0, count, size):
            chunk = places[start : start + size]
            new = [work.new[place] for place in chunk]
            sampled, scores = self._generate([work.prompts[place] for place in chunk], max(new), work, setting)
            for row, place in enumerate(chunk):
                for sample in range(work.samples):
                    source, target = row * work.samples + sample, place * work.samples + sample
                    tokens[target] = sampled[source, : new[row]]
                    logprobs[target] = scores[source, : new[row]]
        return Done(tokens, logprobs)

    def _generate(self, prompts: Any, new: int, work: Work, setting: Any) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), _PAD)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        options: dict[str, Any] = {}
        samples = work.samples
        if setting["share"]:
            cache = DynamicCache(config=self.model.config)
            # The last prompt id is left to generate: its logits are the first to be sampled from.
            self.model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(samples)
            options["past_key_values"] = cache
        if setting["share"] or (samples > 1 and setting["expand"] == "rows"):
            ids, mask = ids.repeat_interleave(samples, 0), mask.repeat_interleave(samples, 0)
            samples = 1
        keep = Keep()
        if setting["logprobs"] == "processor":
            options["logits_processor"] = LogitsProcessorList([keep])
        config = GenerationConfig(
            do_sample=not work.greedy,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            num_return_sequences=samples,
            cache_implementation=setting["cache"],
            pad_token_id=_PAD,
            output_logits=setting["logprobs"] == "logits",
            return_dict_in_generate=True,
        )
        out = self.model.generate(ids, attention_mask=mask, generation_config=config, **options)
        sampled = out.sequences[:, longest:]
        if setting["logprobs"] == "processor":
            keep.finish(out.sequences)
            return sampled, torch.cat(keep.kept, dim=1)
        steps = [_at(logits, sampled[:, step : step + 1]) for step, logits in enumerate(out.logits)]
        return sampled, torch.cat(steps, dim=1)

    def describe(self) -> dict[str, Any]:
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
            "transformers": importlib.metadata.version("transformers"),
            "torch": importlib.metadata.version("torch"),
        }


@torch.inference_mode()
def score(side: GenerateSide, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each row's ids after ``start``, log-probabilities and how far its two best ids lie apart."""
    logprobs, gaps = [], []
    for row in rows:
        ids, start = torch.tensor(row["ids"]), row["start"]
        scaled = side.model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
        best = scaled.topk(2, dim=-1).values
        logprobs.append(scaled.gather(1, ids[start:, None])[:, 0].tolist())
        gaps.append((best[:, 0] - best[:, 1]).tolist())
    return {"logprobs": logprobs, "gaps": gaps}


def load(model: str) -> GenerateSide:
    return GenerateSide(model)
