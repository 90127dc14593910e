"""NVIDIA's Multi-Process Service for as long as a benchmark needs it: without it, processes take turns on a GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def mps_server() -> Iterator[dict[str, str]]:
    """An MPS server of its own; yields the environment of processes that are to join it.

    Every process that joined must have ended before the block does. RuntimeError if the server does not start or end.
    """
    with tempfile.TemporaryDirectory(prefix="pp_spec-mps-") as folder:
        joining = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        _control(["-d"], "", joining)
        try:
            yield joining
        finally:
            _control([], "quit\n", joining)


def _control(arguments: list[str], text: str, joining: dict[str, str]) -> None:
    command = [CONTROL, *arguments]
    try:
        subprocess.run(
            command,
            input=text,
            text=True,
            env=os.environ | joining,
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"MPS: {error}") from error
