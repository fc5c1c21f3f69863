"""How an OpenAI-compatible image endpoint does under load, as `vllm bench serve` tells it.

    bishop bench serve --base-url http://127.0.0.1:8000 --num-prompts 100 --request-rate 2

Requests arrive as a Poisson process (`--burstiness` 1; smaller is burstier, larger is steadier) or
all at once; `--max-concurrency` caps those in flight. Output tokens are visual tokens as `usage`
counts them. With `--stream` the time to the first partial picture is told as vLLM tells the time to
the first token. The last thing printed is one JSON object with vLLM's keys.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.bench_command import PROMPTS, Parser
from commands.refusal import FAILED, Refusal


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Times in seconds; first: to the first event of a stream, else to the answer."""

    success: bool
    latency: float = 0.0
    first: float = 0.0
    images: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


def parser() -> Parser:
    p = Parser(prog="bishop bench serve", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--base-url", default="http://127.0.0.1:8000")
    p.add_argument("--endpoint", default="/v1/images/generations")
    p.add_argument("--model", help="sent with every request; the server's own if not given")
    p.add_argument("--num-prompts", type=int, default=32, help="requests")
    p.add_argument("--prompts", type=Path, help="file with one prompt a line, used in turn")
    p.add_argument("--n", type=int, default=1, help="images per request")
    p.add_argument("--size", help="WIDTHxHEIGHT")
    p.add_argument("--extra-body", help="JSON object of further fields, e.g. policy and sparsity")
    p.add_argument("--request-rate", type=float, default=float("inf"), help="requests a second")
    p.add_argument("--burstiness", type=float, default=1.0)
    p.add_argument("--max-concurrency", type=int)
    p.add_argument("--stream", action="store_true", help="with --partial-images")
    p.add_argument("--partial-images", type=int, default=1)
    p.add_argument("--num-warmups", type=int, default=1, help="requests before anything is timed")
    p.add_argument("--seed", type=int, default=0, help="of arrivals and of the first picture")
    p.add_argument("--no-seed", action="store_true", help="send none: others than Bishop refuse it")
    p.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    p.add_argument("--metric-percentiles", default="50,90,95,99")
    p.add_argument("--goodput", type=float, help="ms of latency within which an answer is good")
    p.add_argument("--label")
    p.add_argument("--api-key", help="or $BISHOP_API_KEY, $OPENAI_API_KEY")
    p.add_argument("--save-result", action="store_true")
    p.add_argument("--save-detailed", action="store_true", help="also every latency and error")
    p.add_argument("--result-dir", type=Path, default=Path())
    p.add_argument("--result-filename")
    p.add_argument("--output-json", type=Path, help="also write the JSON object here")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code. Raises Refusal for what cannot be measured."""
    args = parser().parse_args(argv)
    percentiles, bodies = checked(args)
    answers, duration = asyncio.run(run(args, bodies))
    result = summary(args, answers, duration, percentiles)
    print(told(result, percentiles))
    text = json.dumps(result)
    print(text)
    for path in targets(args):
        path.write_text(text + "\n", encoding="utf-8")
    return 0 if result["completed"] else FAILED


def checked(args: argparse.Namespace) -> tuple[list[float], list[dict[str, Any]]]:
    """Percentiles and the bodies to send. Raises Refusal for what makes no sense."""
    for name in ("num_prompts", "n", "max_concurrency"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise Refusal(f"--{name.replace('_', '-')}: must be 1 or more")
    for name in ("request_rate", "burstiness", "timeout"):
        if not getattr(args, name) > 0:
            raise Refusal(f"--{name.replace('_', '-')}: must be above 0")
    try:
        percentiles = [float(each) for each in args.metric_percentiles.split(",")]
        extra = json.loads(args.extra_body or "{}")
    except ValueError:
        raise Refusal("--metric-percentiles are numbers, --extra-body is JSON") from None
    if not isinstance(extra, dict) or not all(0 <= each <= 100 for each in percentiles):
        raise Refusal("--extra-body is a JSON object, --metric-percentiles lie in 0..100")
    return percentiles, [body_of(args, k, prompts_of(args), extra) for k in range(args.num_prompts)]


def prompts_of(args: argparse.Namespace) -> Sequence[str]:
    if args.prompts is None:
        return PROMPTS
    try:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"--prompts: cannot read {args.prompts}: {error}") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise Refusal(f"--prompts: {args.prompts} holds no prompt")
    return found


def body_of(
    args: argparse.Namespace, number: int, prompts: Sequence[str], extra: dict[str, Any]
) -> dict[str, Any]:
    said = {
        "model": args.model,
        "prompt": prompts[number % len(prompts)],
        "n": args.n,
        "size": args.size,
        "seed": None if args.no_seed else args.seed + number,
        "stream": True if args.stream else None,
        "partial_images": args.partial_images if args.stream else None,
    }
    return {name: value for name, value in said.items() if value is not None} | extra


async def run(
    args: argparse.Namespace, bodies: Sequence[dict[str, Any]]
) -> tuple[list[Answer], float]:
    """All answers in the order of the requests, and the seconds from the first to the last."""
    key = args.api_key or os.environ.get("BISHOP_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    options: dict[str, Any] = {"headers": headers, "limits": limits, "timeout": args.timeout}
    async with httpx.AsyncClient(base_url=args.base_url.rstrip("/"), **options) as http:
        await warm_up(http, args, bodies)
        return await timed(http, args, bodies)


async def warm_up(
    http: httpx.AsyncClient, args: argparse.Namespace, bodies: Sequence[dict[str, Any]]
) -> None:
    """Raises Refusal with the server's reason if the very first request fails."""
    for body in bodies[: args.num_warmups]:
        answer = await ask(http, args.endpoint, body)
        if not answer.success:
            raise Refusal(f"{args.base_url}{args.endpoint} does not draw: {answer.error}")


async def timed(
    http: httpx.AsyncClient, args: argparse.Namespace, bodies: Sequence[dict[str, Any]]
) -> tuple[list[Answer], float]:
    turns = asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else None
    waits = intervals(len(bodies), args.request_rate, args.burstiness, args.seed)
    start = time.perf_counter()
    tasks = []
    for body, wait in zip(bodies, np.cumsum(waits), strict=True):
        await asyncio.sleep(max(0.0, start + float(wait) - time.perf_counter()))
        tasks.append(asyncio.create_task(in_turn(http, args.endpoint, body, turns)))
    answers = await asyncio.gather(*tasks)
    return answers, time.perf_counter() - start


def intervals(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Seconds before each request: Gamma distributed with mean 1 / rate, none before the first."""
    if rate == float("inf"):
        return np.zeros(count)
    drawn = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    drawn[0] = 0.0
    return drawn


async def in_turn(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], turns: asyncio.Semaphore | None
) -> Answer:
    async with AsyncExitStack() as stack:
        if turns is not None:
            await stack.enter_async_context(turns)
        return await ask(http, path, body)


async def ask(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """One request; a failure is an answer too."""
    start = time.perf_counter()
    first = 0.0
    lines: list[str] = []
    try:
        async with http.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                first = first or time.perf_counter() - start
                lines.append(line)
        latency = time.perf_counter() - start
        if response.is_error:
            return Answer(False, latency, error=f"{response.status_code}: {_reason(lines)}")
        return _read(lines, bool(body.get("stream")), latency, first)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        latency = time.perf_counter() - start
        return Answer(False, latency, error=f"{type(error).__name__}: {error}")


def _read(lines: Sequence[str], stream: bool, latency: float, first: float) -> Answer:
    """Raises ValueError, KeyError or TypeError for what is no answer with pictures."""
    if stream:
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        last = json.loads(data[-1]) if data else {}
        if not str(last.get("type")).endswith(".completed"):
            raise ValueError(f"the stream ended with {last.get('type')!r}")
        images = 1
    else:
        last = json.loads("".join(lines))
        images, first = len(last["data"]), latency
    usage = last.get("usage") or {}
    tokens = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    return Answer(True, latency, first, images, *tokens)


def _reason(lines: Sequence[str]) -> str:
    try:
        return str(json.loads("".join(lines))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "".join(lines)[:200]


def summary(
    args: argparse.Namespace, answers: Sequence[Answer], duration: float, percentiles: list[float]
) -> dict[str, Any]:
    """The JSON object; keys as in vLLM where it has them, images are ours."""
    good = [answer for answer in answers if answer.success]
    tokens_in = sum(answer.input_tokens for answer in good)
    tokens_out = sum(answer.output_tokens for answer in good)
    images = sum(answer.images for answer in good)
    result: dict[str, Any] = {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-images",
        "backend": "openai-images",
        "label": args.label,
        "model_id": args.model,
        "tokenizer_id": None,
        "num_prompts": len(answers),
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_images": images,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration,
        "image_throughput": images / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
    }
    if args.goodput is not None:
        within = sum(1000 * answer.latency <= args.goodput for answer in good)
        result["request_goodput"] = within / duration
    result |= spread("ttft", [answer.first for answer in good], percentiles)
    result |= spread("e2el", [answer.latency for answer in good], percentiles)
    if args.save_detailed:
        result["latencies"] = [answer.latency for answer in answers]
        result["errors"] = [answer.error for answer in answers]
    return result


def spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, std and percentiles in ms; nothing if nothing was measured."""
    if not seconds:
        return {}
    ms = [1000 * each for each in seconds]
    points = {f"p{each:g}_{name}_ms": float(np.percentile(ms, each)) for each in percentiles}
    return {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"std_{name}_ms": statistics.pstdev(ms),
        **points,
    }


def told(result: dict[str, Any], percentiles: Sequence[float]) -> str:
    """The figures for people."""
    lines = [
        f"{result['completed']} of {result['num_prompts']} requests in {result['duration']:.2f} s",
        f"{result['request_throughput']:.3f} requests/s",
        f"{result['image_throughput']:.3f} images/s",
        f"{result['output_throughput']:.1f} visual tokens/s",
    ]
    names = {"ttft": "to the first event", "e2el": "end to end"}
    for name, text in names.items():
        if f"mean_{name}_ms" in result:
            points = ", ".join(f"p{p:g} {result[f'p{p:g}_{name}_ms']:.0f}" for p in percentiles)
            lines.append(f"{text}: mean {result[f'mean_{name}_ms']:.0f} ms, {points}")
    return "\n".join(lines)


def targets(args: argparse.Namespace) -> list[Path]:
    """The files that the result goes to."""
    found = [] if args.output_json is None else [args.output_json]
    if args.save_result:
        name = args.result_filename or f"openai-images-{datetime.now():%Y%m%d-%H%M%S}.json"
        args.result_dir.mkdir(parents=True, exist_ok=True)
        found.append(args.result_dir / name)
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refusal as refusal:
        sys.exit(f"serve: {refusal}")
