"""The commands that make evaluations (``eval``, ``rescore``) and read files of runs (``compare``, ``view``, ...)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from turnwise.cli.options import Overrides

if TYPE_CHECKING:
    from turnwise.evaluation.config import EvalConfig
    from turnwise.evaluation.metrics import EvalResult


def view(
    source: Annotated[Path, typer.Argument(help="Run directory, or file of trajectories.", show_default=False)],
    task: Annotated[str | None, typer.Option("--task", help="Only this task.")] = None,
    trajectory: Annotated[str | None, typer.Option("--id", help="Only the trajectory with this id.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Only this partition: train or val.")] = None,
    number: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of trajectories, newest last.")] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also show ids, logprobs and weight versions.")] = False,
) -> None:
    """Show trajectories: messages, tool calls, rewards, forks and stop reasons."""
    from turnwise.evaluation.view import Selection, show

    show(source, Selection(task=task, trajectory=trajectory, partition=partition, number=number), tokens=tokens)


def audit(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    recompute: Annotated[
        bool, typer.Option(help="Recompute logprobs for weight versions with a checkpoint on disk.")
    ] = True,
    at_most: Annotated[
        int, typer.Option("--at-most", min=1, help="Recompute at most this many turns per weight version.")
    ] = 256,
) -> None:
    """Verify from a run's files that tokens were recorded and trained exactly; exit 1 on a contradiction."""
    from turnwise.trainer.run.audit import audit_run

    if not audit_run(run, recompute=recompute, at_most=at_most).sound:
        raise typer.Exit(1)


def timeline(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    part: Annotated[
        int, typer.Option("--part", help="Which process of the run, from 0; -1 is the last one.", show_default=True)
    ] = -1,
    begin: Annotated[float | None, typer.Option("--from", help="Seconds since that process began.")] = None,
    end: Annotated[float | None, typer.Option("--to", help="Seconds since that process began.")] = None,
    width: Annotated[int, typer.Option("--width", min=20, help="Columns of the time axis.")] = 100,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a trace for Perfetto or chrome://tracing to this file instead."),
    ] = None,
) -> None:
    """Draw what ran when: rollouts, the trainer, weights on their way, evaluations and checkpoints."""
    from turnwise.errors import TurnwiseError
    from turnwise.trainer.observe.timeline import Window, draw_text, read_timeline, trace_json

    parts = read_timeline(run / "timeline.jsonl")
    if not -len(parts) <= part < len(parts):
        raise TurnwiseError(f"--part is {part}, but {run} had {len(parts)} processes: 0 is the first, -1 the last")
    window = Window.of(parts[part], (begin, end))
    if trace is None:
        typer.echo("\n".join(draw_text(window, width=width)))
        return
    trace.write_bytes(trace_json(window))
    typer.echo(f"written: {trace}")


def compare(
    before: Annotated[Path, typer.Argument(help="Directory of an evaluation.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="Directory of another one on the same tasks.", show_default=False)],
    metric: Annotated[Literal["success", "reward"], typer.Option("--metric", help="What is compared.")] = "success",
    part: Annotated[
        Literal["sampled", "greedy"] | None,
        typer.Option("--part", help="Sampled or greedy episodes; by default sampled where there are any."),
    ] = None,
    number: Annotated[int, typer.Option("--n", "-n", min=0, help="Most tasks listed of each kind of change.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, with all changed tasks.")] = False,
) -> None:
    """Compare two evaluations task by task: difference, 95 % interval, paired test, tasks that changed sides."""
    from rich.console import Console

    from turnwise.evaluation.comparison import compare, comparison_table, read_scores

    result = compare(*(read_scores(folder, metric=metric, part=part) for folder in (before, after)))
    if as_json:
        typer.echo(json.dumps(result.to_json()))
        return
    Console().print(comparison_table(result, (str(before), str(after)), limit=number))


def rescore(
    source: Annotated[Path, typer.Argument(help="Directory of an evaluation or a run.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write; the same command continues it.")],
    scorer: Annotated[
        str,
        typer.Option("--scorer", help="Shipped reward function, pkg.mod:function, file.py:function or rubric.yaml."),
    ],
    tasks: Annotated[
        str | None, typer.Option("--tasks", "-t", help="Tasks, for functions of their data; by default the run's.")
    ] = None,
    partition: Annotated[
        Literal["train", "val"] | None, typer.Option("--partition", help="Only trajectories of this partition.")
    ] = None,
    success_reward: Annotated[
        float, typer.Option("--success-reward", help="Minimum reward of a successful episode.")
    ] = 1.0,
) -> None:
    """Apply a reward function, rubric or judge to recorded trajectories, without a model."""
    from rich.console import Console

    from turnwise.evaluation.metrics import result_table
    from turnwise.evaluation.rescore import RescoreSettings, run_rescore

    result = run_rescore(RescoreSettings(source, out, scorer, tasks, partition, success_reward))
    Console().print(result_table(result, f"{source} by {scorer}"))
    typer.echo(f"written to {out}")


def replay(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of an evaluation or a run.", show_default=False)
    ],
    number: Annotated[int | None, typer.Option("--n", "-n", min=1, help="Only the newest N episodes.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="Only episodes of this task.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Compare what the environment says varies (times, paths), too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Play recorded completions against their environments again; exit 1 where a tool, reward or state differs."""
    from turnwise.evaluation.replay.replay import replay_run

    found = replay_run(source, number=number, task=task, strict=strict)
    if as_json:
        differing = [each.to_json() for each in found.divergences]
        counts = {"episodes": found.episodes, "left_out": found.left_out, "varied": found.varied}
        typer.echo(json.dumps({**counts, "divergences": differing}))
    else:
        for each in found.divergences:
            typer.secho(str(each), fg="red")
        for reason, count in found.left_out.most_common():
            typer.echo(f"left out: {count} episodes, {reason}")
        for name, count in found.varied.most_common():
            typer.echo(f"varied, as the environment says: {name} in {count} messages")
        typer.echo(f"{found.episodes} episodes replayed, {len(found.divergences)} diverge")
    if found.divergences or not found.episodes:
        raise typer.Exit(1)


def bisect(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of an evaluation or a run.", show_default=False)
    ],
    episode: Annotated[
        str,
        typer.Argument(metavar="EPISODE", help="Id of an episode or trajectory (turnwise view).", show_default=False),
    ],
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Model that goes on; by default the evaluation's.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="URL of a running server of it.")] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Continuations from each turn.")] = 4,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Sampling temperature.")] = None,
    success_reward: Annotated[
        float | None, typer.Option("--success-reward", help="Minimum reward of a success; by default the evaluation's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the continuations.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Continue an episode from each of its turns, and print at which turn it was won or lost."""
    from rich.console import Console

    from turnwise.evaluation.replay.bisect import BisectSettings, run_bisect

    urls = tuple(each.strip() for each in (url or "").split(",") if each.strip())
    found = run_bisect(BisectSettings(source, episode, model, urls, samples, temperature, success_reward, seed))
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    Console().print(found.table())
    typer.echo(found.verdict())


EvaluatedEnv = Annotated[
    str | None,
    typer.Argument(
        metavar="ENV",
        help="Registered environment, pkg.mod:Class or file.py:Class; several (a,b); or a suite.yaml.",
        show_default=False,
    ),
]


def evaluate(
    env: EvaluatedEnv = None,
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML configuration file.")] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="Directory of a Hugging Face model.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="URL of a running server; --model names its tokenizer.")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option("--key-env", help="Environment variable with the API key of a hosted --url.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", "-t", help="Task file, or pkg.mod:function?key=value.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Maximum number of tasks.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", "-n", help="Episodes per task.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Sampling temperature.")] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--no-greedy", help="Also run one episode per task at temperature 0.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Registered agent, pkg.mod:Name or file.py:Name.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Number of concurrent episodes.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory for trajectories and summary.")] = None,
    fail_under: Annotated[
        float | None, typer.Option("--fail-under", min=0.0, max=1.0, help="Exit with 1 if success is below this.")
    ] = None,
) -> None:
    """Evaluate a model on an environment: success with its standard error, turns, tool errors, stop reasons."""
    from turnwise.config import load_config
    from turnwise.evaluation.config import EvalConfig

    given = list(overrides or ())
    if env is not None and "=" in env:
        # With --config the file may name the environment, so the first argument can already be an override.
        given, env = [env, *given], None
    options: dict[str, Any] = {
        "rollout.env.name": env,
        "rollout.agent.name": agent,
        "rollout.temperature": temperature,
        "rollout.concurrency": concurrency,
        "model": model,
        "url": url,
        "hosted.key_env": key_env,
        "tasks": tasks,
        "limit": limit,
        "samples": samples,
        "greedy": greedy,
        "out": out,
    }
    if env is not None and ("," in env or env.endswith((".yaml", ".yml"))):
        _evaluate_suite(env, options, given, config, fail_under)
        return
    # JSON is YAML, and keeps a text a text whatever it says.
    said = [f"{key}={json.dumps(value, default=str)}" for key, value in options.items() if value is not None]
    _fail_below(_evaluate(load_config(EvalConfig, config, [*said, *given])), fail_under)


def _evaluate_suite(
    env: str, options: dict[str, Any], given: list[str], config: Path | None, fail_under: float | None
) -> None:
    """Evaluate a suite's file, or several environments with the settings of the command line."""
    from turnwise.errors import ConfigError
    from turnwise.evaluation.suite import load_suite, run_suite

    if config is not None:
        raise ConfigError(f"--config is {config}, and ENV is {env}: write settings of all into the suite's defaults")
    named = {key: value for key, value in options.items() if value is not None and key != "rollout.env.name"}
    out = named.pop("out", None)
    said = [f"defaults.{key}={json.dumps(value, default=str)}" for key, value in named.items()]
    if "," not in env:
        said += [] if out is None else [f"out={json.dumps(str(out))}"]
        suite = load_suite(Path(env), [*said, *given])
    else:
        said += [f"defaults.{each}" for each in given]
        names = [name.strip() for name in env.split(",") if name.strip()]
        evaluations = {name: {"rollout": {"env": {"name": name}}} for name in names}
        suite = load_suite(None, said, {"evaluations": evaluations, "out": str(out or "runs/eval-suite")})
    rows = run_suite(suite, _evaluate)
    below = [] if fail_under is None else [row for row in rows if row.below(fail_under)]
    for row in below:
        words = f"success of {row.model} on {row.evaluation} is below --fail-under {fail_under:g}"
        typer.secho(words, fg="red", err=True)
    if below or any(row.error is not None for row in rows):
        raise typer.Exit(1)


def _fail_below(result: EvalResult, success: float | None) -> None:
    below = {} if success is None else result.below(success)
    for name, rate in below.items():
        typer.secho(f"success, {name}, is {rate:.3f}, below --fail-under {success:g}", fg="red", err=True)
    if below:
        raise typer.Exit(1)


def _evaluate(config: EvalConfig) -> EvalResult:
    from turnwise.inference.builtin import forked_servers

    if config.url is None and config.model is not None:
        from turnwise.engine.capacity import served_dtype_warning

        if warning := served_dtype_warning(config.model, config.inference):
            typer.secho(f"warning: {warning}", fg="yellow", err=True)
    # The servers import while this process reads its tasks.
    with forked_servers([] if config.url is not None else [config.inference]):
        from turnwise.evaluation.runner import run_eval

        return run_eval(config)
