"""A process erases its progress display from the terminal before it exits abruptly."""

import io
import threading
import time

from rich.console import Console as RichConsole

from lockstep.track import busy
from lockstep.track.console import Console


def test_a_bar_is_registered_while_it_is_shown() -> None:
    out = io.StringIO()
    console = Console(True)
    console.rich = RichConsole(file=out, force_terminal=True, width=100, force_interactive=True)
    console.start(10, 0, lambda: "step 1")
    console.advance(3)
    busy.clear_displays()
    assert out.getvalue().endswith("\x1b[2K")  # the bar's last line is erased
    console.stop()
    drawn = len(out.getvalue())
    busy.clear_displays()
    assert len(out.getvalue()) == drawn  # nothing is shown any more


def test_a_display_that_does_not_stop_is_left() -> None:
    """Another display is still erased, an exception is ignored, and the exit waits for a limited time."""
    never, cleared = threading.Event(), threading.Event()

    def broken() -> None:
        raise OSError("no terminal")

    stops = [broken, cleared.set, never.wait]
    for stop in stops:
        busy.add_display(stop)
    began = time.monotonic()
    busy.clear_displays(timeout_s=0.1)
    assert cleared.is_set()
    assert time.monotonic() - began < 60
    never.set()
    for stop in stops:
        busy.remove_display(stop)
        busy.remove_display(stop)
