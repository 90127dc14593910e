"""Start a real SGLang server, ask it, stop it: the one piece that demo, tests and benchmarks share.

Standard library only; SGLang is imported by the process it starts, never here. One use, in order:

    spec = ServerSpec(model, draft, pp=2, mode="plugin")
    with Server(spec) as server:                        # returns when the server answers
        replies = server.generate(prompts)              # concurrently, in the prompts' order
    # here every process of the server is gone

`ServerSpec` is the whole difference between the arms that are compared:

    mode       --speculative-*   SGLANG_ENABLE_PP_SPEC   this plugin
    nospec     no                unset                   excluded
    plain      EAGLE             unset                   excluded
    builtin    EAGLE             1                       excluded
    plugin     EAGLE             1                       allowed
"""

from .client import Client, Reply, ServerError
from .process import Server, free_port, started_together
from .spec import Mode, ServerSpec, has_gpu, is_given, num_gpus, uses_cpu_engine

__all__ = [
    "Client",
    "Mode",
    "Reply",
    "Server",
    "ServerError",
    "ServerSpec",
    "free_port",
    "has_gpu",
    "num_gpus",
    "is_given",
    "started_together",
    "uses_cpu_engine",
]
