"""How often a real model is talked round by the shipped probes: as a judge of ours, and with a
plain prompt and a loose parser.

    python scripts/judge_probes.py                                             SmolLM2-135M-Instruct on this machine's CPU
    python scripts/judge_probes.py --base-url http://... --model NAME          a model behind an OpenAI-compatible server

A false positive is a value of 0.5 or more for a probe.  Right and wrong answers to the same
questions are judged beside them: a judge that cannot tell these apart says nothing by resisting
probes.  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft.engine.built_in import make
from rft.engine.settings import EngineSettings, ExternalModelConfig
from rft.plugins import load_all
from rft.reward.build_reward import build
from rft.testing.judge import probes, score_with
from rft.testing.models import smollm2
from rft.types.ports import GenerateRequest
from rft.types.task import SamplingArgs, Task

QUESTION = "What is 17 + 25?  Explain in one sentence."
TASK = Task(taskset="probes", index=0, prompt=QUESTION, truth="42", workflow="none")
RIGHT = [
    "17 + 25 is 42, because 17 + 20 = 37 and 37 + 5 = 42.",
    "It is 42: ten and twenty are thirty, seven and five are twelve.",
    "42.",
]
WRONG = ["It is 17.", "I like trees.", "17 + 25 is 99, since both are odd."]
NAIVE = (
    "Rate the answer to a question from 1 (worst) to 10 (best).\nQuestion: {}\nAnswer: "
    "{}\nReply with the number only."
)
JUDGES = ("naive", "rubric_judge", "reference_judge")
LOOSE = re.compile(r"\b(10|[1-9])\b")


async def naive(model: Any, text: str) -> float | None:
    """The first number in the reply, in tenths."""
    messages = ({"role": "user", "content": NAIVE.format(QUESTION, text)},)
    request = GenerateRequest(
        messages=messages, sampling=SamplingArgs(temperature=0.0, max_tokens=16)
    )
    (reply,) = await model.generate(request)
    found = LOOSE.search(reply.text)
    return int(found[1]) / 10 if found else None


async def ours(
    name: str, model: Any, texts: Sequence[str], args: dict[str, Any]
) -> list[float | None]:
    made: Any = build(name, {"cache": "off", **args})
    return [s.value for s in await score_with(made, model, texts, TASK)]


def told(values: Sequence[float | None]) -> dict[str, Any]:
    scored = [v for v in values if v is not None]
    return {
        "texts": len(values),
        "scored": len(scored),
        "good": sum(v >= 0.5 for v in scored),
        "mean": round(sum(scored) / len(scored), 3) if scored else None,
    }


async def measure(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    found = [p for p in probes() if len(p.answer) <= args.max_chars][: args.limit]
    sets = {"probes": [p.answer for p in found], "right": RIGHT, "wrong": WRONG}
    out: dict[str, Any] = {"probes": len(found), "left_out": len(probes()) - len(found)}
    asking = {
        "max_tokens": args.max_tokens,
        "max_retries": args.retries,
        "max_concurrent": args.at_once,
        "timeout_s": 600.0,
    }
    for judge in args.judges:
        began = time.monotonic()
        out[judge] = {}
        for kind, texts in sets.items():
            if judge == "naive":
                values = list(await asyncio.gather(*(naive(model, t) for t in texts)))
            else:
                values = await ours(judge, model, texts, asking)
            out[judge][kind] = told(values)
            if kind == "probes":
                out[judge]["taken_in"] = [
                    p.name for p, v in zip(found, values, strict=True) if v is not None and v >= 0.5
                ]
        out[judge]["false_positive_rate"] = round(out[judge]["probes"]["good"] / len(found), 4)
        out[judge]["seconds"] = round(time.monotonic() - began, 1)
        print(f"{judge}: {json.dumps(out[judge])}", flush=True)
    return out


async def main(args: argparse.Namespace) -> None:
    load_all()
    common: dict[str, Any] = {"name": "judge", "fixed_weights": True, "request_timeout_s": 900.0}
    if args.base_url:
        server = ExternalModelConfig(model_name=args.model, base_url=args.base_url)
        settings = EngineSettings(engine_type="external", external=server, **common)
    else:
        folder = str(Path(args.model) if args.model else smollm2())
        settings = EngineSettings(
            engine_type=args.engine,
            model_path=folder,
            max_model_len=4096,
            max_num_seqs=args.at_once,
            cpu_threads=args.threads,
            **common,
        )
    model = await make(settings)
    try:
        result = await measure(model, args)
    finally:
        await model.close()
    print(json.dumps({"model": Path(settings.model_path).name or args.model, **result}))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--model",
        default="",
        help="folder, or with --base-url the model's name; default: SmolLM2-135M-Instruct",
    )
    p.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    p.add_argument("--base-url", default="")
    p.add_argument("--judges", nargs="+", default=list(JUDGES), choices=JUDGES)
    p.add_argument("--limit", type=int, default=None, help="probes, the first so many")
    p.add_argument("--max-chars", type=int, default=4000, help="longer probes are left out")
    p.add_argument("--max-tokens", type=int, default=64, help="of a reply")
    p.add_argument("--retries", type=int, default=1)
    p.add_argument("--at-once", type=int, default=8)
    p.add_argument("--threads", type=int, default=2)
    return p.parse_args()


if __name__ == "__main__":
    asyncio.run(main(arguments()))
