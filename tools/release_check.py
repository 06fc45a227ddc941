"""Checks a release as its users get it: builds sdist and wheel from what git has, and uses the wheel alone.

In ``build/release``: ``dist`` has what may be uploaded. The wheel is installed in an environment of its own with what
it needs and nothing for development; a save, a load and the commands run there, and every public name is imported. Then
pytest is added, and the tests run that look at the package from outside. Exits with 1 at the first thing that is wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "release"
TREE, DIST, BARE, WORK = BUILD / "tree", BUILD / "dist", BUILD / "bare", BUILD / "work"
TESTS = ["tests/compat", "tests/api/test_public_names.py", "tests/docs/test_docs.py"]

IN_BARE = """
import importlib, importlib.metadata, importlib.resources, sys
import torch
import holdfast

assert importlib.util.find_spec("pytest") is None, "this environment is not bare"
assert importlib.resources.files("holdfast").joinpath("py.typed").is_file(), "py.typed is not in the wheel"
names = [getattr(holdfast, name) for name in holdfast.__all__]
modules = [importlib.import_module(f"holdfast.{name}") for name in dir(holdfast) if name not in holdfast.__all__]
names += [getattr(module, name) for module in modules for name in getattr(module, "__all__", ())]
state = {"weight": torch.arange(1 << 20, dtype=torch.float32), "nested": {"step": 7, "betas": (0.9, 0.99)}}
holdfast.save(state, "first")
state["nested"]["step"] = 8
holdfast.async_save(state, "second").result()
report = holdfast.load(target := {"weight": torch.empty(1 << 20), "nested": {}}, "first")
assert target["weight"].equal(state["weight"]) and target["nested"] == {"step": 7, "betas": (0.9, 0.99)}, target
assert holdfast.verify("first").ok and holdfast.verify("second").ok
assert holdfast.__version__ == importlib.metadata.version("holdfast")
print(f"{len(names)} public names, a save, a load and a verification")
"""
COMMANDS = {
    ("--help",): 0,
    ("--version",): 0,
    ("show", "first"): 0,
    ("verify", "first", "second"): 0,
    ("diff", "first", "second"): 1,
    ("stats", "first", "--json"): 0,
    ("convert", "first", "first.pt", "--to", "pt"): 0,
    ("verify", "nothing-there"): 3,
}


def run(*command: str | Path, cwd: Path = ROOT, expected: int = 0) -> str:
    """What a command prints; a command that ends otherwise than expected ends the check."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, text=True, capture_output=True)
    if done.returncode != expected:
        sys.exit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}: {' '.join(map(str, command))[:200]}")
    return done.stdout


def build(source: Path, target: Path, *options: str) -> Path:
    """The wheel that is built from ``source``."""
    run(sys.executable, "-m", "build", *options, "--outdir", target, source)
    (wheel,) = target.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    """All files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def looked_at() -> Path:
    """The wheel, after all that can be seen without installing it."""
    files = run("git", "ls-files", "-z").split("\0")[:-1]
    for file in files:
        (TREE / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, TREE / file)
    wheel = build(TREE, DIST)  # by way of the sdist
    direct = contents(build(TREE, BUILD / "direct", "--wheel"))
    if contents(wheel) != direct:
        sys.exit("the sdist builds another wheel than the tree does")
    inside = {file.removeprefix("src/") for file in files if file.startswith("src/holdfast/")}
    if difference := inside ^ {name for name in direct if name.startswith("holdfast/")}:
        sys.exit(f"in git or in the wheel, but not in both: {', '.join(sorted(difference))}")
    (description,) = (text.decode() for name, text in direct.items() if name.endswith(".dist-info/METADATA"))
    if relative := re.findall(r"\]\((?!https?:|#)[^)]*\)", description):
        sys.exit(f"links that lead nowhere on a package page: {', '.join(relative)}")
    (sdist,) = DIST.glob("*.tar.gz")
    tools = Path(sys.executable).parent
    print(run(tools / "twine", "check", "--strict", sdist, wheel), end="")
    print(run(tools / "check-wheel-contents", wheel), end="")
    print(run(tools / "pyroma", "--min", "10", sdist).strip().splitlines()[-2])
    return wheel


def used(wheel: Path) -> None:
    """Use the wheel where nothing else is installed, then test it there."""
    run(sys.executable, "-m", "venv", BARE)
    constraints = ("-c", ROOT / "constraints.txt")
    pip = (BARE / "bin/python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", *constraints)
    run(*pip, wheel)
    WORK.mkdir()
    print(run(BARE / "bin/python", "-I", "-W", "error", "-c", IN_BARE, cwd=WORK), end="")
    for command, code in COMMANDS.items():
        run(BARE / "bin/holdfast", *command, cwd=WORK, expected=code)
    print(f"{len(COMMANDS)} commands")
    run(*pip, "pytest", "pytest-timeout", "hypothesis", "zstandard", "obstore")
    shutil.rmtree(TREE / "src")  # so that nothing but the wheel can be imported
    options = ("-q", "-p", "no:cacheprovider", "-k", "not relative_link")  # some links lead to sources
    print(run(BARE / "bin/python", "-m", "pytest", *options, *TESTS, cwd=TREE).splitlines()[-1])


def main() -> None:
    """Check everything; say what only the maintainers can do."""
    shutil.rmtree(BUILD, ignore_errors=True)
    TREE.mkdir(parents=True)
    wheel = looked_at()
    used(wheel)
    print(f"ready: {', '.join(sorted(file.name for file in DIST.iterdir()))} in {DIST.relative_to(ROOT)}")
    if ".example" in (ROOT / "pyproject.toml").read_text():
        print("NOT READY TO UPLOAD: addresses in pyproject.toml end in .example; set authors and [project.urls]")


if __name__ == "__main__":
    main()
