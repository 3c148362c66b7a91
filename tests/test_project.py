"""The shape of the project itself: its floors, the size of its files, what importing it costs, and that CI can fail."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import meshwright

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "meshwright"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = sorted(PACKAGE.rglob("*.py"))
BIN = Path(sys.executable).parent


def run(
    *command: str | Path, cwd: Path = ROOT, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command without this test run's own settings; `path` is put before everything that is installed."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAKE", "MFLAGS"))
    }
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def long_parts(path: Path, *, file_lines: int = 400, function_lines: int = 80) -> Iterator[str]:
    """What in a source file is longer than the house allows."""
    text = path.read_text(encoding="utf-8")
    if (lines := len(text.splitlines())) > file_lines:
        yield f"{path.name}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > function_lines:
                yield f"{path.name}: {node.name} has {lines} lines"


def prints(path: Path) -> Iterator[str]:
    """Calls of print in a source file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{path.name}:{node.lineno}"


def contract(identity: str) -> dict[str, list[str]]:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    (found,) = [entry for entry in contracts if entry["id"] == identity]
    return found


# --- size and style ---------------------------------------------------------------------------------------------------


def test_files_and_functions_stay_short() -> None:
    assert SOURCES
    assert [part for path in SOURCES for part in long_parts(path)] == []


def test_long_files_and_functions_are_found(tmp_path: Path) -> None:
    source = tmp_path / "long.py"
    source.write_text("def long():\n" + "    x = 1\n" * 80 + "x = 1\n" * 320)
    assert list(long_parts(source)) == ["long.py: 401 lines", "long.py: long has 81 lines"]


def test_nothing_prints_outside_the_commands() -> None:
    quiet = [path for path in SOURCES if not path.is_relative_to(PACKAGE / "cli")]
    assert [call for path in quiet for call in prints(path)] == []


def test_a_print_is_found(tmp_path: Path) -> None:
    source = tmp_path / "loud.py"
    source.write_text("def f():\n    print('x')\n")
    assert list(prints(source)) == ["loud.py:2"]


def test_no_source_speaks_of_unfinished_work() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "X" * 3)
    assert [path.name for path in SOURCES if any(mark in path.read_text(encoding="utf-8") for mark in marks)] == []


# --- the floors -------------------------------------------------------------------------------------------------------


def test_the_floors_hold() -> None:
    done = run(BIN / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with an empty module for every room, which keeps all contracts."""
    folder = tmp_path_factory.mktemp("skeleton")
    shutil.copy(ROOT / "pyproject.toml", folder)
    package = folder / "src" / "meshwright"
    for layer in contract("floors")["layers"]:
        for room in layer.split("|"):
            (package / room.strip()).mkdir(parents=True)
            (package / room.strip() / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import meshwright.api\n"
    )
    done = run(BIN / "lint-imports", "--no-cache", cwd=folder, path=folder / "src")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


BREACHES = {
    "spec uses torch": ("no-torch", "spec/breach.py", "import torch"),
    "cost uses torch inside a function": ("no-torch", "cost/breach.py", "def f():\n    import torch"),
    "planner uses the report": ("floors", "planner/breach.py", "import meshwright.report"),
    "planner uses the runtime": ("floors", "planner/breach.py", "import meshwright.runtime"),
    "runtime uses the planner": ("floors", "runtime/breach.py", "import meshwright.planner"),
    "runtime uses the models": ("floors", "runtime/breach.py", "import meshwright.models"),
    "runtime uses the prices": ("executed-not-priced", "runtime/breach.py", "import meshwright.cost"),
    "a trace uses the planner": ("measured-not-planned", "measure/breach.py", "import meshwright.planner"),
    "report uses the runtime": ("report-without-runtime", "report/breach.py", "import meshwright.runtime"),
    "models use the nouns": ("models-stand-alone", "models/breach.py", "import meshwright.spec"),
    "spec uses the package's face": ("floors", "spec/breach.py", "from meshwright import Plan"),
    "the trainer uses a command": ("floors", "train/breach.py", "import meshwright.cli"),
    "a command uses torch": ("thin-commands", "cli/breach.py", "def f():\n    import torch"),
    "a room on no floor": ("floors", "attic/__init__.py", ""),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_of_the_floors_is_found(breach: str, skeleton: Path, tmp_path: Path) -> None:
    """Each contract can fail: one wrong import in the skeleton breaks the one that forbids it."""
    identity, name, text = BREACHES[breach]
    shutil.copytree(skeleton, tmp_path, dirs_exist_ok=True)
    module = tmp_path / "src" / "meshwright" / name
    module.parent.mkdir(exist_ok=True)
    module.write_text(text + "\n")
    done = run(BIN / "lint-imports", "--no-cache", cwd=tmp_path, path=tmp_path / "src", COLUMNS="200")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract(identity)['name']} BROKEN" in done.stdout, done.stdout


def test_every_contract_is_shown_to_fail() -> None:
    contracts = {entry["id"] for entry in PROJECT["tool"]["importlinter"]["contracts"]}
    assert contracts == {identity for identity, _, _ in BREACHES.values()}


# --- what an import costs ---------------------------------------------------------------------------------------------


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    done = run(sys.executable, "-c", "import sys, meshwright; print(sorted({'torch', 'numpy'} & set(sys.modules)))")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_help_does_not_load_torch() -> None:
    done = run(sys.executable, "-X", "importtime", BIN / "meshwright", "--help")
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0, done.stderr
    assert "meshwright.cli" in loaded
    assert "torch" not in loaded


def test_rooms_without_torch_do_not_load_it() -> None:
    """Imports every module of the planning path, of the Python face and of the commands, and looks for torch."""
    rooms = [*contract("no-torch")["source_modules"], "meshwright.api", "meshwright.cli"]
    program = (
        "import importlib, pkgutil, sys\n"
        "for name in sys.argv[1:]:\n"
        "    room = importlib.import_module(name)\n"
        "    for found in pkgutil.walk_packages(getattr(room, '__path__', []), name + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} loads torch')\n"
    )
    done = run(sys.executable, "-c", program, *rooms)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    assert meshwright.__all__ == sorted(meshwright.__all__)
    assert [name for name in meshwright.__all__ if getattr(meshwright, name, None) is None] == []
    assert set(meshwright.__all__) <= set(dir(meshwright))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stratgy'"):
        _ = meshwright.Stratgy


def test_the_version_is_the_installed_one() -> None:
    program = "import importlib.metadata; print(importlib.metadata.version('meshwright'))"
    assert run(sys.executable, "-c", program).stdout.strip() == meshwright.__version__


# --- the commands of the project --------------------------------------------------------------------------------------


CI_SUITES = {
    "one test passes": ("def test_one(): pass", 0),
    "one test fails": ("def test_one(): assert False", 2),
    "there is no test": ("", 2),
    "every test is skipped": ("import pytest\n@pytest.mark.skip\ndef test_one(): pass", 1),
    "one passes and one is skipped": (
        "import pytest\n@pytest.mark.skip\ndef test_one(): pass\ndef test_two(): pass",
        0,
    ),
}


@pytest.mark.parametrize("suite", CI_SUITES)
def test_ci_fails_when_no_test_ran(suite: str, tmp_path: Path) -> None:
    text, code = CI_SUITES[suite]
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(f'test:\n\t@"{sys.executable}" -m pytest $(ARGS) test_suite.py\n')
    (tmp_path / "test_suite.py").write_text(text + "\n")
    done = run("bash", tmp_path / ".ci" / "run", cwd=tmp_path.parent, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == code, done.stdout + done.stderr
    assert " in " in done.stdout.splitlines()[-1]  # pytest's own closing line is the last one


def test_a_missing_or_broken_result_file_counts_as_no_test(tmp_path: Path) -> None:
    broken = tmp_path / "results.xml"
    broken.write_text("<testsuites>")
    for results in (broken, tmp_path / "missing.xml"):
        done = run(sys.executable, ROOT / ".ci" / "check_ran.py", results)
        assert done.returncode == 1
        assert "No test ran" in done.stderr


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("environment")


def test_a_complete_environment_is_left_alone(environment: ModuleType) -> None:
    """Nothing is installed, and so nothing downloaded, where everything is there already, as it is in any test run."""
    assert environment.unmet() == []


def test_what_is_missing_is_named(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.9.1", "pytest": None}
    real = environment.version
    monkeypatch.setattr(environment, "version", lambda name: installed.get(name, real(name)))
    assert environment.unmet() == ["torch>=2.13,<3", "pytest>=9,<10"]


def test_another_checkout_in_the_environment_does_not_count(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.unmet() == ["meshwright"]


@pytest.mark.parametrize(
    ("installed", "requirement", "met"),
    [
        ("2.13.0+cpu", "torch>=2.13,<3", True),
        ("2.13", "torch>=2.13.0", True),
        ("2.9.1", "torch>=2.13,<3", False),
        ("3.0.0", "torch>=2.13,<3", False),
        (None, "torch>=2.13,<3", False),
    ],
)
def test_requirements_are_read_as_numbers(
    installed: str | None, requirement: str, met: bool, environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "version", lambda name: installed)
    assert environment.met(requirement) is met


def test_every_requirement_has_bounds_that_the_check_can_read() -> None:
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    unbounded = [text for text in wanted if not text.startswith("meshwright[") and not (">=" in text and ",<" in text)]
    assert unbounded == []


@pytest.mark.parametrize("target", ["train", "test", "test-all", "check", "bench", "gpu-check"])
def test_each_command_prepares_its_environment(target: str) -> None:
    """With an environment active it is used; without one commands run from `.venv`. Nothing hides an exit code."""
    active = run("make", "--dry-run", target, VIRTUAL_ENV="/opt/an environment").stdout
    alone = run("make", "--dry-run", target, VIRTUAL_ENV="").stdout
    assert '"/opt/an environment/bin/python" scripts/environment.py' in active
    assert '".venv/bin/' not in active
    assert '".venv/bin/' in alone
    assert " | " not in active + alone
