"""Row formats of published datasets: which environment plays their rows, and what reads a row."""

from __future__ import annotations

from typing import Final

from turnwise.tasks.formats import RowFormat

_PACKAGE: Final = "turnwise.ext.environments"
_SWE_FIELDS: Final = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch")
_TEST_FIELDS: Final = ("FAIL_TO_PASS", "PASS_TO_PASS")

GSM8K: Final = RowFormat("math", f"{_PACKAGE}.math:row", ("question", "answer"))
HUMANEVAL: Final = RowFormat("code", f"{_PACKAGE}.code:row", ("task_id", "prompt", "test", "entry_point"))
LIVECODEBENCH: Final = RowFormat(
    "code",
    f"{_PACKAGE}.code:row",
    ("question_id", "question_content", "public_test_cases", "private_test_cases", "starter_code", "metadata"),
)
MATH: Final = RowFormat("math", f"{_PACKAGE}.math.env:competition_row", ("problem", "solution"))
MBPP: Final = RowFormat("code", f"{_PACKAGE}.code:row", ("task_id", "text|prompt", "code", "test_list"))
NEMOTRON_SWE: Final = RowFormat("swe", f"{_PACKAGE}.swe.rows:nemo_gym_row", ("responses_create_params",))
R2E_GYM: Final = RowFormat(
    "swe",
    f"{_PACKAGE}.swe.rows:checked_row",
    ("repo_name", "docker_image", "commit_hash", "problem_statement", "expected_output_json"),
)
SWE_BENCH: Final = RowFormat("swe", f"{_PACKAGE}.swe.rows:checked_row", (*_SWE_FIELDS, *_TEST_FIELDS))
SWE_SMITH: Final = RowFormat(
    "swe",
    f"{_PACKAGE}.swe.rows:checked_row",
    ("instance_id", "repo", "patch", "image_name", "problem_statement", *_TEST_FIELDS),
)
