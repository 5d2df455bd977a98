"""Generates the same answers' lengths for the same prompts again and again: the sides of
`bench_engine.py`.

    python scripts/engine_sides.py ours|raw|hf SPEC.json      with {model, threads, max_model_len, max_num_seqs, folder}

`ours`: rft's engine in a Ray actor, asked by a workflow through the pool, as in a run.  `raw`:
vLLM's `LLM.generate` with the same engine arguments.  `hf`: transformers' `generate`, one padded
batch.

Protocol on the pipes: it prints {"ready": true}; for each line {"prompts": [text], "lengths":
[[tokens]]} it answers with {"seconds", "tokens", "prefilled"}; it ends when stdin closes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rft.config.plan import Plan
from rft.engine.environment import cpu_environment
from rft.preflight.check import check

Work = Callable[[list[str], list[list[int]]], Awaitable[dict[str, float]]]


def plan(spec: dict[str, Any]) -> Plan:
    """A run's plan with this engine; its weights stay as they are."""
    overrides = [
        f"model.model_path={spec['model']}",
        f"model.max_model_len={spec['max_model_len']}",
        f"model.max_prompt_tokens={spec['max_model_len'] // 2}",
        f"explorer.rollout_model.max_num_seqs={spec['max_num_seqs']}",
        f"explorer.rollout_model.cpu_threads={spec['threads']}",
        "explorer.rollout_model.device=cpu",
        "trainer.device=cpu",
        f"checkpoint_root_dir={spec['folder']}",
    ]
    made = check(
        Path(__file__).parent.parent / "examples" / "quickstart" / "config.yaml", overrides
    ).plan
    assert made is not None
    return dataclasses.replace(
        made, engines=(dataclasses.replace(made.engines[0], fixed_weights=True),)
    )


async def ours(plan: Plan, serve: Callable[[Work], Awaitable[None]]) -> None:
    from rft.engine.pool import EnginePool
    from rft.launch.cluster import Cluster
    from rft.launch.part_host import Host
    from rft.launch.remote import Proxy, guarded
    from rft.types.completion import Score
    from rft.types.ids import GroupId
    from rft.types.ports import Engine
    from rft.types.task import SamplingArgs, Task
    from rft.workflow.base import Workflow
    from rft.workflow.group import run_group
    from rft.workflow.play_run import RunLimits
    from rft.workflow.recipes import Recipe

    class Forced(Workflow):
        async def run(self, task: Any, ctx: Any) -> Any:
            length = task.row["lengths"][ctx.run]
            await ctx.chat(task.chat(), max_tokens=length)
            return ctx.transcript(score=Score(value=0.0))

    # before Ray is imported, which reads its settings then
    cluster = Cluster.connect(None, num_cpus=8)
    try:
        import ray

        logs = plan.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        options = {
            "num_cpus": 0,
            "max_concurrency": 10000,
            "runtime_env": {"env_vars": cpu_environment(plan.engines[0])},
        }
        made: Any = ray.remote(Host).options(**options)
        host = made.remote(
            "engine-0", str(logs), False, "WARNING", [], "engine", (plan, plan.engines[0])
        )
        await guarded(host.start.remote(), "engine-0")
        engine: Any = Proxy(host, "engine-0")
        pool = EnginePool([engine])
        recipe = Recipe("forced", Forced, False, None)

        async def prefilled(engine: Engine) -> float:
            return next(
                m.value for m in await engine.metrics() if m.name == "engine/prefilled_tokens"
            )

        async def work(prompts: list[str], lengths: list[list[int]]) -> dict[str, float]:
            tasks = [
                Task(
                    taskset="bench",
                    index=i,
                    prompt=p,
                    workflow="forced",
                    num_runs=len(mine),
                    row={"lengths": mine},
                    sampling=SamplingArgs(ignore_eos=True, max_tokens=max(mine)),
                )
                for i, (p, mine) in enumerate(zip(prompts, lengths, strict=True))
            ]
            before, began = await prefilled(engine), time.perf_counter()
            groups = await asyncio.gather(
                *(
                    run_group(t, recipe, pool, GroupId(1, 0, 0, t.index), limits=RunLimits(3600.0))
                    for t in tasks
                )
            )
            seconds = time.perf_counter() - began
            tokens = sum(r.num_response_tokens for g in groups for r in g.rows)
            return {
                "seconds": seconds,
                "tokens": tokens,
                "prefilled": await prefilled(engine) - before,
            }

        await serve(work)
        await engine.close()
    finally:
        cluster.close()


async def raw(plan: Plan, serve: Callable[[Work], Awaitable[None]]) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    from rft.engine.vllm_args import engine_args

    s = plan.engines[0]
    args = engine_args(s)
    names = (
        "model",
        "tokenizer",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enforce_eager",
        "block_size",
        "enable_prefix_caching",
        "seed",
        "logprobs_mode",
        "kv_cache_memory_bytes",
        "distributed_executor_backend",
    )
    llm = LLM(**{name: getattr(args, name) for name in names}, disable_log_stats=True)
    tokenizer = llm.get_tokenizer()

    async def work(prompts: list[str], lengths: list[list[int]]) -> dict[str, float]:
        asks = []
        params = []
        began = time.perf_counter()
        for prompt, mine in zip(prompts, lengths, strict=True):
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
            for length in mine:
                asks.append(TokensPrompt(prompt_token_ids=ids))
                params.append(
                    SamplingParams(
                        temperature=1.0,
                        max_tokens=length,
                        ignore_eos=True,
                        logprobs=0,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                )
        done = llm.generate(asks, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(d.outputs[0].token_ids) for d in done)
        fresh = sum(len(d.prompt_token_ids or ()) - (d.num_cached_tokens or 0) for d in done)
        return {"seconds": seconds, "tokens": tokens, "prefilled": fresh}

    await serve(work)


async def hf(plan: Plan, serve: Callable[[Work], Awaitable[None]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(plan.engines[0].cpu_threads)
    path = plan.engines[0].model_path
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    async def work(prompts: list[str], lengths: list[list[int]]) -> dict[str, float]:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False
            )
            for p, mine in zip(prompts, lengths, strict=True)
            for _ in mine
        ]
        longest = max(max(mine) for mine in lengths)
        began = time.perf_counter()
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            model.generate(
                **batch,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=tokenizer.pad_token_id,
            )
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "tokens": sum(map(sum, lengths)),
            "prefilled": int(batch["input_ids"].numel()),
        }

    await serve(work)


async def serve(work: Work) -> None:
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        print(json.dumps(await work(order["prompts"], order["lengths"])), flush=True)


if __name__ == "__main__":
    side, file = sys.argv[1:]
    made = plan(json.loads(Path(file).read_text(encoding="utf-8")))
    if side == "raw":  # the variables that rft's actor has; vLLM reads them when it is imported
        os.environ.update(cpu_environment(made.engines[0]))
    asyncio.run({"ours": ours, "raw": raw, "hf": hf}[side](made, serve))
