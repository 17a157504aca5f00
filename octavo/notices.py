"""Things a user should know that are no errors: each is said once in a process, through the logger "octavo"."""

from __future__ import annotations

import logging

log = logging.getLogger("octavo")
said: set[str] = set()


def say_once(message: str) -> None:
    """Log `message` as a warning, unless it was."""
    if message not in said:
        said.add(message)
        log.warning(message)
