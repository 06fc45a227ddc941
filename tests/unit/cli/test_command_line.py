"""The command line as a whole: version, help, errors as lines, exit codes, and real processes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.errors import CorruptError, StorageError

SOURCE = str(Path(holdfast.__file__).parents[1])


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCE, **changes}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    holdfast.save({"weight": torch.ones(3), "ключ": 1}, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"holdfast {holdfast.__version__}\n")


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", [[], ["show"], ["view"], ["diff"], ["stats"], ["verify"], ["convert"]], ids=str)
def test_help_has_examples_that_fit_eighty_columns(command: list[str], option: str) -> None:
    result = CliRunner().invoke(app, [*command, option], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    stripped = [line.strip() for line in lines]
    examples = stripped[stripped.index("Examples:") + 1 : stripped.index("Exit codes:") - 1]
    assert all(example.startswith("holdfast ") for example in examples)
    assert len(examples) >= 2


def test_every_command_is_listed_with_its_purpose() -> None:
    output = CliRunner().invoke(app, ["--help"]).stdout
    assert "show     Show what a checkpoint holds." in output
    assert "verify   Check every byte of a checkpoint." in output
    assert "convert  Write a checkpoint in another format." in output


@pytest.mark.parametrize(
    "arguments", [["show"], ["verify"], ["nothing"], ["show", "--nothing", "x"], ["convert", "a", "b"], ["--nothing"]]
)
def test_a_wrong_command_line_is_exit_code_2_and_help_on_stderr(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: " in result.stderr


@pytest.mark.parametrize("command", ["show", "verify"])
@pytest.mark.parametrize("json_option", [[], ["--json"]], ids=["text", "json"])
def test_errors_of_the_library_are_one_line_or_one_object(tmp_path: Path, command: str, json_option: list[str]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme").write_text("x")
    (tmp_path / "[red]\n").mkdir()
    for name, message in {
        "missing": "no such directory",
        "file": "is a file",
        "other": "is not a checkpoint",
        "[red]\n": "[red]\\n",
    }.items():
        result = CliRunner().invoke(app, [command, str(tmp_path / name), *json_option])
        assert result.exit_code == 3
        if json_option:
            assert result.stderr == ""
            told = json.loads(result.stdout)
            assert told["exit_code"] == 3
            assert told["error"]["kind"] in ("NotFoundError", "NotACheckpointError")
            assert message in told["error"]["message"].replace("\n", "\\n")
            continue
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert message in line


def test_a_wrong_command_line_is_an_object_too(path: Path) -> None:
    result = CliRunner().invoke(app, ["verify", "--json", "--sample", "5 apples", str(path)])
    assert (result.exit_code, result.stderr) == (2, "")
    told = json.loads(result.stdout)
    assert told["exit_code"] == 2
    assert "'5 apples' is not a part" in told["error"]["message"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_exit_code_4(path: Path) -> None:
    (path / "manifest.json").chmod(0)
    assert CliRunner().invoke(app, ["show", str(path)]).exit_code == 4


def test_what_cannot_be_read_is_exit_code_4(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise StorageError("cannot read 'x': Input/output error", errno=5, path="x")

    monkeypatch.setattr("holdfast.cli.leaves.read_catalog", refuse)
    result = CliRunner().invoke(app, ["show", str(path), "--json"])
    assert result.exit_code == json.loads(result.stdout)["exit_code"] == 4


@pytest.mark.parametrize("command", [[], ["show"], ["verify"], ["convert"], ["sweep"]])
def test_every_help_has_the_exit_codes(command: list[str]) -> None:
    output = CliRunner().invoke(app, [*command, "--help"]).stdout
    codes = [line.split()[0] for line in output.partition("Exit codes:")[2].splitlines() if line.strip()]
    assert codes == ["0", "1", "2", "3", "4"]


def test_several_checkpoints_are_verified_and_the_worst_code_counts(path: Path, tmp_path: Path) -> None:
    holdfast.save({"other": 1}, tmp_path / "other")
    both = CliRunner().invoke(app, ["verify", str(path), str(tmp_path / "other")])
    assert both.exit_code == 0
    assert both.stdout.count("whole: ") == 2
    next(path.glob("data-*")).write_bytes(b"")
    paths = [str(path), str(tmp_path / "nothing"), str(tmp_path / "other")]
    result = CliRunner().invoke(app, ["verify", *paths, "--json"])
    found = json.loads(result.stdout)
    assert [each["path"] for each in found] == paths
    assert [each["ok"] for each in found] == [False, False, True]
    assert (result.exit_code, found[1]["exit_code"]) == (3, 3)
    text = CliRunner().invoke(app, ["verify", *paths])
    assert text.exit_code == 3
    assert text.stderr.startswith("error: there is no checkpoint at ")
    assert text.stdout.count("whole: ") == 1


def test_a_usage_error_says_what_is_wrong_in_json_too() -> None:
    result = CliRunner().invoke(app, ["show", "--json"])
    assert result.exit_code == 2
    assert "PATH" in json.loads(result.stdout)["error"]["message"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    result = CliRunner().invoke(app, [], env={"_HOLDFAST_COMPLETE": f"source_{shell}"}, prog_name="holdfast")
    assert "holdfast" in result.stdout
    assert "--show-completion" in CliRunner().invoke(app, ["--help"]).stdout


COMPLETE_IN_BASH = r"""
holdfast --install-completion >&2 || exit
source ~/.bashrc
function tab { COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _holdfast_completion holdfast; echo "${COMPREPLY[@]}"; }
complete -p holdfast
tab holdfast ve
tab holdfast verify --le
tab holdfast verify --level c
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_once_completion_is_installed(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("holdfast")
    own = environment(HOME=str(tmp_path), SHELL="/bin/bash", PATH=f"{script.parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-c", COMPLETE_IN_BASH], env=own, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "complete -o default -F _holdfast_completion holdfast",
        *("verify", "--level", "coverage"),
    ], done.stderr


def run_into(output: int, *arguments: object) -> tuple[int, str]:
    """The exit code and stderr of a real process whose output goes to the descriptor."""
    command = [sys.executable, "-m", "holdfast", *map(str, arguments)]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment(), check=False)
    return done.returncode, done.stderr


COMMANDS = ["--help", "--version", "show", "show --json", "verify", "verify --json", "sweep", "convert"]


@pytest.mark.parametrize(("command", "place"), list(zip(COMMANDS, ["full", "closed"] * 4, strict=True)))
def test_output_that_cannot_be_written_is_at_most_one_line_and_exit_code_4(
    path: Path, command: str, place: str
) -> None:
    options = [path.parent / "a.pt", "--to", "pt"] if command == "convert" else []
    if place == "full":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, output = os.pipe()
        os.close(reading)
    try:
        code, stderr = run_into(output, *command.split(), *([path] if command[0] != "-" else []), *options)
    finally:
        os.close(output)
    line = "error: cannot write the output: No space left on device; look at where it goes\n"
    assert (code, stderr) == (4, line if place == "full" else "")


def test_the_error_line_is_red_on_a_terminal_and_text_from_outside_is_not_markup(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    def refuse(path: Path) -> None:
        raise CorruptError("[green]\x1b[2Jbad")

    monkeypatch.setattr("holdfast.cli.leaves.read_catalog", refuse)
    monkeypatch.delenv("NO_COLOR", raising=False)
    result = CliRunner().invoke(app, ["show", str(path)], env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert result.exit_code == 1
    assert "\x1b[31m[green]\\x1b[2Jbad\x1b[0m" in result.stderr


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def fail(path: Path) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("holdfast.cli.leaves.read_catalog", fail)
    assert isinstance(CliRunner().invoke(app, ["show", str(path)]).exception, ZeroDivisionError)


def test_a_real_process_prints_any_key_in_any_encoding_and_ends_with_the_exit_code(path: Path) -> None:
    command = [sys.executable, "-m", "holdfast"]
    env = environment(PYTHONIOENCODING="ascii")
    shown = subprocess.run([*command, "show", path], capture_output=True, text=True, env=env, check=True)
    assert "|- weight" in shown.stdout
    assert "\\u043a\\u043b\\u044e\\u0447" in shown.stdout
    assert shown.stderr == ""
    (file,) = path.glob("data-*")
    os.truncate(file, 10)
    verified = subprocess.run(
        [*command, "verify", path, "--json"], capture_output=True, text=True, env=env, check=False
    )
    assert (verified.returncode, verified.stderr) == (1, "")
    assert json.loads(verified.stdout)["damaged_keys"] == ["weight"]


def read_to_the_end(terminal: int) -> str:
    """All that is written to a terminal, until nobody has it open any more."""
    seen = b""
    with contextlib.suppress(OSError), open(terminal, "rb", buffering=0) as stream:
        while data := stream.read(1 << 16):
            seen += data
    return seen.decode()


def test_the_progress_bar_is_on_a_terminal_only_and_never_on_stdout(path: Path) -> None:
    script = "from holdfast.cli import main; main()"
    terminal, stderr = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script, "verify", path],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment(TERM="xterm"),
    )
    os.close(stderr)
    # While it runs: a terminal that nobody reads fills up, and then whoever writes to it waits for ever.
    seen = read_to_the_end(terminal)
    stdout, _ = process.communicate()
    assert process.returncode == 0
    assert stdout.startswith(b"whole: 2 keys in 3 files, ")
    assert "verifying" in seen
    assert "whole" not in seen


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["show", "--help"], ["verify", "--help"]])
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from holdfast.cli import main\n"
        "try: main()\n"
        'finally: sys.stderr.write(f\'{sorted({"torch", "numpy"} & set(sys.modules))}\')\n'
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr == "[]"
