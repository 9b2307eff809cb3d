"""Random walks through vLLM's own grammars, run by vLLM's Python: jobs as JSON on stdin, results on stdout.

A job is a tag with a tokenizer, ids that it must allow one after the other, and how many walks to take at random.
"""

import json
import random
import sys
from typing import Any


def bits(mask: Any, size: int) -> list[int]:
    return [number for number in range(size) if (int(mask[0][number // 32]) >> (number % 32)) & 1]


def walk(matcher: Any, draw: random.Random, stops: list[int], likes: set[int], size: int, limit: int) -> list[int]:
    import xgrammar

    ids: list[int] = []
    mask = xgrammar.allocate_token_bitmask(1, size)
    while len(ids) < limit:
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = bits(mask, size)
        ends = [stop for stop in stops if stop in allowed]
        liked = [number for number in allowed if number in likes]
        pool = ends if ends and draw.random() < 0.7 else liked if liked and draw.random() < 0.8 else allowed
        ids.append(draw.choice(pool))
        assert matcher.accept_token(ids[-1]), f"{ids[-1]} was allowed and is not taken"
        if matcher.is_terminated():
            break
    return ids


def main() -> None:
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    compilers: dict[str, tuple[Any, int]] = {}
    results = []
    for job in json.load(sys.stdin):
        if job["tokenizer"] not in compilers:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=job["tokenizer"])
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
            # As servers are started here: VLLM_XGRAMMAR_CACHE_MB=0.
            grammar_compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=True, cache_limit_bytes=0)
            compilers[job["tokenizer"]] = (grammar_compiler, len(tokenizer))
        compiler, size = compilers[job["tokenizer"]]
        grammar = compiler.compile_structural_tag(job["tag"])
        refused = None
        matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=job["stops"])
        for position, token in enumerate(job["ids"]):
            mask = xgrammar.allocate_token_bitmask(1, size)
            matcher.fill_next_token_bitmask(mask, 0)
            if token not in bits(mask, size) or not matcher.accept_token(token):
                refused = position
                break
        walks = []
        for seed in range(job["walks"]):
            matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=job["stops"])
            ids = walk(matcher, random.Random(seed), job["stops"], set(job["likes"]), size, 200)
            walks.append([ids, matcher.is_terminated()])
        results.append({"refused": refused, "walks": walks})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
