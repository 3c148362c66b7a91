"""How long the command line takes, cold: the median of five whole processes, beside what it may take.

`make bench`, or `python bench/startup.py`. Every command runs once before it is measured, so that compiled bytecode
and the file cache are warm; that run also tells whether it loaded torch.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 5
#: A process that may not keep compiled bytecode compiles the whole package each time it starts.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
#: A command that takes longer than this is not run again.
MOST_S = 120.0
TORCH = re.compile(r"^import time:.*\|\s+torch$", re.MULTILINE)
MESHWRIGHT = str(Path(sys.executable).parent / "meshwright")
STRATEGY = "dp=2 tp=8 pp=4 schedule=1f1b zero=1"
ESTIMATE = ["--cluster", "8xH100-80GB:8", "--strategy", STRATEGY, "--global-batch", "64", "--seq", "8192"]


def plan(model: str, cluster: str, global_batch: int, seq: int) -> list[str]:
    """The command that plans for a model on machines."""
    asked = {"--cluster": cluster, "--global-batch": str(global_batch), "--seq": str(seq)}
    return [MESHWRIGHT, "plan", model, *(word for pair in asked.items() for word in pair)]


#: Name, arguments of this Python, and seconds that it may take.
COMMANDS: list[tuple[str, list[str], float | None]] = [
    ("python -c pass", ["-c", "pass"], None),
    ("python -c 'import meshwright'", ["-c", "import meshwright"], None),
    ("meshwright --help", [MESHWRIGHT, "--help"], 0.5),
    ("estimate llama-3-70b", [MESHWRIGHT, "estimate", "llama-3-70b", *ESTIMATE], 0.8),
    ("plan llama-3-70b, 64 H100", plan("llama-3-70b", "8xH100-80GB:8", 512, 8192), 1.0),
    ("plan llama-3.1-405b, 16,384 H100", plan("llama-3.1-405b", "8xH100-80GB:2048", 2048, 8192), 3.0),
    ("plan deepseek-v3, 2,048 H800", plan("deepseek-v3", "8xH800-80GB:256", 15360, 4096), 5.0),
    ("python -c 'import torch'", ["-c", "import torch"], None),
]


def run(*arguments: str) -> tuple[str, float]:
    """Runs this Python with `arguments`: what it wrote to its error stream, and seconds."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_S,
        )
    except subprocess.TimeoutExpired:
        return "", float("inf")
    if done.returncode != 0:
        sys.exit(f"`{' '.join(arguments)}` failed with exit code {done.returncode}:\n{done.stderr}")
    return done.stderr, time.perf_counter() - start


def median_s(arguments: list[str]) -> float:
    """Seconds of a command."""
    return statistics.median(run(*arguments)[1] for _ in range(RUNS))


def main() -> None:
    print(f"load before: {os.getloadavg()[0]:.1f}")
    print(f"{'command':<34} {'median of ' + str(RUNS):>12} {'at most':>9} {'imports torch':>14}")
    for name, arguments, most in COMMANDS:
        imported, seconds = run("-X", "importtime", *arguments)
        loads = "yes" if TORCH.search(imported) else "no"
        if seconds < MOST_S:
            seconds = median_s(arguments)
        shown = f"{seconds:>10.3f} s" if seconds < MOST_S else f"> {MOST_S:>8.0f} s"
        print(f"{name:<34} {shown} {'' if most is None else f'{most:g} s':>9} {loads:>14}")


if __name__ == "__main__":
    main()
