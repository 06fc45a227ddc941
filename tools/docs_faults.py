"""Puts one fault after the other into a copy of the documentation: ``make docs`` must fail there, and say why.

A builder of sites that skips what it does not know, in silence, would not be noticed otherwise. An argument chooses the
faults with this word in their names.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "docs-faults"

# What it is, in which file, what is replaced there (nothing: the end of the file), by what, and what make docs says.
FAULTS = [
    ("a broken link", "docs/start.md", "", "[a](nothing.md)", "which is not there"),
    ("a broken anchor", "docs/start.md", "", "[a](format.md#nothing)", "anchor does not exist"),
    ("a broken link in HTML", "docs/start.md", "", "<a href='nothing.html'>a</a>", "which is not there"),
    ("a page without a place", "docs/lost.md", "", "# Lost", "no section of the site has"),
    ("an unknown cross reference", "docs/start.md", "", "[a][holdfast.nothing]", "unresolved autoref"),
    ("an entry of an unknown name", "docs/start.md", "", "::: holdfast.nothing", "could not be found"),
    ("a name without docstring", "src/holdfast/optimizer.py", '"""torch\'s own', 'assert """', "has no docstring"),
    ("a module without a page", "tools/docs_pages.py", '"_io.stores"', '""', "no page of the API has"),
    ("a command without help", "src/holdfast/cli/show.py", '"""Show what', '""" """; """', "has no help"),
    ("an unknown plugin", "docs/zensical.toml", "plugins.mkdocstrings", "plugins.nothing", "Could not collect"),
    ("a script of another host", "docs/start.md", "", "<script src='//a.example/a.js'></script>", "loads //a"),
    ("an image of another host", "docs/start.md", "", "![a](https://a.example/a.png)", "loads https://a"),
    ("a font of another host", "docs/zensical.toml", "font = false", "", "loads https://fonts"),
]  # fmt: skip


def fresh_copy() -> None:
    """What git has, in the copy, with its times, so that make sees no reason to set anything up."""
    shutil.rmtree(COPY, ignore_errors=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in files.split("\0")[:-1]:
        (COPY / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, COPY / file)
    (COPY / ".venv-docs").symlink_to(ROOT / ".venv-docs")


def built() -> tuple[bool, str]:
    """Whether ``make docs`` succeeds in the copy, and what it says."""
    done = subprocess.run(["make", "docs"], cwd=COPY, capture_output=True, text=True, timeout=300)
    return done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    """Try every fault; exit with 1 if one was not noticed."""
    fresh_copy()
    works, said = built()
    if not works:
        sys.exit(f"make docs fails without any fault:\n{said}")
    chosen = [fault for fault in FAULTS if all(word in fault[0] for word in sys.argv[1:])]
    missed = 0
    for fault, file, old, new, expected in chosen:
        path = COPY / file
        before = path.read_text() if path.exists() else None
        text = before or ""
        assert old in text, f"{file} does not have {old}"
        path.write_text(text.replace(old, new, 1) if old else f"{text}\n\n{new}\n")
        works, said = built()
        is_noticed = not works and expected in said
        missed += not is_noticed
        print(f"{'noticed' if is_noticed else 'MISSED '}  {fault}", flush=True)
        print("" if is_noticed else said)
        path.unlink() if before is None else path.write_text(before)
    shutil.rmtree(COPY)
    print(f"{len(chosen) - missed} of {len(chosen)} faults were noticed")
    sys.exit(missed > 0 or not chosen)


if __name__ == "__main__":
    main()
