"""The SGLang HTTP protocol, as far as rollouts need it: one asynchronous client per engine, SGLang or embedded alike.

Every call is bounded in time and fails with `EngineError` alone, which names the engine and the call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from dataclasses import dataclass
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
"""What giving up a request may take: a cancelled `generate` ends at most this much later."""
KEEPALIVE_S = 2.0
"""How long an idle connection is kept: less than the 5 s after which the server closes it, which would lose a request."""
ERROR_TEXT_LIMIT = 500
"""Characters of a server's error answer that go into an error text."""


class EngineError(Exception):
    """A call that an engine did not answer as it should. `url`: the engine, `call`: the endpoint, `reason`: what was wrong."""

    def __init__(self, url: str, call: str, reason: str) -> None:
        super().__init__(f"engine {url}: {call}: {reason}")
        self.url = url
        self.call = call
        self.reason = reason


class RequestRefused(EngineError):
    """The engine is well and says that the request is wrong (HTTP 400 or 422): another try cannot help."""


@dataclass(frozen=True)
class GenerateRequest:
    """`n` samples of one prompt.

    rid             names the request; unique among those in flight
    input_ids       the prompt's tokens
    temperature     0 = greedy
    stop_token_ids  tokens that end a sample (and are its last one)
    """

    rid: str
    input_ids: list[int]
    max_new_tokens: int
    temperature: float
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()

    def body(self) -> dict[str, Any]:
        """The JSON of `/generate`. The neutral values are said aloud: a server may have defaults of its own, and the
        log-probs of a truncated distribution are not the policy's."""
        sampling: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "n": self.n,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
        }
        if self.stop_token_ids:
            sampling["stop_token_ids"] = list(self.stop_token_ids)
        return {
            "rid": self.rid,
            "input_ids": self.input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": False,
        }


@dataclass(frozen=True)
class GeneratedSample:
    """One sample as the engine gave it; whether it may be trained on is for the workflow to judge.

    output_ids       the sampled tokens, the stop token included
    output_logprobs  their log-probs at the sampling temperature (greedy: at temperature 1); empty if the engine gave none
    weight_versions  the label of the weights that sampled each token
    finish_reason    "stop", "length" or "abort" (partial: the engine was told to abort)
    """

    rid: str
    output_ids: list[int]
    output_logprobs: list[float]
    weight_versions: list[str]
    finish_reason: str


@dataclass(frozen=True)
class ModelInfo:
    """What an engine serves: the directory it was started from or last loaded, and the label of its weights."""

    model_path: str
    weight_version: str


class EngineClient:
    """A client for one engine; to be made and used on one running event loop and closed with `aclose`."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        control_timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        """`timeout_s` bounds one generation and `control_timeout_s` any other call; `api_key` goes into the Authorization
        header and nowhere else."""
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._control_timeout_s = control_timeout_s
        self._http = aiohttp.ClientSession(
            # 0 = no limit: one on connections would cap how many rollouts run at once.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            # Calls are bounded as a whole, in `_send`; aiohttp's own limits would come before.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            cookie_jar=aiohttp.DummyCookieJar(),
            # A proxy of the environment must not come between this machine and its own loopback.
            trust_env=False,
        )

    async def generate(self, request: GenerateRequest) -> list[GeneratedSample]:
        """The `n` samples, in order. Cancelled or out of time, it has the engine abort the request before it ends, so
        that the same `rid` may be used again."""
        try:
            answer = await self._json("generate", request.body(), self._timeout_s)
        except _OutOfTime:
            await self._give_up(request.rid)
            raise
        except asyncio.CancelledError:
            await self._give_up(request.rid)
            raise
        samples = answer if isinstance(answer, list) else [answer]
        return [self._sample(request, sample) for sample in samples]

    async def update_weights_from_disk(self, path: str, weight_version: str) -> None:
        """Have the engine load the Hugging Face directory `path` (as the engine sees it) under the label `weight_version`."""
        await self._control(
            "update_weights_from_disk",
            {
                "model_path": path,
                "weight_version": weight_version,
                "flush_cache": True,
                "abort_all_requests": False,
            },
        )

    async def pause_generation(self, mode: str = "retract") -> None:
        """Stop sampling. "retract": requests in flight wait and are recomputed on `continue_generation`; "abort": their
        partial samples return with finish reason "abort"."""
        await self._control("pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        await self._control("continue_generation", {})

    async def abort_request(self, rid: str) -> None:
        """Have request `rid` and all its samples end with what they have; one that is not there is no error."""
        await self._control("abort_request", {"rid": rid})

    async def flush_cache(self) -> None:
        await self._control("flush_cache", {})

    async def model_info(self) -> ModelInfo:
        """Answered also while generation is paused."""
        answer = await self._json("model_info", None, self._control_timeout_s)
        label = answer.get("weight_version") if isinstance(answer, dict) else None
        if not isinstance(label, str):
            raise EngineError(self.url, "model_info", "says no weight_version (SGLang from 0.5.19 on is needed)")
        return ModelInfo(model_path=str(answer.get("model_path", "")), weight_version=label)

    async def health(self) -> bool:
        """Whether it can generate (SGLang tries). Not to be asked of a paused engine: it answers after the pause."""
        return await self._says_yes("health")

    async def ready(self) -> bool:
        """Whether it takes requests; False while paused."""
        return await self._says_yes("ready")

    async def aclose(self) -> None:
        await self._http.close()

    async def _says_yes(self, call: str) -> bool:
        answer = await self._send(call, None, self._control_timeout_s)
        if answer.status not in (200, 503):
            raise self._http_error(call, answer)
        return answer.status == 200

    async def _control(self, call: str, body: dict[str, Any]) -> None:
        """A control call. Some failures are answered with HTTP 200 and {"success": false}."""
        answer = await self._send(call, body, self._control_timeout_s)
        if answer.status != 200:
            raise self._http_error(call, answer)
        try:
            content = json.loads(answer.body)
        except ValueError:
            return  # empty, or a sentence
        if isinstance(content, dict) and content.get("success") is False:
            raise EngineError(self.url, call, f"no success: {answer.text()}")

    async def _json(self, call: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        answer = await self._send(call, body, timeout_s)
        if answer.status != 200:
            raise self._http_error(call, answer)
        try:
            return json.loads(answer.body)
        except ValueError as error:
            raise EngineError(self.url, call, f"the answer is not JSON: {answer.text()!r}") from error

    async def _send(self, call: str, body: dict[str, Any] | None, timeout_s: float) -> _Answer:
        """POST `body`, or GET without one. Redirects are not followed: they would turn a POST into a GET."""
        method = "GET" if body is None else "POST"
        request = self._http.request(method, f"{self.url}/{call}", json=body, allow_redirects=False)
        try:
            async with asyncio.timeout(timeout_s), request as response:
                return _Answer(response.status, await response.read())
        except TimeoutError as error:
            raise _OutOfTime(self.url, call, f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(self.url, call, f"{type(error).__name__}: {error}") from error

    def _http_error(self, call: str, answer: _Answer) -> EngineError:
        kind = RequestRefused if answer.status in (400, 422) else EngineError
        return kind(self.url, call, f"HTTP {answer.status}: {answer.text()}")

    async def _give_up(self, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self.abort_request(rid)
        except (EngineError, TimeoutError) as error:
            # Of no consequence: SGLang and the embedded engine also abort what nobody listens to any more.
            logger.debug("request %s was given up, but could not be aborted: %s", rid, error or "timeout")

    def _sample(self, request: GenerateRequest, answer: Any) -> GeneratedSample:
        try:
            meta = answer["meta_info"]
            rid = str(meta["id"])
            finish_reason = str(meta["finish_reason"]["type"])
            entries = meta.get("output_token_logprobs") or []
            logprobs = [math.nan if entry[0] is None else float(entry[0]) for entry in entries]
            of_tokens = [int(entry[1]) for entry in entries]
            output_ids = list(map(int, answer["output_ids"]))
            weight_versions = _labels(meta, len(output_ids))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                self.url, "generate", f"unreadable sample of request {request.rid}: {type(error).__name__}: {error}"
            ) from error
        if of_tokens and len(of_tokens) == len(output_ids) and of_tokens != output_ids:
            raise EngineError(self.url, "generate", f"the log-probs of sample {rid} are of other tokens than its own")
        return GeneratedSample(rid, output_ids, logprobs, weight_versions, finish_reason)


class _OutOfTime(EngineError):
    """No answer in time."""


@dataclass(frozen=True)
class _Answer:
    """An HTTP answer that has been read to its end."""

    status: int
    body: bytes

    def text(self) -> str:
        """What the server says went wrong, shortened."""
        try:
            content = json.loads(self.body)
        except ValueError:
            content = self.body.decode(errors="replace")
        if isinstance(content, dict):
            content = content.get("error") or content.get("message") or content.get("detail") or content
        if isinstance(content, dict):
            content = content.get("message") or content
        text = content if isinstance(content, str) else json.dumps(content)
        return text if len(text) <= ERROR_TEXT_LIMIT else text[:ERROR_TEXT_LIMIT] + " ..."


def _labels(meta: dict[str, Any], tokens: int) -> list[str]:
    """Each token's weight version: from the spans {"version", "start", "end"}, else the one label of the sample. Spans that
    end before or after the last token come out as they are: the workflow refuses the sample by its id."""
    spans = meta.get("weight_versions")
    if spans is None:
        return [str(meta["weight_version"])] * tokens
    labels: list[str] = []
    for span in spans:
        if span["start"] != len(labels) or span["end"] < span["start"]:
            raise ValueError(f"weight version spans {spans} do not follow each other")
        labels += [str(span["version"])] * (span["end"] - span["start"])
    return labels
