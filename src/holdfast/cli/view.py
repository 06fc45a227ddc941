"""The command ``holdfast view``: pages in a browser that show runs, checkpoints and tensors; or one file of them."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from holdfast._values.shown import shown_bytes
from holdfast.cli.show import as_options, counted, error_console, one_line, output_console

if TYPE_CHECKING:  # it imports torch, which --help does not need
    from holdfast._view.questions import Viewer

EXAMPLES = """\b
Examples:
  holdfast view runs/a
  holdfast view checkpoints/step-100 my-model
  holdfast view runs/a --port 8765 --no-browser
  holdfast view runs/a --html run-a.html"""


def view_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Runs, checkpoints of any format, or Hugging Face folders; directories or URLs.",
            show_default=False,
        ),
    ],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port on 127.0.0.1; 0 is any that is free.")
    ] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the URL.")] = False,
    html: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="OUT",
            help="Write one file with the pages and what they show, without data of tensors, and serve nothing.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Look at runs and checkpoints in the browser.

    Shows steps, trees, chunks, ranks, differences and numbers, and follows a run as it goes on. Answers on this machine
    only, at a URL with a token, until Ctrl-C. Nothing is changed, and nothing is unpickled.

    On another machine, use --no-browser and a port, forward that port (ssh -L 8765:127.0.0.1:8765 HOST), and open the
    URL that is printed.
    """
    from holdfast._view.questions import Viewer

    with as_options():
        viewer = Viewer(paths)
    if html is None:
        _serve(viewer, port, opens_browser=not no_browser)
        return
    from holdfast._view.one_file import write_page

    with contextlib.closing(viewer):
        written = write_page(viewer, html)
    for line in written.left_out:
        error_console().print(Text(f"not in it: {one_line(line)}", "dim"), soft_wrap=True)
    said = f"{shown_bytes(written.bytes)}, {counted(written.answers, 'answer')}"
    output_console().print(Text(f"{html}: {said}"), soft_wrap=True)


def _serve(viewer: Viewer, port: int, *, opens_browser: bool) -> None:
    from holdfast._view.server import ViewServer

    try:
        server = ViewServer(viewer, port=port)
    except OSError as error:
        viewer.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "is not for you"
        raise typer.BadParameter(f"{port} {why}; choose another one", param_hint="--port") from None
    with contextlib.suppress(KeyboardInterrupt), server:  # also of one that comes while it ends
        typer.echo(f"{server.url}\n(Ctrl-C ends it)")
        sys.stdout.flush()
        if opens_browser and _has_screen():
            webbrowser.open(server.url_for_once)
        server.serve_forever()


def _has_screen() -> bool:
    """Whether a browser would have a window; others take over the terminal."""
    names = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return sys.platform == "darwin" or any(os.environ.get(name) for name in names)
