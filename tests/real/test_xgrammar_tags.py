"""The grammars of every chat format, as vLLM's own library reads them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.chat.model_dirs import FAMILIES, model_dir
from support.engine.grammar_walks import CALLS, HELD, SAYING, TOOLS, WITHOUT_CALLS, check, says, walker
from support.engine.vllm_server import vllm_python
from turnwise.types import as_ids

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[1] / "support" / "engine" / "xgrammar_walk.py"


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    job_list = []
    for family in FAMILIES:
        walks = walker(family)
        file = str(model_dir(family) / "tokenizer.json")
        for rule, guide in HELD.items():
            if family in WITHOUT_CALLS and guide.calls:
                continue
            # What the template itself writes stands in the first place, and more than one call is allowed there only.
            call_ids: list[int] = []
            if rule == "required" and family in SAYING:
                message: Any = {"role": "assistant", "content": "", "tool_calls": CALLS[: max(says(family))]}
                call_ids = walks.renderer.completion(message, TOOLS).tolist()
            tag = walks.renderer.guides.tagged(guide, walks.prompt, TOOLS).tag
            likes = np.flatnonzero(walks.likes).tolist()
            job = {"tokenizer": file, "tag": tag, "stops": walks.stops, "ids": call_ids, "walks": 2, "likes": likes}
            job_list.append((family, rule, job))
    return job_list


def test_tokens_sampled_under_a_guide_keep_to_the_guide() -> None:
    job_list = jobs()
    done = subprocess.run(
        [vllm_python(), SCRIPT],
        input=json.dumps([job for _, _, job in job_list]).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    completed: dict[str, int] = dict.fromkeys(FAMILIES, 0)
    for (family, rule, job), result in zip(job_list, json.loads(done.stdout), strict=True):
        walks = walker(family)
        assert result["refused"] is None, (family, rule, walks.renderer.decode(as_ids(job["ids"][: result["refused"]])))
        for ids, complete in result["walks"]:
            if complete:
                completed[family] += 1
                check(rule, walks.renderer.parse(as_ids(ids), walks.prompt, TOOLS))
    assert min(completed.values()) > 0
