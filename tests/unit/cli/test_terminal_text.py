"""Text for terminals: nothing from a checkpoint is acted upon, and sizes are readable."""

from __future__ import annotations

import pytest
import torch

from holdfast.cli.show import counted, one_line, shown_bytes, shown_name, shown_value


@pytest.mark.parametrize("name", ["weight", "a.b", "[red]x[/red]", ":smile:", "日本", "é", "a b", "{}", "'quoted'"])
def test_printable_names_are_shown_as_they_are(name: str) -> None:
    assert shown_name(name) == name


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "a\tb", "\x1b[31m", "a\rb", "\u202e", "\x00"])
def test_names_that_would_not_print_are_quoted_on_one_line(name: str) -> None:
    assert shown_name(name) == repr(name)
    assert shown_name(name).isprintable()


def test_errors_are_one_line_without_control_characters() -> None:
    assert one_line("no\nsuch \x1b[31mfile [red]") == "no\\nsuch \\x1b[31mfile [red]"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a\n[b]", r"'a\n[b]'"),
        (torch.float16, "torch.float16"),
        ("x" * 30, "'" + "x" * 18 + "…"),
        (10**5000, "<int too long…"),
        ([10**5000], "<list too long…"),
    ],
    ids=["int", "str", "dtype", "long", "huge", "huge inside"],
)
def test_values_are_shown_short(value: object, text: str) -> None:
    shown = shown_value(value, most=20)
    assert shown.startswith(text.removesuffix("…"))
    assert len(shown) <= 20


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1 << 30, "1.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (1 << 62, "4.0 EiB"),
        (1 << 72, "4096.0 EiB"),
    ],
)
def test_sizes_use_the_unit_that_fits(count: int, text: str) -> None:
    assert shown_bytes(count) == text


def test_counts_agree_with_their_noun() -> None:
    assert [counted(count, "key") for count in (0, 1, 2, 7500)] == ["0 keys", "1 key", "2 keys", "7,500 keys"]
