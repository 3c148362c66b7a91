"""How long the command line takes to start: the median of five runs of each command, and whether it loaded torch.

`make bench`, or `python bench/startup.py`. Every command runs once before it is measured, so that compiled bytecode
and the file cache are warm.
"""

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 5
TORCH = re.compile(r"^import time:.*\|\s+torch$", re.MULTILINE)
MESHWRIGHT = str(Path(sys.executable).parent / "meshwright")
STRATEGY = "dp=2 tp=8 pp=4 schedule=1f1b zero=1"
ESTIMATE = ["--cluster", "8xH100-80GB:8", "--strategy", STRATEGY, "--global-batch", "64", "--seq", "8192"]
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "python -c 'import meshwright'": ["-c", "import meshwright"],
    "meshwright --help": [MESHWRIGHT, "--help"],
    "meshwright estimate llama-3-70b": [MESHWRIGHT, "estimate", "llama-3-70b", *ESTIMATE],
    "python -c 'import torch'": ["-c", "import torch"],
}


def run(*arguments: str) -> str:
    """Runs this Python with `arguments` and returns what it wrote to its error stream."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"`{' '.join(arguments)}` failed with exit code {done.returncode}:\n{done.stderr}")
    return done.stderr


def median_s(arguments: list[str]) -> float:
    times_s = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run(*arguments)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s)


def main() -> None:
    print(f"{'command':<32} {'median of ' + str(RUNS):>12} {'imports torch':>14}")
    for name, arguments in COMMANDS.items():
        imports_torch = bool(TORCH.search(run("-X", "importtime", *arguments)))
        print(f"{name:<32} {median_s(arguments):>10.3f} s {'yes' if imports_torch else 'no':>14}")


if __name__ == "__main__":
    main()
