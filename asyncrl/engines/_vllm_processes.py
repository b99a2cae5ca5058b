"""vLLM's processes seen from outside: what they inherit, where they write, what they leave."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def descendants() -> list[Any]:
    """vLLM's processes: those of this one that multiprocessing started, and theirs."""
    import multiprocessing

    import psutil

    children = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    return [p for child in children for p in (child, *child.children(recursive=True))]


@contextlib.contextmanager
def output_to(file: Path) -> Iterator[None]:
    """Sends stdout and stderr, also those of processes started meanwhile, to `file`."""
    saved = [os.dup(1), os.dup(2)]
    with file.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        for target, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, for this process and those started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def shared_memory(processes: list[Any]) -> set[Path]:
    """Named segments and semaphores of Python's multiprocessing that these processes map."""
    import psutil

    paths: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            paths |= {Path(mapping.path) for mapping in process.memory_maps()}
    return {path for path in paths if path.name.startswith(("psm_", "sem.mp-"))}
