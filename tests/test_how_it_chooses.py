"""docs/how-it-chooses.md is what the planner prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_planner_prints_today() -> None:
    command = [sys.executable, ROOT / "scripts" / "how_it_chooses.py", "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
