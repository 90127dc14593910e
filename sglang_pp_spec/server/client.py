"""Ask a running SGLang server over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

Prompt = str | Sequence[int]  # text or token ids


class ServerError(RuntimeError):
    """The server did not start, died or refused a request; the log's end is in the message where it helps."""


@dataclass(frozen=True)
class Reply:
    """One finished generation."""

    text: str
    token_ids: tuple[int, ...]
    completion_tokens: int
    verify_rounds: int  # 0 without speculation
    accept_length: float | None  # completion tokens per verify round, as SGLang counts them
    finish_reason: str  # "stop", "length", "abort"
    meta: Mapping[str, Any] = field(repr=False, compare=False, default_factory=dict)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Reply:
        """The answer of SGLang's /generate."""
        meta = body["meta_info"]
        return cls(
            text=body.get("text", ""),  # none from a server without a tokenizer
            token_ids=tuple(body["output_ids"]),
            completion_tokens=meta["completion_tokens"],
            verify_rounds=meta.get("spec_verify_ct", 0),
            accept_length=meta.get("spec_accept_length"),
            finish_reason=(meta.get("finish_reason") or {}).get("type", ""),
            meta=meta,
        )


class Client:
    """The endpoints that demo, tests and benchmarks use; each of them raises `ServerError`."""

    def __init__(self, url: str, request_timeout_s: float = 300.0) -> None:
        self.url = url
        self._request_timeout_s = request_timeout_s
        # Without proxies: the server is on this machine.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Mapping[str, Any] | None = None,
        *,
        concurrency: int = 16,
        on_reply: Callable[[Reply], None] | None = None,
        **fields: Any,
    ) -> Any:
        """One `Reply` for one prompt, or a list in the prompts' order, `concurrency` requests at a time.

        Greedy unless `sampling` says otherwise. `fields` go into every request's body (`rid`, ...).
        `on_reply` is called as replies come in, by the calling thread.
        """
        body = {"sampling_params": {"temperature": 0.0, "max_new_tokens": 128} | dict(sampling or {})} | fields
        if _is_one_prompt(prompts):
            return self._ask(prompts, body)
        with ThreadPoolExecutor(max_workers=max(1, concurrency)) as pool:
            futures = [pool.submit(self._ask, prompt, body) for prompt in prompts]
            try:
                for done in as_completed(futures):
                    reply = done.result()
                    if on_reply:
                        on_reply(reply)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def get_server_info(self) -> dict[str, Any]:
        """SGLang's resolved arguments and the schedulers' internal state."""
        return json.loads(self._request("GET", "/server_info"))

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort the request `rid`, or every request."""
        self.post("/abort_request", {"rid": rid, "abort_all": everything})

    def flush_cache(self, timeout_s: float = 0.0) -> None:
        """Empty the prefix cache; `ServerError` when requests are still running after `timeout_s`."""
        self.post(f"/flush_cache?timeout={timeout_s}")

    def pause_generation(self, mode: str = "retract") -> None:
        """Stop generating: "abort" the requests, "retract" them to the queue, or hold them "in_place"."""
        self.post("/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        """Go on after a pause."""
        self.post("/continue_generation", {})

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Any other endpoint; `ServerError` on an HTTP error."""
        return self._request("POST", path, body or {})

    def answers(self) -> bool:
        """Whether the server has warmed up and generates a token."""
        try:
            with self._http.open(self.url + "/health_generate", timeout=30) as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _ask(self, prompt: Prompt, body: Mapping[str, Any]) -> Reply:
        key = "text" if isinstance(prompt, str) else "input_ids"
        value = prompt if isinstance(prompt, str) else list(prompt)
        return Reply.from_json(json.loads(self.post("/generate", {key: value, **body})))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with self._http.open(request, timeout=self._request_timeout_s) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:2000]
            raise ServerError(f"{method} {path}: HTTP {error.code}: {text}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{method} {path}: {error}{self.explanation()}") from error

    def explanation(self) -> str:
        """What is known about a server that does not answer, to end an error's message with."""
        return ""


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
