"""Opens a file in this machine's browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path


def open_file(file: Path) -> None:
    """Show a file where there is a screen. A file, never a link: other users see the arguments of processes."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(file.absolute().as_uri())
