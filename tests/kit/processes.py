"""Processes of this machine that a variable of their environment marks."""

import os

import psutil


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Return living processes, but this one, whose `variable` is `value` or begins with it."""
    found = []
    for process in psutil.process_iter():
        try:
            has_mark = process.environ().get(variable, "").startswith(value)
            if has_mark and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return found
