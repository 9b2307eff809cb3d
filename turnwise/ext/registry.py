"""What ships, in the form of entry points: for each kind of plug-in the names, and what each refers to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ENVIRONMENTS: Final = "turnwise.ext.environments"
_FORMATS: Final = f"{_ENVIRONMENTS}.row_formats"
_FOREIGN: Final = "turnwise.ext.frameworks.foreign.core:foreign_class"

REFERENCES: Final[Mapping[str, Mapping[str, str]]] = {
    "environments": {
        "calculator": f"{_ENVIRONMENTS}.calculator:CalculatorEnv",
        "code": f"{_ENVIRONMENTS}.code:CodeEnv",
        "math": f"{_ENVIRONMENTS}.math:MathEnv",
        "swe": f"{_ENVIRONMENTS}.swe:SweEnv",
        "terminal": f"{_ENVIRONMENTS}.terminal:TerminalEnv",
    },
    # Functions from prefix and rest of a name, such as ``verifiers:TASKSET``, to its class.
    "environment_families": {"harbor": f"{_ENVIRONMENTS}.terminal:harbor_class", "verifiers": _FOREIGN},
    "rewards": {
        "symbolic": f"{_ENVIRONMENTS}.math.symbolic:Symbolic",
        "verl": "turnwise.ext.frameworks.compat.verl_reward:VerlScore",
    },
    "agents": {"blackbox": "turnwise.ext.programs:BlackBoxAgent"},
    "row_formats": {
        "gsm8k": f"{_FORMATS}:GSM8K",
        "humaneval": f"{_FORMATS}:HUMANEVAL",
        "livecodebench": f"{_FORMATS}:LIVECODEBENCH",
        "math": f"{_FORMATS}:MATH",
        "mbpp": f"{_FORMATS}:MBPP",
        "nemotron-swe": f"{_FORMATS}:NEMOTRON_SWE",
        "r2e-gym": f"{_FORMATS}:R2E_GYM",
        "swe-bench": f"{_FORMATS}:SWE_BENCH",
        "swe-gym": f"{_FORMATS}:SWE_BENCH",
        "swe-smith": f"{_FORMATS}:SWE_SMITH",
    },
    "loggers": {
        "tensorboard": "turnwise.ext.report.trackers:TensorBoardLogger",
        "wandb": "turnwise.ext.report.trackers:WandbLogger",
        "trackio": "turnwise.ext.report.trackers:TrackioLogger",
        "mlflow": "turnwise.ext.report.trackers:MLflowLogger",
    },
    "inference_engines": {"sglang": "turnwise.ext.engines.sglang:SGLangReplica"},
    "weight_transports": {
        "gloo": "turnwise.ext.transports.collective:GlooTransport",
        "ipc": "turnwise.ext.transports.collective:IPCTransport",
        "nccl": "turnwise.ext.transports.collective:NCCLTransport",
    },
    "run_files": {"turnwise": "turnwise.ext.checks.run_file:pack_run"},
    "commands": {
        "agents-md": "turnwise.ext.frameworks.agents_md:agents_md",
        "bisect": "turnwise.ext.checks.commands:bisect",
        "check-env": "turnwise.ext.checks.commands:check_env",
        "check-sandbox": "turnwise.ext.checks.commands:check_sandbox",
        "convert-config": "turnwise.ext.frameworks.commands:convert_config",
        "demos": "turnwise.ext.first_model.commands:demos",
        "explain": "turnwise.ext.explain.command:explain",
        "export-env": "turnwise.ext.frameworks.commands:export_env",
        "live": "turnwise.ext.live.command:live",
        "make-model": "turnwise.ext.first_model.commands:make_model",
        "mcp": "turnwise.ext.frameworks.commands:mcp",
        "mcp-runs": "turnwise.ext.frameworks.commands:mcp_runs",
        "replay": "turnwise.ext.checks.commands:replay",
        "report": "turnwise.ext.report.command:report",
        "reproduce": "turnwise.ext.checks.commands:reproduce",
        "timeline": "turnwise.ext.report.timeline:timeline",
        "tinker": "turnwise.ext.tinker.command:tinker",
    },
}
"""References as ``pkg.module:Name``, imported on first use."""
