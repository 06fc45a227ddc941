"""Which file this process is at: what other ranks are told of one that hangs."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from output_files import new_output

from holdfast._engine.images import FileImage
from holdfast._io import posix
from holdfast._io.direct import InputFile
from holdfast._staging.process import ProcessOutput, WriterProcess
from holdfast._staging.writer_process import Answer, Done, Moved
from holdfast._values.deadline import Progress


def test_it_is_the_one_of_the_last_call(tmp_path: Path) -> None:
    posix.write_new(tmp_path / "first", b"1")
    posix.write_new(tmp_path / "second", b"2")
    assert posix.file_at_work(tmp_path) == "second"
    posix.read_whole(tmp_path / "first", limit=10)
    assert posix.file_at_work(tmp_path) == "first"
    assert posix.file_at_work(f"{tmp_path}/") == "first"
    posix.sync_directory(tmp_path)
    assert posix.file_at_work(tmp_path) == tmp_path.name


def test_files_elsewhere_are_not_told_of(tmp_path: Path) -> None:
    beside = tmp_path / "checkpoint-2"
    beside.mkdir()
    posix.write_new(beside / "file", b"1")
    assert posix.file_at_work(tmp_path / "checkpoint") == ""


@pytest.mark.parametrize("call", ["os.pwrite", "os.preadv", "os.fsync"])
def test_a_call_that_hangs_goes_before_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    output = new_output(tmp_path / "stuck", expected_bytes=0)
    posix.write_new(tmp_path / "early", b"1")
    with InputFile.open(tmp_path / "stuck") as source:
        work = {
            "os.pwrite": lambda: output.write(memoryview(bytearray(10)), 0),
            "os.preadv": lambda: source.read_into(memoryview(bytearray(10)), 0),
            "os.fsync": lambda: output.finish(0),
        }[call]
        entered, leave = threading.Event(), threading.Event()

        def hang(*arguments: object) -> int:
            entered.set()
            leave.wait(300)
            return 10

        with monkeypatch.context() as patched:
            patched.setattr(call, hang)
            thread = threading.Thread(target=work)
            thread.start()
            assert entered.wait(300)
        posix.write_new(tmp_path / "later", b"1")
        assert posix.file_at_work(tmp_path) == "stuck"
        leave.set()
        thread.join()
        assert posix.file_at_work(tmp_path) != "early"
    output.close()


def test_a_call_within_another_leaves_it_under_way(tmp_path: Path) -> None:
    with posix.reporting("write", tmp_path / "outer"):
        with posix.reporting("open", tmp_path / "inner"):
            assert posix.file_at_work(tmp_path) == "inner"
        assert posix.file_at_work(tmp_path) == "outer"


def test_any_name_can_be_sent_and_is_short(tmp_path: Path) -> None:
    with posix.reporting("write", tmp_path / ("x" * 200 + ".distcp")):
        name = posix.file_at_work(tmp_path)
    assert len(name) == 100
    assert name.startswith("...x")
    assert name.endswith("x.distcp")
    with posix.reporting("write", bytes(tmp_path) + b"/odd\xff"):  # type: ignore[arg-type]
        assert msgspec.msgpack.encode(posix.file_at_work(tmp_path)) == msgspec.msgpack.encode("odd\\udcff")


def test_the_process_that_writes_is_at_the_file_that_its_bytes_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [
        FileImage(path=bytes(tmp_path / name), begin=0, size=100, header=0, starts=[], stops=[], known=[])
        for name in ("a", "b")
    ]
    answers: list[Answer] = [Moved(0), Moved(99), Moved(100), Moved(200), Done([])]
    seen = []

    def answer(process: WriterProcess) -> Answer:
        seen.append(posix.file_at_work(tmp_path))
        return answers.pop(0)

    monkeypatch.setattr(WriterProcess, "order", lambda process, order: None)
    monkeypatch.setattr(WriterProcess, "answer", answer)
    ProcessOutput(WriterProcess(), Progress()).write(images, memoryview(b""))
    assert seen == ["a", "a", "a", "b", "b"]
