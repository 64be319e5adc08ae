"""The embedded engine: an in-repo rollout server on transformers that speaks SGLang's endpoints.

    python -m m2po_megatron.rollout.embedded --model-path DIR --port P

Exit codes: 0 after SIGTERM, SIGINT or the parent's end; 2 if the port is in use; 1 for any other error. An error is
one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from m2po_megatron.parentage import ask_for_death_signal, watch_parent

if TYPE_CHECKING:
    from m2po_megatron.rollout.embedded_model import EngineModel

logger = logging.getLogger(__name__)

PORT_IN_USE_EXIT_CODE = 2
SHUTDOWN_TIMEOUT_S = 1.0
"""What open connections have to take their last answer."""
BACKLOG = 1024


class StartError(Exception):
    """The server cannot start; `exit_code` is the process's."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """argparse's own exit code, 2, says here that the port is in use."""
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: error: {message}\n")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the process with exit code 1, naming the flag, where it is wrong."""
    parser = _Parser(prog="python -m m2po_megatron.rollout.embedded", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-path", required=True, help="Hugging Face model directory")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback only)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and cache")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the model runs")
    parser.add_argument("--max-running-requests", type=int, default=256, help="samples that are decoded at once")
    parser.add_argument("--weight-version", default="0.0", help="label of the weights at start")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--parent-pid", type=int, default=None, help="end when this process is not the parent any more")
    settings = parser.parse_args(arguments)
    if not 1 <= settings.port <= 65535:
        parser.error(f"--port must be 1 to 65535, got {settings.port}")
    if settings.max_running_requests < 1:
        parser.error(f"--max-running-requests must be at least 1, got {settings.max_running_requests}")
    return settings


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The HTTP client of model libraries logs every request at INFO.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if settings.parent_pid is not None:
        ask_for_death_signal()
        if os.getppid() != settings.parent_pid:
            logger.warning("the parent process %d is gone", settings.parent_pid)
            return 0
    try:
        # Taken before the model is loaded, so that a port in use is known in a moment.
        with _bind(settings.host, settings.port) as listener:
            # Before the model library reads the same files: it fails on some of what may be wrong with them.
            end_tokens = end_token_ids(settings.model_path)
            asyncio.run(_serve(settings, _load(settings), end_tokens, listener))
    except StartError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:  # before the event loop took the signal over
        return 0
    return 0


def _bind(host: str, port: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> StartError:
    if error.errno == errno.EADDRINUSE:
        return StartError(f"--port {port} on {host} is already in use; choose another", PORT_IN_USE_EXIT_CODE)
    return StartError(f"cannot listen on --host {host} --port {port}: {error}")


def _load(settings: argparse.Namespace) -> EngineModel:
    import torch  # here, since it takes seconds, and a port in use must not wait for it

    from m2po_megatron.rollout.embedded_model import EngineModel, ModelError, load_model

    # More threads make small models slower on a shared machine, never faster.
    torch.set_num_threads(1)
    try:
        model = load_model(settings.model_path, getattr(torch, settings.dtype))
    except ModelError as error:
        raise StartError(str(error)) from error
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise StartError(f"--device cuda: torch {torch.__version__} sees no CUDA device on this machine")
    return EngineModel(model.to(settings.device), settings.seed)


def load_tokenizer(path: str) -> Any | None:
    """The directory's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        logger.warning("%s has no usable tokenizer: input_ids only, and no text: %s", path, error)
        return None


def end_token_ids(path: str) -> list[int]:
    """The tokens that end a sample: of generation_config.json, else of config.json. StartError, naming the file, where
    one is broken."""
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise StartError(f"{file} cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise StartError(f"{file} must hold a JSON object, not {type(content).__name__}")
        value = content.get("eos_token_id")
        if value is not None:
            found: list[Any] = value if isinstance(value, list) else [value]
            if not all(type(token) is int for token in found):
                raise StartError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
            return found
    return []


async def _serve(
    settings: argparse.Namespace, engine: EngineModel, end_tokens: list[int], listener: socket.socket
) -> None:
    from aiohttp import web

    from m2po_megatron.rollout.embedded_protocol import GenerateProtocol
    from m2po_megatron.rollout.embedded_scheduler import Scheduler
    from m2po_megatron.rollout.embedded_server import EmbeddedServer

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    path = settings.model_path
    tokenizer = load_tokenizer(path)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        end_tokens = [*end_tokens, int(tokenizer.eos_token_id)]
    ends = tuple(dict.fromkeys(end_tokens))
    protocol = GenerateProtocol(engine.vocab_size, engine.context_length, ends, tokenizer)
    scheduler = Scheduler(engine, settings.max_running_requests, settings.weight_version)
    server = EmbeddedServer(engine, scheduler, protocol, path)
    # With handler cancellation, a client that hangs up has its request aborted.
    runner = web.AppRunner(
        server.application(), handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S, access_log=None
    )
    watch: asyncio.Task[None] | None = None
    try:
        await runner.setup()
        try:
            await web.SockSite(runner, listener, backlog=BACKLOG).start()
        except OSError as error:
            raise _cannot_listen(settings.host, settings.port, error) from error
        if settings.parent_pid is not None:
            watch = asyncio.create_task(watch_parent(settings.parent_pid, stop.set))
        logger.info("serving %s (%s) on %s:%d", path, settings.weight_version, settings.host, settings.port)
        await stop.wait()
        logger.info("ending")
    finally:
        if watch is not None:
            watch.cancel()
        await server.close()
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
