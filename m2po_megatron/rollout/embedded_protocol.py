"""`/generate` as JSON: a request's body into a Job, and a finished Job into its answer, in SGLang's form."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from m2po_megatron.rollout.embedded_sequence import Job, Prompt, RequestError, Sequence

DEFAULT_MAX_NEW_TOKENS = 128
MAX_SAMPLES = 4096
"""Of a request: its prompts times n."""
GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy, as in SGLang."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1,),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "stop": ([], ""),
    "stop_regex": ([], ""),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "logit_bias": ({},),
    "custom_params": ({},),
    "sampling_seed": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (False,),
}
"""Sampling parameters that are not implemented, with the values (besides null) that change nothing."""
SAMPLING = ("max_new_tokens", "temperature", "n", "stop_token_ids", "ignore_eos")
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": (),
    "return_text_in_logprobs": (False,),
    "return_hidden_states": (False,),
    "lora_path": (),
    "image_data": (),
    "audio_data": (),
    "video_data": (),
    "input_embeds": (),
    "session_params": (),
    "custom_logit_processor": (),
}
"""Fields of the body that are not implemented, likewise."""
FIELDS = ("rid", "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len")


class Tokenizer(Protocol):
    """The two calls used of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request, checked."""

    max_new_tokens: int
    temperature: float
    n: int
    stop_ids: tuple[int, ...]


class GenerateProtocol:
    """Turns bodies into jobs and jobs into answers, for one model."""

    def __init__(
        self, vocab_size: int, context_length: int, eos_ids: tuple[int, ...], tokenizer: Tokenizer | None
    ) -> None:
        """`eos_ids` end a sample unless ignore_eos; without `tokenizer`, input_ids must be given and "text" is ""."""
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._eos_ids = eos_ids
        self._tokenizer = tokenizer

    def job(self, body: Any) -> Job:
        """The Job of a `/generate` body. RequestError (400) names the field at fault."""
        if not isinstance(body, dict):
            raise RequestError(400, "the body must be a JSON object")
        _refuse(body, NEUTRAL_FIELDS, "")
        for name in body:
            if name not in FIELDS and name not in NEUTRAL_FIELDS:
                raise RequestError(400, f"{name} is not known to the embedded engine (only {', '.join(FIELDS)})")
        prompts, batched = self._prompts(body)
        sampling = self._sampling(body.get("sampling_params"))
        if len(prompts) * sampling.n > MAX_SAMPLES:
            product = f"{len(prompts)} prompts times sampling_params.n = {sampling.n}"
            raise RequestError(400, f"{product} are more than {MAX_SAMPLES} samples: send smaller requests")
        start = self._logprob_start(body)
        rid, names = _names(body.get("rid"), len(prompts), batched, sampling.n)
        job = Job(rid=rid, return_logprob=_flag(body, "return_logprob"), as_list=batched or sampling.n > 1)
        for index, ids in enumerate(prompts):
            self._check_ids(ids)
            if start is not None and start >= len(ids):
                raise RequestError(400, f"logprob_start_len = {start} is beyond a prompt of {len(ids)} tokens")
            prompt = Prompt(ids, logprob_start=start)
            # A sequence never outgrows the positions the model has.
            room = min(sampling.max_new_tokens, self._context_length - len(ids))
            for sample in range(sampling.n):
                name = names[index * sampling.n + sample]
                job.sequences.append(Sequence(job, name, prompt, room, sampling.temperature, sampling.stop_ids))
        return job

    def answer(self, job: Job) -> Any:
        """The JSON answer of a finished job: one object; a list for a batch or n > 1 (a prompt's samples together)."""
        answers = [self._answer(job, sequence) for sequence in job.sequences]
        return answers if job.as_list else answers[0]

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        ids, text = body.get("input_ids"), body.get("text")
        if (ids is None) == (text is None):
            raise RequestError(400, "give either input_ids or text")
        if ids is not None:
            if not isinstance(ids, list) or not ids:
                raise RequestError(400, "input_ids must be a non-empty list of token ids, or a list of such lists")
            batched = isinstance(ids[0], list)
            return (ids if batched else [ids]), batched
        if self._tokenizer is None:
            raise RequestError(400, "text needs a tokenizer, which the model's directory does not have; give input_ids")
        texts: list[Any] = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(one, str) for one in texts):
            raise RequestError(400, "text must be a string or a non-empty list of strings")
        try:
            [one.encode() for one in texts]
        except UnicodeEncodeError as error:
            raise RequestError(400, f"text is not Unicode: {error.reason}") from error
        return [self._tokenizer.encode(one) for one in texts], isinstance(text, list)

    def _check_ids(self, ids: Any) -> None:
        if not isinstance(ids, list) or not ids:
            raise RequestError(400, "input_ids: every prompt must be a non-empty list of token ids")
        for token in ids:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise RequestError(400, f"input_ids: {token!r} is not a token id (0 to {self._vocab_size - 1})")
        if len(ids) >= self._context_length:
            limit = f"the model's {self._context_length} positions leave none to generate"
            raise RequestError(400, f"input_ids: a prompt of {len(ids)} tokens is too long: {limit}")

    def _sampling(self, params: Any) -> Sampling:
        params = {} if params is None else params
        if not isinstance(params, dict):
            raise RequestError(400, "sampling_params must be an object, the same for all prompts of a batch")
        _refuse(params, NEUTRAL, "sampling_params.")
        for name in params:
            if name not in SAMPLING and name not in NEUTRAL:
                known = ", ".join(SAMPLING)
                raise RequestError(400, f"sampling_params.{name} is not known to the embedded engine (only {known})")
        stop_ids = params.get("stop_token_ids") or []
        if not isinstance(stop_ids, list) or not all(type(token) is int for token in stop_ids):
            raise RequestError(400, f"sampling_params.stop_token_ids must be a list of token ids, got {stop_ids!r}")
        # As in SGLang, ignore_eos switches every stop token off, those of the request too.
        stops = () if _flag(params, "ignore_eos") else tuple(dict.fromkeys([*stop_ids, *self._eos_ids]))
        return Sampling(
            max_new_tokens=_integer(params, "max_new_tokens", DEFAULT_MAX_NEW_TOKENS, 0, None),
            temperature=_temperature(params.get("temperature")),
            n=_integer(params, "n", 1, 1, MAX_SAMPLES),
            stop_ids=stops,
        )

    def _logprob_start(self, body: dict[str, Any]) -> int | None:
        start = body.get("logprob_start_len")
        if start is None or start == -1 or not body.get("return_logprob"):
            return None
        if type(start) is not int or start < 0:
            raise RequestError(400, f"logprob_start_len must be -1 or a position in the prompt, got {start!r}")
        return start

    def _answer(self, job: Job, sequence: Sequence) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": sequence.id,
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(sequence.prompt.ids),
            "completion_tokens": len(sequence.output_ids),
            "cached_tokens": 0,
            "weight_version": sequence.weight_version,
            "weight_versions": sequence.version_spans(),
            "num_retractions": sequence.retractions,
        }
        if job.return_logprob:
            pairs = zip(sequence.logprobs, sequence.output_ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            meta["input_token_logprobs"] = _input_logprobs(sequence.prompt)
        return {"text": self._text(sequence), "output_ids": sequence.output_ids, "meta_info": meta}

    def _text(self, sequence: Sequence) -> str:
        if self._tokenizer is None:
            return ""
        ids = sequence.output_ids
        if ids and (sequence.finish_reason or {}).get("type") == "stop":
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _input_logprobs(prompt: Prompt) -> list[list[Any]]:
    if prompt.logprob_start is None or prompt.input_logprobs is None:
        return []
    pairs = zip(prompt.input_logprobs, prompt.ids[prompt.logprob_start :], strict=True)
    return [[logprob, token, None] for logprob, token in pairs]


def _refuse(given: dict[str, Any], neutral: dict[str, tuple[Any, ...]], prefix: str) -> None:
    """400 for a parameter that would change what is sampled, and is not implemented."""
    for name, values in neutral.items():
        value = given.get(name)
        if value is not None and value not in values:
            raise RequestError(400, f"{prefix}{name} = {value!r} is not supported by the embedded engine; leave it out")


def _names(rid: Any, prompts: int, batched: bool, n: int) -> tuple[str, list[str]]:
    """The request's id and those of its sequences: a list of rids names the prompts of a batch; "_<i>" is added where
    one name stands for several sequences."""
    if isinstance(rid, list):
        if not batched or len(rid) != prompts or not all(isinstance(one, str) and one for one in rid):
            raise RequestError(400, f"rid: a list must hold one non-empty string for each of the {prompts} prompts")
        names = rid if n == 1 else [f"{one}_{sample}" for one in rid for sample in range(n)]
        return ",".join(rid), names
    if rid is not None and (not isinstance(rid, str) or not rid):
        raise RequestError(400, f"rid must be a non-empty string, got {rid!r}")
    rid = uuid.uuid4().hex if rid is None else rid
    return rid, [f"{rid}_{index}" for index in range(prompts * n)] if batched or n > 1 else [rid]


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(400, f"{name} must be true or false, got {value!r}")
    return bool(value)


def _integer(given: dict[str, Any], name: str, default: int, least: int, most: int | None) -> int:
    value = given.get(name)
    value = default if value is None else value
    if type(value) is not int or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise RequestError(400, f"sampling_params.{name} must be an integer of at least {least}{upper}, got {value!r}")
    return value


def _temperature(value: Any) -> float:
    value = 1.0 if value is None else value
    number = not isinstance(value, bool) and isinstance(value, int | float)
    # Compared before anything converts it: JSON has integers that no float can hold.
    if not number or not 0 <= value <= sys.float_info.max:
        raise RequestError(400, f"sampling_params.temperature must be a number of at least 0, got {value!r}")
    return 0.0 if value < GREEDY_BELOW else float(value)
