"""Rows as datasets publish them, written by hand: the columns and types are those of the data, the contents are short.

Where the schemas are published:

- SWE-bench, Lite, Verified: the cards of princeton-nlp/SWE-bench and SWE-bench_Verified (``difficulty`` is Verified's);
  the lists of tests are texts of JSON.
- SWE-Gym: the card of SWE-Gym/SWE-Gym: the columns of SWE-bench, lists of tests are lists.
- SWE-smith: the card of SWE-bench/SWE-smith-cpp and SWE-smith-py.
- R2E-Gym: the card of R2E-Gym/R2E-Gym-Subset (as in PrimeIntellect/R2E-Gym-Subset-Validated).
- Nemotron SWE: NVIDIA-NeMo/Gym, ``responses_api_agents/swe_agents``: its app reads ``metadata`` of the row.
- HumanEval: openai/openai_humaneval. MBPP: the cards of google-research-datasets/mbpp, full and sanitized.
- LiveCodeBench: ``dataset_info.json`` of livecodebench/code_generation_lite.
- GSM8K: openai/gsm8k. MATH: the cards of hendrycks/competition_math and HuggingFaceH4/MATH-500.
- BFCL: ``bfcl_eval/data`` of github.com/ShishirPatil/gorilla and its README.
"""

import json
from pathlib import Path
from typing import Any

DIFF = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"

SWE_BENCH: dict[str, Any] = {
    "repo": "pallets/flask",
    "instance_id": "pallets__flask-4045",
    "base_commit": "d8c37f43724cd9fb0870f77877b7c4c7e38a19e0",
    "patch": DIFF.format("src/flask/blueprints.py"),
    "test_patch": DIFF.format("tests/test_blueprints.py"),
    "problem_statement": "Raise error when blueprint name contains a dot",
    "hints_text": "",
    "created_at": "2021-05-13T21:32:41Z",
    "version": "2.0",
    "FAIL_TO_PASS": '["tests/test_blueprints.py::test_dotted_name_not_allowed"]',
    "PASS_TO_PASS": '["tests/test_blueprints.py::test_blueprint_prefix_slash"]',
    "environment_setup_commit": "4346498c85848c53843b810537b83a8f6124c9d3",
}
SWE_BENCH_VERIFIED = {**SWE_BENCH, "difficulty": "<15 min fix"}
SWE_GYM = {
    **{key: value for key, value in SWE_BENCH.items() if key != "environment_setup_commit"},
    "repo": "getmoto/moto",
    "instance_id": "getmoto__moto-5752",
    "FAIL_TO_PASS": ["tests/test_ssm/test_ssm_boto3.py::test_get_parameters_by_path"],
    "PASS_TO_PASS": ["tests/test_ssm/test_ssm_boto3.py::test_describe_parameters"],
}
SWE_SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "patch": DIFF.format("oauthlib/common.py"),
    "FAIL_TO_PASS": ["tests/test_common.py::test_a"],
    "PASS_TO_PASS": ["tests/test_other.py::test_b"],
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "problem_statement": "Encoding of parameters is broken",
}
R2E_GYM = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:f0d74880deec8fcd982bce639c93c5e130d41198",
    "commit_hash": "f0d74880deec8fcd982bce639c93c5e130d41198",
    "parsed_commit_content": "{}",
    "execution_result_content": "{}",
    "modified_files": ["aiohttp/helpers.py"],
    "modified_entity_summaries": [],
    "relevant_files": ["aiohttp/helpers.py"],
    "num_non_test_files": 1,
    "num_non_test_func_methods": 1,
    "num_non_test_lines": 3,
    "prompt": "what the problem statement was made from",
    "problem_statement": "Cookies are lost",
    "expected_output_json": '{"TestHelpers.test_cookies": "PASSED"}',
}
NEMOTRON_SWE = {
    "responses_create_params": {
        "input": [],
        "metadata": {
            "instance_id": SWE_GYM["instance_id"],
            "base_commit": SWE_GYM["base_commit"],
            "dataset_name": "SWE-Gym/SWE-Gym",
            "split": "train",
            "problem_statement": SWE_GYM["problem_statement"],
            "golden_patch": SWE_GYM["patch"],
            "instance_dict": json.dumps(SWE_GYM),
        },
    },
    "agent_ref": {"type": "responses_api_agents", "name": "swe_agents_train"},
}
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'def double(number: int) -> int:\n    """Return twice the number.\n    >>> double(2)\n    4\n    """\n',
    "canonical_solution": "    return 2 * number\n",
    "test": "\nMETADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "double",
}
MBPP = {
    "task_id": 900,
    "text": "Write a function to find the larger of two numbers.",
    "code": "def larger(a, b):\r\n  return a if a > b else b",
    "test_list": ["assert larger(1, 2) == 2", "assert larger(5, 3) == 5"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
MBPP_SANITIZED = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 901,
    "prompt": "Write a function to find the larger of two numbers.",
    "code": MBPP["code"],
    "test_imports": ["import math"],
    "test_list": ["assert larger(1, math.inf) == math.inf"],
}
LIVECODEBENCH = {
    "question_title": "A. Sum",
    "question_content": "Read two whole numbers and print their sum.",
    "platform": "codeforces",
    "question_id": "1899_A",
    "contest_id": "1899",
    "contest_date": "2023-08-21T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": '[{"input": "1 2\\n", "output": "3\\n", "testtype": "stdin"}]',
    "private_test_cases": '[{"input": "-1 1\\n", "output": "0\\n", "testtype": "stdin"}]',
    "metadata": "{}",
}
GSM8K = {
    "question": "Ana has 3 bags of 4 apples and eats 2. How many are left?",
    "answer": "She has 3*4=<<3*4=12>>12 apples.\nShe has 12-2=<<12-2=10>>10 left.\n#### 10",
}
MATH = {
    "problem": "What is $\\frac{1}{2} + \\frac{1}{4}$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "With the denominator 4, it is $\\frac{2}{4} + \\frac{1}{4} = \\boxed{\\frac{3}{4}}$.",
}
MATH_500 = {
    "problem": MATH["problem"],
    "solution": MATH["solution"],
    "answer": "\\frac{3}{4}",
    "subject": "Prealgebra",
    "level": 1,
    "unique_id": "test/prealgebra/900.json",
}
BFCL = {
    "id": "simple_python_0",
    "question": [[{"role": "user", "content": "How large is a triangle with base 10 and height 5?"}]],
    "function": [
        {
            "name": "geometry.triangle_area",
            "description": "Calculate the area of a triangle.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "base": {"type": "integer", "description": "The base."},
                    "height": {"type": "float", "description": "The height."},
                    "unit": {"type": "string", "description": "The unit of measure."},
                    "marks": {"type": "tuple", "items": {"type": "any"}, "description": "Any marks."},
                },
                "required": ["base", "height"],
            },
        }
    ],
}
BFCL_ANSWER = {
    "id": "simple_python_0",
    "ground_truth": [
        {"geometry.triangle_area": {"base": [10], "height": [5], "unit": ["units", ""], "marks": ["", []]}}
    ],
}

ONE_ROW: dict[str, list[dict[str, Any]]] = {
    "swe-bench": [SWE_BENCH, SWE_BENCH_VERIFIED],
    "swe-gym": [SWE_GYM],
    "swe-smith": [SWE_SMITH],
    "r2e-gym": [R2E_GYM],
    "nemotron-swe": [NEMOTRON_SWE],
    "humaneval": [HUMANEVAL],
    "mbpp": [MBPP, MBPP_SANITIZED],
    "livecodebench": [LIVECODEBENCH],
    "gsm8k": [GSM8K],
    "math": [MATH, MATH_500],
}
"""The rows of tables, by format."""


def write_bfcl(folder: Path) -> Path:
    """Write a file of questions, with one on another subject, and the answers beside it. Returns the former."""
    (folder / "possible_answer").mkdir(parents=True)
    name = "BFCL_v4_simple_python.json"
    unmet = {**BFCL, "id": "irrelevance_0", "question": [[{"role": "user", "content": "Who painted this?"}]]}
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in (BFCL, unmet)))
    (folder / "possible_answer" / name).write_text(json.dumps(BFCL_ANSWER) + "\n")
    return folder / name
