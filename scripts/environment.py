"""Prepares a Python environment for this checkout. The Makefile calls it; it needs nothing but Python itself.

python3 scripts/environment.py --create .venv    make a virtual environment and install the project into it
python scripts/environment.py                    install into the running environment what is missing there

It asks no package index for anything that is there already, so it works offline once everything is installed.
PyTorch goes first and by its exact release, so that nothing else decides which build of it comes.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  the one file that an older Python may run, to say so
    sys.exit(
        f"Meshwright needs Python 3.11 or newer, and {sys.executable} is Python {sys.version.split()[0]}. "
        "Put a newer python3 first on PATH, or activate an environment that has one."
    )

import argparse
import importlib.metadata
import importlib.util
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare a Python environment for this checkout.")
    parser.add_argument("--create", type=Path, metavar="FOLDER", help="make this virtual environment first")
    parser.add_argument("--torch", default="torch==2.13.0", help="what to ask pip for where PyTorch is missing")
    parser.add_argument("--renew", action="store_true", help="install the project even where nothing is missing")
    options = parser.parse_args()
    try:
        if options.create is not None:
            create(options.create)
            python = str(options.create / "bin" / "python")
            subprocess.run([python, str(Path(__file__)), "--torch", options.torch, "--renew"], check=True)
        else:
            install(options.torch, renew=options.renew)
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"The environment is not ready: `{shlex.join(error.cmd)}` failed. Its own message is above. "
            "The first installation needs a package index in reach."
        )


def create(folder: Path) -> None:
    """Makes the virtual environment `folder`, from nothing where one is there that does not start or is elsewhere's."""
    stamp = folder / ".ready"
    moved = stamp.exists() and stamp.read_text().strip() != str(ROOT)
    starts = not moved and runs(folder / "bin" / "python")
    if not starts:
        print(f"Making the virtual environment {folder} with Python {sys.version.split()[0]}.", flush=True)
    fresh = [] if starts else ["--clear"]
    subprocess.run([sys.executable, "-m", "venv", *fresh, str(folder)], check=True)


def runs(python: Path) -> bool:
    if not python.exists():
        return False
    supported = "import sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([str(python), "-c", supported], capture_output=True, check=False).returncode == 0


def install(torch: str, *, renew: bool) -> None:
    """Installs into the running environment what is missing there: PyTorch, then the project with its tools."""
    missing = unmet()
    if not missing and not renew:
        return
    if missing:
        print(f"Installing into {sys.prefix}, which may take minutes: {', '.join(missing)}", flush=True)
    if importlib.util.find_spec("pip") is None:
        subprocess.run([sys.executable, "-m", "ensurepip", "--upgrade"], check=True)
    if any(text.startswith("torch>") for text in missing):
        pip_install(*shlex.split(torch))
    pip_install(*project_table()["build-system"]["requires"])
    pip_install("--no-build-isolation", "--editable", f"{ROOT}[dev]")


def pip_install(*what: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *what], check=True)


def unmet() -> list[str]:
    """Requirements of the project and its `dev` extra that the running environment does not meet, and the project
    itself where it is missing or another checkout's."""
    found = importlib.util.find_spec("meshwright")
    here = found is not None and found.origin == str(ROOT / "src" / "meshwright" / "__init__.py")
    missing = [] if here and version("meshwright") else ["meshwright"]
    return missing + [text for text in requirements("dev") if not met(text)]


def requirements(extra: str) -> list[str]:
    """The project's requirements with those of `extra`, extras that name other extras of the project unfolded."""
    project = project_table()["project"]
    wanted: list[str] = list(project["dependencies"])
    extras = [extra]
    for name in extras:
        for text in project["optional-dependencies"][name]:
            if text.startswith("meshwright["):
                extras += text.removeprefix("meshwright[").removesuffix("]").split(",")
            else:
                wanted.append(text)
    return wanted


def met(text: str) -> bool:
    """Whether an installed release meets the requirement `text`, of the form `name>=2,<3`.

    It reads this one form itself, because the packaging library may be among what is missing.
    """
    name = re.split(r"[<>=,;\[ ]", text, maxsplit=1)[0]
    installed = version(name)
    if installed is None:
        return False
    bounds = re.findall(r"(>=|<)([\d.]+)", text)
    return all((release(installed) < release(bound)) == (sign == "<") for sign, bound in bounds)


def release(text: str) -> tuple[int, ...]:
    """The numbers of a release: 2.13.0+cpu is (2, 13), since 2.13.0 and 2.13 are the same one."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    if numbers is None:
        return ()
    parts = [int(part) for part in numbers.group().split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def project_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
