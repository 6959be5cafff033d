"""``inferencegym serve``: the HTTP and WebSocket server."""

from __future__ import annotations

import argparse
import os


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; everything else is an environment variable ``INFERENCEGYM_*``."""
    parser.add_argument("--host", help="address to listen on (default 0.0.0.0)")
    parser.add_argument("--port", type=int, help="port to listen on (default 7860)")
    parser.add_argument("--workers", type=int, help="server processes (default 1)")


def run(args: argparse.Namespace) -> int:
    """Run the server until it is stopped."""
    from server.app import main

    for name in ("host", "port", "workers"):
        value = getattr(args, name)
        if value is not None:
            os.environ[f"INFERENCEGYM_{name.upper()}"] = str(value)
    main()
    return 0
