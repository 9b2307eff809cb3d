"""vLLM for a machine without a network: its wheels in parts of 60 MiB, put together there, and what it is worth there.

    python benchmarks/engines/vllm_wheels.py fits --torch 2.11.0       # where there is a network: which vLLM
    python benchmarks/engines/vllm_wheels.py cut WHEELS PARTS
    python benchmarks/engines/vllm_wheels.py serve PARTS               # on the machine: join, install, serve, train

``cut`` writes the parts with a digest of each and of each whole. ``serve`` checks them, installs vLLM beside the
machine's own torch (nothing of its Python is changed), and trains SmolLM2 for two steps with weights by CUDA handles
and two with servers that sleep; the gap between trainer and sampler compares log-probabilities. A vLLM that was built
for another torch is refused by name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MEBIBYTES = 60
MANIFEST = "parts.json"
# The machine has the first two; text needs none of the others, which pin it.
_OF_TORCH = ("torch", "triton", "torchvision", "torchaudio", "torchcodec")
_TORCH = re.compile(r"^Requires-Dist: torch\s*\(?==\s*([0-9.]+)", re.MULTILINE)


def main() -> int:
    arguments = _arguments()
    result: dict[str, Any] = arguments.run(arguments)
    print(json.dumps(result), flush=True)
    return 1 if "error" in result else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    fits = commands.add_parser("fits", help="which vLLM was built for a torch")
    fits.add_argument("--torch", required=True)
    fits.add_argument("--requirements", type=Path, help="where to list what the machine needs")
    fits.add_argument("platform", nargs="*", help="options of pip for the machine, after --")
    fits.set_defaults(run=lambda arguments: find_fit(arguments.torch, arguments.requirements, arguments.platform))
    parted = commands.add_parser("cut", help="cut wheels into parts")
    parted.add_argument("wheels", type=Path)
    parted.add_argument("parts", type=Path)
    parted.set_defaults(run=lambda arguments: cut(arguments.wheels, arguments.parts))
    served = commands.add_parser("serve", help="join, install, serve and train")
    served.add_argument("parts", type=Path)
    served.add_argument("--packages", type=Path, default=ROOT / ".cache" / "smollm2")
    served.set_defaults(run=lambda arguments: serve(arguments.parts, arguments.packages))
    commands.add_parser("rehearse", help="cut and join on any machine").set_defaults(run=lambda _: rehearse())
    return parser.parse_args()


def find_fit(torch: str, requirements: Path | None = None, platform: Sequence[str] = ()) -> dict[str, Any]:
    """Return the newest vLLM that pip resolves beside a torch; needs a network, and installs nothing.

    Args:
        torch: The machine's.
        requirements: Where vLLM and all that it needs beside that torch are written, a line each.
        platform: pip's options for another platform than this one.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    with tempfile.TemporaryDirectory() as folder:
        # Without requirements, so that nothing that the machine's torch brought is fetched.
        with zipfile.ZipFile(Path(folder) / f"torch-{torch}+there-py3-none-any.whl", "w") as archive:
            about = f"torch-{torch}+there.dist-info"
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}+there\n")
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
        command += ["--only-binary=:all:", "--target", folder, "--find-links", folder, *platform]
        done = subprocess.run([*command, "vllm", f"torch=={torch}"], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": f"no vLLM was built for torch {torch}: {done.stderr.strip()[-300:]}"}
    versions = {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in json.loads(done.stdout)["install"]}
    lines = [f"{name}=={number}" for name, number in sorted(versions.items()) if name not in _OF_TORCH]
    if requirements is not None:
        requirements.write_text("\n".join(lines) + "\n")
    return {"vllm": versions["vllm"], "torch": torch, "packages": len(lines)}


def cut(wheels: Path, parts: Path, size: int = MEBIBYTES << 20) -> dict[str, Any]:
    """Cut each wheel of a folder into parts of at most ``size`` bytes, with a manifest of their digests."""
    parts.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        names: dict[str, str] = {}
        with wheel.open("rb") as file:
            while chunk := file.read(size):
                name = f"{wheel.name}.{len(names):03}"
                (parts / name).write_bytes(chunk)
                names[name] = hashlib.sha256(chunk).hexdigest()
        manifest[wheel.name] = {"sha256": _digest(wheel), "parts": names}
    if not manifest:
        return {"error": f"{wheels} holds no wheel: pip download them there"}
    (parts / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return {"wheels": len(manifest), "parts": sum(len(entry["parts"]) for entry in manifest.values())}


def join(parts: Path, wheels: Path) -> dict[str, Any]:
    """Put the wheels together again; names each part that is missing or damaged."""
    if not (parts / MANIFEST).is_file():
        return {"error": f"{parts / MANIFEST} is missing: cut the wheels where there is a network"}
    manifest = json.loads((parts / MANIFEST).read_text())
    names = {name: digest for entry in manifest.values() for name, digest in entry["parts"].items()}
    bad = [name for name, digest in names.items() if not (parts / name).is_file() or _digest(parts / name) != digest]
    if bad:
        return {"error": f"{len(bad)} of {len(names)} parts are missing or damaged: {', '.join(bad[:5])}"}
    wheels.mkdir(parents=True, exist_ok=True)
    for wheel, entry in manifest.items():
        with (wheels / wheel).open("wb") as file:
            for name in entry["parts"]:
                file.write((parts / name).read_bytes())
        if _digest(wheels / wheel) != entry["sha256"]:
            return {"error": f"{wheel} is damaged although its parts are not: cut it again"}
    return {"wheels": sorted(manifest)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def built_for(wheel: Path) -> str | None:
    """Return the torch that a wheel of vLLM was built for, as its metadata names it."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        match = _TORCH.search(archive.read(metadata).decode())
    return None if match is None else match[1]


def serve(parts: Path, packages: Path) -> dict[str, Any]:
    """Join, install beside the machine's torch, and train two steps with ``ipc`` and two with sleep."""
    if not parts.is_dir():
        return {"skipped": f"{parts} is missing: make gpu-vllm where there is a network"}
    site, wheels = ROOT / ".cache" / "gpu-vllm", ROOT / ".cache" / "gpu-vllm-wheels"
    joined = join(parts, wheels)
    if "error" in joined:
        return joined
    (vllm,) = (wheels / name for name in joined["wheels"] if name.startswith("vllm-"))
    required, installed = built_for(vllm), version("torch").partition("+")[0]
    if required is not None and required != installed:
        return {
            "error": f"{vllm.name} was built for torch {required}, and this machine has {installed}: take the vLLM "
            f"that `vllm_wheels.py fits --torch {installed}` names"
        }
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*install, "--upgrade", "--target", str(site), *map(str, wheels.glob("*.whl"))], check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    return {
        "vllm": vllm.name.split("-")[1],
        "ipc": train(packages, environment, "policies.main.weight_transport=ipc"),
        "sleep": train(packages, environment, "layout=colocated"),
    }


def train(packages: Path, environment: dict[str, str], *overrides: str) -> dict[str, Any]:
    """Train SmolLM2 for two steps on vLLM's samples; return the metrics of the steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "smollm2" / "main.py"), "--packages", str(packages)]
        command += ["--runs", folder, "--name", "vllm", "--sft=steps=2", "steps=2", "eval.limit=4", "eval.samples=1"]
        command += ["inference.engine=vllm", f"inference.server.python={sys.executable}", "inference.kv_tokens=65536"]
        done = subprocess.run(
            [*command, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        file = Path(folder) / "vllm" / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    steps = [line for line in lines if line["kind"] == "train"]
    names = ("gap/mean", "gap/max", "time/step_s", "time/sync_s", "reward/mean")
    curve = [{name: line[name] for name in names if name in line} for line in steps]
    return {"steps": curve} if done.returncode == 0 else {"steps": curve, "failure": done.stderr.strip()[-1500:]}


def rehearse() -> dict[str, Any]:
    """Cut a small wheel, damage a part, and join; on any machine."""
    with tempfile.TemporaryDirectory() as folder:
        wheels, parts, joined = (Path(folder) / name for name in ("wheels", "parts", "joined"))
        wheels.mkdir()
        with zipfile.ZipFile(wheels / "vllm-0.0.0-py3-none-any.whl", "w") as archive:
            archive.writestr("vllm-0.0.0.dist-info/METADATA", "Name: vllm\nRequires-Dist: torch==2.11.0\n")
            archive.writestr("vllm/weights.bin", os.urandom(10_000))
        done = cut(wheels, parts, size=4096)
        rejoined = join(parts, joined)
        same = _digest(joined / rejoined["wheels"][0]) == _digest(wheels / rejoined["wheels"][0])
        (parts / f"{rejoined['wheels'][0]}.001").write_bytes(b"damaged")
        refused = join(parts, joined)["error"]
        return {**done, "same": same, "built_for": built_for(joined / rejoined["wheels"][0]), "refused": refused}


if __name__ == "__main__":
    sys.exit(main())
