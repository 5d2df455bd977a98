"""RunConfig → Plan: one pure function.  Inherited and derived values are decided here and nowhere else.

Knows the machine only through `Facts`.  Invariant: the same configuration and facts give the same Plan; nothing is written back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rft.algorithm.args import ARGS, check_args
from rft.algorithm.catalog import ALGORITHMS, algorithm_defaults
from rft.buffer.settings import BufferSettings
from rft.config.plan import ClusterSettings, Facts, Plan, schedule
from rft.config.problems import Problems
from rft.config.schema.root import RunConfig
from rft.config.source import is_secret
from rft.config.tasksets import tasksets
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.explorer.settings import ExplorerSettings
from rft.logs import REDACTED, redact
from rft.monitor.settings import MonitorSettings
from rft.sync.settings import SyncSettings
from rft.taskset.settings import TasksetSettings
from rft.trainer.settings import AlgorithmSettings, LearnerSettings, OptimSettings, TrainerSettings

NumBatches = Callable[[tuple[TasksetSettings, ...], int, int], int]
"""(training tasksets, batch_size, epochs) → whole explore steps; opens the tasksets."""


def resolve(config: RunConfig, facts: Facts | None = None, *, num_batches: NumBatches | None = None, name: str = "") -> Plan:
    """The Plan of `config`.  Raises ConfigErrors with everything that contradicts itself.

    Where the length of the run is given in epochs, `num_batches` is asked for it; without it `Plan.total_steps` is None and
    `Plan.trainer.total_steps` is 0.  `name` replaces the run's name (a time-stamped sibling).
    """
    facts, p = facts or Facts(), Problems()
    find = _finder(config, facts)
    run_dir = Path(config.checkpoint_root_dir).expanduser().absolute() / config.project / config.group / (name or config.name)
    lengths = _lengths(config, p)
    algorithm, repeat_times = _algorithm(config, facts, p)
    train, evals = tasksets(config, p, max_response_tokens=lengths[2], repeat_times=repeat_times, find=find)
    cluster, engine_device, world_size, trainer_device = _devices(config, facts, p)
    engines = _engines(config, facts, lengths, engine_device, find, p)
    batches, steps = _steps(config, train, num_batches, p)
    sync = _sync(config, engines[0].dtype, train, p)
    learner = _learner(config, facts, algorithm, lengths, trainer_device, world_size, steps, find, p)
    _micro_batches(config, train, learner, p)
    plugin_dirs = tuple(dict.fromkeys(find(d) for d in (*config.plugin_dirs, *facts.plugin_dirs)))
    kinds = config.monitor.monitor_type
    groups, rows = _batch(config, train, p)
    plan = None
    if not p.errors:
        plan = Plan(
            mode=config.mode,
            run_dir=run_dir,
            explorer=_explorer(config, train, evals, batches, plugin_dirs, p),
            engines=engines,
            buffer=_buffer(config, run_dir, p),
            learner=learner,
            trainer=TrainerSettings(
                total_steps=steps or 0,
                batch_groups=groups,
                batch_rows=rows,
                save_interval=config.trainer.save_interval,
                save_hf_checkpoint=config.trainer.save_hf_checkpoint,
                max_checkpoints_to_keep=config.trainer.max_checkpoints_to_keep,
                checkpoint_dir=run_dir / "checkpoints",
                read_deadline_s=config.buffer.trainer_input.experience_buffer.max_read_timeout,
                max_staleness=config.synchronizer.max_staleness,
                max_nonfinite_steps=config.trainer.max_nonfinite_steps,
            ),
            sync=sync,
            monitor=MonitorSettings(
                folder=run_dir,
                kinds=kinds,
                args=_monitor_args(config, p),
                project=config.project,
                group=config.group,
                name=name or config.name,
                config=shown(config),
            ),
            cluster=cluster,
            total_steps=steps,
            log_level=config.log.level,
            plugin_dirs=plugin_dirs,
            seed=config.seed,
            deterministic=config.deterministic,
            continue_from_checkpoint=config.continue_from_checkpoint,
            derived=tuple(p.derived),
            notes=tuple(p.notes),
            warnings=tuple(p.warnings),
        )
    p.raise_if_any()
    assert plan is not None
    return plan


def shown(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain values, secrets replaced by ***."""

    def clean(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: clean(v, str(k)) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [clean(v, key) for v in value]
        if is_secret(key, value):
            return REDACTED
        return redact(value) if isinstance(value, str) else value

    plain = clean(config.model_dump(mode="json"))
    assert isinstance(plain, dict)
    return plain


def _finder(config: RunConfig, facts: Facts) -> Callable[[str], str]:
    """Relative paths: as they stand from the current folder, else beside the configuration file, else unchanged (a hub id, a name)."""
    beside = config.source.path.absolute().parent if config.source.path is not None else None

    def find(text: str) -> str:
        path, colon, attribute = text, "", ""
        if match := re.fullmatch(r"(.+\.py)(:)(\w+)", text):
            path, colon, attribute = match.groups()
        if not path or "://" in path:
            return text
        path = str(Path(path).expanduser()) if path.startswith("~") else path
        looks_local = (
            "/" in path or path.endswith((".py", ".jsonl", ".json", ".parquet", ".csv", ".jinja")) or path.startswith(".")
        )
        for base in (Path.cwd(), beside):
            if (
                base is not None
                and facts.exists(str(base / path))
                and (looks_local or base == beside or Path(base / path).is_dir())
            ):
                return f"{base / path}{colon}{attribute}"
        return f"{path}{colon}{attribute}"

    return find


def _lengths(config: RunConfig, p: Problems) -> tuple[int, int, int]:
    """(max_model_len, max_prompt_tokens, max_response_tokens)."""
    m = config.model
    total, prompt, response = m.max_model_len, m.max_prompt_tokens, m.max_response_tokens
    if total is None and (prompt is None or response is None):
        p.error(
            "model.max_model_len", "the lengths are not known; write max_prompt_tokens and max_response_tokens, or max_model_len"
        )
        return 2, 1, 1
    if total is None:
        assert prompt is not None and response is not None
        total = prompt + response
        p.derive("model.max_model_len", total, "max_prompt_tokens + max_response_tokens")
    if response is None:
        response = total - prompt if prompt is not None else total - total // 2
        p.derive(
            "model.max_response_tokens", response, "the rest of max_model_len" if prompt is not None else "half of max_model_len"
        )
    if prompt is None:
        prompt = total - response
        p.derive("model.max_prompt_tokens", prompt, "the rest of max_model_len")
    if prompt < 1 or response < 1 or prompt + response > total:
        p.error(
            "model.max_model_len",
            f"is {total} tokens, but max_prompt_tokens {prompt} + max_response_tokens {response} = {prompt + response}, "
            "each at least 1; raise max_model_len or lower one of them",
            given=total,
        )
        return 2, 1, 1
    if m.min_response_tokens > response:
        p.error("model.min_response_tokens", f"is more than max_response_tokens ({response})", given=m.min_response_tokens)
    if m.custom_chat_template is not None and m.chat_template_path is not None:
        p.error("model.chat_template_path", "custom_chat_template is written too; write one of them")
    if not m.model_path:
        p.error(
            "model.model_path",
            "is required: a folder with config.json, tokenizer and safetensors, or a hub id in the local cache",
        )
    return total, prompt, response


def _algorithm(config: RunConfig, facts: Facts, p: Problems) -> tuple[AlgorithmSettings, int]:
    a = config.algorithm
    try:
        base = algorithm_defaults(a.algorithm_type)
    except ConfigError as e:
        p.take(e)
        base = next(iter(ALGORITHMS.values()))
    parts: dict[str, Any] = {}
    for kind in ("advantage_fn", "policy_loss_fn", "kl_loss_fn", "entropy_loss_fn"):
        written, default = getattr(a, kind), getattr(base, kind)
        part = written or default
        args: Mapping[str, Any] = getattr(a, f"{kind}_args")
        inherited = getattr(base, f"{kind}_args") if part == default else {}
        parts[kind], parts[f"{kind}_args"] = part, {**inherited, **args}
        if written is None:
            p.derive(f"algorithm.{kind}", part, f"of algorithm {base.name}")
        if (
            (kind, part) in ARGS
            or facts.plugins_loaded
            or (":" not in part and not config.plugin_dirs and not facts.plugin_dirs and not _entry_points())
        ):
            try:
                check_args(kind, part, parts[f"{kind}_args"])
            except ConfigError as e:
                p.take(e)
    if a.loss_agg_mode is None:
        p.derive("algorithm.loss_agg_mode", base.loss_agg_mode, f"of algorithm {base.name}")
    repeat_times = a.repeat_times or base.repeat_times
    if a.repeat_times is None:
        p.derive("algorithm.repeat_times", repeat_times, f"of algorithm {base.name}")
    if a.optimizer.lr_warmup_steps >= 0 and a.optimizer.lr_warmup_steps_ratio > 0:
        p.warn("algorithm.optimizer: lr_warmup_steps is written and wins; lr_warmup_steps_ratio has no effect")
    if not all(0 <= b < 1 for b in a.optimizer.betas):
        p.error("algorithm.optimizer.betas", "each must be in [0, 1)", given=list(a.optimizer.betas))
    settings = AlgorithmSettings(
        algorithm_type=base.name,
        loss_agg_mode=a.loss_agg_mode or base.loss_agg_mode,
        bypass_old_logprobs=a.bypass_old_logprobs,
        **parts,
    )
    return settings, repeat_times


def _entry_points() -> bool:
    import importlib.metadata

    from rft.plugins import GROUP

    return bool(importlib.metadata.entry_points(group=GROUP))


def _devices(config: RunConfig, facts: Facts, p: Problems) -> tuple[ClusterSettings, str, int, str]:
    """(cluster, device of the engines, training ranks, device of the trainer)."""
    c, model, t = config.cluster, config.explorer.rollout_model, config.trainer
    nodes, per_node = c.node_num or 1, c.gpu_per_node or facts.gpus
    total = nodes * per_node
    if not c.gpu_per_node:
        p.derive("cluster.gpu_per_node", per_node, "found on this machine")
    device = {}
    for role, wanted, key in (("engine", model.device, "explorer.rollout_model.device"), ("trainer", t.device, "trainer.device")):
        device[role] = ("cuda" if total else "cpu") if wanted == "auto" else wanted
        if wanted == "auto":
            p.derive(key, device[role], f"the cluster has {total} GPUs")
        if device[role] == "cuda" and not total:
            p.error(
                key, "is cuda, but no GPU was found and none is declared; write cluster.gpu_per_node, or use cpu", given=wanted
            )
            total = per_node = max(1, model.engine_num * model.tensor_parallel_size + (t.world_size or 1))
    tp = model.tensor_parallel_size
    taken = model.engine_num * tp if device["engine"] == "cuda" else 0
    if device["engine"] == "cuda" and tp > per_node:
        p.error(
            "explorer.rollout_model.tensor_parallel_size",
            f"is {tp}, but a node has {per_node} GPUs and an engine stays in one",
            given=tp,
        )
    world = t.world_size or 1
    if device["trainer"] == "cuda":
        left = total - taken
        world = t.world_size or max(1, left)
        if world > left:
            key = "trainer.world_size" if t.world_size else "cluster.gpu_per_node"
            p.error(
                key,
                f"the engines take {taken} of {total} GPUs ({model.engine_num} x tensor_parallel_size {tp}) and leave {max(0, left)} "
                f"for {world} trainer rank(s); lower explorer.rollout_model.engine_num, add GPUs, or set one of the devices to cpu",
                given=t.world_size or c.gpu_per_node,
            )
        if world > per_node and world % per_node:
            p.error(
                "trainer.world_size", f"is {world}: more than one node ({per_node} GPUs) must be whole nodes", given=t.world_size
            )
        if not t.world_size:
            p.derive("trainer.world_size", world, f"{total} GPUs less {taken} of the engines")
    elif t.world_size is None:
        p.derive("trainer.world_size", 1, "trainer on CPU")
    cluster = ClusterSettings(
        ray_address=c.ray_address,
        node_num=nodes,
        gpu_per_node=per_node,
        gpus_per_engine=tp if device["engine"] == "cuda" else 0,
        trainer_gpus=world if device["trainer"] == "cuda" else 0,
    )
    return cluster, device["engine"], world, device["trainer"]


def _engines(
    config: RunConfig, facts: Facts, lengths: tuple[int, int, int], device: str, find: Callable[[str], str], p: Problems
) -> tuple[EngineSettings, ...]:
    model, e = config.model, config.explorer.rollout_model
    dtype = e.dtype if e.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    if e.dtype == "auto":
        p.derive("explorer.rollout_model.dtype", dtype, f"engines on {device}")
    if device == "cpu" and dtype != "float32":
        p.warn(
            f"explorer.rollout_model.dtype {dtype} on CPU: slow, and log-probs agree less well with the trainer's; float32 is meant"
        )
    threads = e.cpu_threads or facts.cpus
    if e.cpu_threads is None:
        p.derive("explorer.rollout_model.cpu_threads", threads, "the machine's cores")
    if e.engine_type != "vllm" and e.tensor_parallel_size > 1:
        p.error(
            "explorer.rollout_model.tensor_parallel_size",
            f"the {e.engine_type} engine knows 1 only",
            given=e.tensor_parallel_size,
        )
    seed = config.seed if e.seed is None else e.seed
    template = model.custom_chat_template
    if model.chat_template_path is not None:
        try:
            template = facts.read_text(find(model.chat_template_path))
        except OSError as error:
            p.error("model.chat_template_path", f"cannot be read: {error.strerror}", given=model.chat_template_path)
    if model.trust_remote_code:
        p.warn("model.trust_remote_code: Python code from the model's folder will run with your rights")
    return tuple(
        EngineSettings(
            engine_type=e.engine_type,
            name=f"engine-{i}",
            model_path=find(model.model_path),
            device=device,
            dtype=dtype,
            tensor_parallel_size=e.tensor_parallel_size,
            max_model_len=lengths[0],
            max_prompt_tokens=lengths[1],
            max_num_seqs=e.max_num_seqs,
            max_num_batched_tokens=e.max_num_batched_tokens,
            gpu_memory_utilization=e.gpu_memory_utilization,
            kv_cache_bytes=e.kv_cache_bytes,
            enforce_eager=device == "cpu" if e.enforce_eager is None else e.enforce_eager,
            enable_prefix_caching=e.enable_prefix_caching and not config.deterministic,
            block_size=e.block_size,
            cpu_threads=threads,
            seed=seed + i,
            trust_remote_code=model.trust_remote_code,
            chat_template=template,
            chat_template_kwargs={} if model.enable_thinking is None else {"enable_thinking": model.enable_thinking},
            extra_engine_args=dict(e.extra_engine_args),
            start_timeout_s=e.start_timeout,
        )
        for i in range(e.engine_num)
    )


def _batch(config: RunConfig, train: tuple[TasksetSettings, ...], p: Problems) -> tuple[int | None, int | None]:
    """(groups, rows) of a train step; one of them is None."""
    b = config.buffer
    runs = {t.num_runs for t in train} or {1}
    if runs == {1} and config.algorithm.algorithm_type in ("grpo", "dr_grpo"):
        p.warn("algorithm.repeat_times is 1: a group of one has no advantage and nothing is learnt; use 8, for example")
    elif 1 in runs:
        p.warn("a taskset has groups of one, which have no advantage; give it repeat_times of 2 or more")
    if not b.train_batch_size:
        p.derive("buffer.train_batch_size", f"{b.batch_size} groups", "all rows of batch_size accepted groups")
        return b.batch_size, None
    low, high = b.batch_size * min(runs), b.batch_size * max(runs)
    if low == high == b.train_batch_size:
        p.note(f"buffer.train_batch_size {high} is batch_size x repeat_times: a step trains whole groups, also when a run failed")
        return b.batch_size, None
    p.warn(
        f"buffer.train_batch_size {b.train_batch_size} is not batch_size x runs ({low if low == high else f'{low} to {high}'}): groups are "
        "split over train steps, and a failed run leaves its row missing (see on_short_batch).  Leave it out to train whole groups"
    )
    return None, b.train_batch_size


def _steps(
    config: RunConfig, train: tuple[TasksetSettings, ...], num_batches: NumBatches | None, p: Problems
) -> tuple[int | None, int | None]:
    """(explore steps, train steps); None where the tasksets would have to be opened."""
    b, t = config.buffer, config.trainer
    rows = b.batch_size * min((s.num_runs for s in train), default=1)
    size = b.train_batch_size or rows  # rows of a train step
    batches, epochs = b.total_steps, b.total_epochs or 1
    if batches is None and t.total_steps is not None:
        batches = -(-t.total_steps * size // rows)
        p.derive("buffer.total_steps", batches, "what trainer.total_steps needs")
    if b.total_steps is None and (b.total_epochs or batches is None) and num_batches is not None and train and not p.errors:
        try:
            whole = num_batches(train, b.batch_size, epochs)
        except ConfigError as e:
            p.take(e)
            whole = 0
        if batches is None:
            p.derive("buffer.total_steps", whole, f"{epochs} epoch(s) of the training tasksets in batches of {b.batch_size}")
        elif whole < batches:
            p.warn(
                f"trainer.total_steps {t.total_steps} is never reached: buffer.total_epochs {epochs} gives {whole} explore steps"
            )
        batches = whole if batches is None else min(batches, whole)
    steps = None if batches is None else batches * rows // size
    if t.total_steps is not None and steps is not None:
        if b.total_steps is not None and t.total_steps > steps:
            p.warn(
                f"trainer.total_steps {t.total_steps} is never reached: buffer.total_steps {b.total_steps} gives {steps} train steps"
            )
        steps = min(steps, t.total_steps)
        if b.total_steps is not None and batches is not None:
            batches = min(batches, -(-steps * size // rows))
    elif steps is not None:
        p.derive("trainer.total_steps", steps, "one per explore step" if size == rows else f"{rows} / {size} per explore step")
    return batches, steps


def _explorer(
    config: RunConfig,
    train: tuple[TasksetSettings, ...],
    evals: tuple[TasksetSettings, ...],
    batches: int | None,
    plugin_dirs: tuple[str, ...],
    p: Problems,
) -> ExplorerSettings:
    e, k = config.explorer, config.synchronizer.sync_interval
    interval = -(-e.eval_interval // k) * k
    if interval != e.eval_interval:
        p.derive("explorer.eval_interval", interval, f"next multiple of synchronizer.sync_interval {k}")
    if not evals:
        p.note("no eval_tasksets: nothing is evaluated")
    return ExplorerSettings(
        tasksets=train,
        eval_tasksets=evals,
        batch_size=config.buffer.batch_size,
        total_batches=batches,
        total_epochs=config.buffer.total_epochs or 1,
        seed=config.seed,
        max_timeout_s=e.max_timeout,
        max_retry_times=e.max_retry_times,
        max_refill=config.buffer.max_refill,
        on_short_batch=config.buffer.on_short_batch,
        eval_interval=interval if evals else 0,
        eval_on_startup=e.eval_on_startup and bool(evals),
        eval_at_end=e.eval_at_end and bool(evals),
        max_concurrent_runs=e.max_concurrent_runs,
        breaker=e.max_failed_groups,
        deterministic=config.deterministic,
        plugin_dirs=plugin_dirs,
    )


def _sync(config: RunConfig, engine_dtype: str, train: tuple[TasksetSettings, ...], p: Problems) -> SyncSettings:
    s, b = config.synchronizer, config.buffer
    rows = b.batch_size * min((t.num_runs for t in train), default=1)
    uneven = b.train_batch_size not in (None, 0, rows)
    settings = SyncSettings(
        method=s.sync_method,
        style=s.sync_style,
        interval=s.sync_interval,
        offset=s.sync_offset,
        max_staleness=s.max_staleness,
        timeout_s=s.sync_timeout,
        kv_cache=s.kv_cache,
        engine_dtype=engine_dtype,
        batch_units=rows if uneven else 1,
        step_units=b.train_batch_size or 1 if uneven else 1,
    )
    try:
        schedule(settings)
    except ConfigError as e:
        p.take(e)
    if config.deterministic and s.sync_offset:
        p.error("synchronizer.sync_offset", "must be 0 with deterministic: true", given=s.sync_offset)
    nodes = config.cluster.node_num
    if s.sync_method == "memory" and nodes > 1:
        p.error(
            "synchronizer.sync_method", f"memory works inside one node, and node_num is {nodes}; use checkpoint", given="memory"
        )
    return settings


def _buffer(config: RunConfig, run_dir: Path, p: Problems) -> BufferSettings:
    b = config.buffer.trainer_input.experience_buffer
    url = path = None
    if b.storage_type == "sql":
        url = b.path
        if url is not None:
            url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)
            url = url if "://" in url else f"sqlite:///{Path(url).expanduser().absolute()}"
    else:
        path = b.path if b.path is None or b.path.lower() == "none" else str(Path(b.path).expanduser().absolute())
        if path is not None and path.lower() == "none":
            path = "none"
            if b.storage_type == "file":
                p.error(
                    "buffer.trainer_input.experience_buffer.path", "none is for storage_type queue; leave it out", given=b.path
                )
            else:
                p.warn("the experience buffer is kept in memory only (path: none): a crash loses the experiences that wait in it")
    return BufferSettings(
        name=b.name,
        folder=run_dir / "buffer",
        ledger_url=url,
        storage_type=b.storage_type,
        storage_path=path,
        durability=b.durability,
        capacity=b.capacity,
        resume_rows=config.buffer.resume_rows,
        on_short_batch=config.buffer.on_short_batch,
    )


def _learner(
    config: RunConfig,
    facts: Facts,
    algorithm: AlgorithmSettings,
    lengths: tuple[int, int, int],
    device: str,
    world: int,
    steps: int | None,
    find: Callable[[str], str],
    p: Problems,
) -> LearnerSettings:
    t, o = config.trainer, config.algorithm.optimizer
    if t.grad_clip is not None and o.clip_grad is not None and t.grad_clip != o.clip_grad:
        p.error(
            "trainer.grad_clip",
            f"is {t.grad_clip}, but algorithm.optimizer.clip_grad is {o.clip_grad}; write one of them",
            given=t.grad_clip,
        )
    clip = t.grad_clip or o.clip_grad or 1.0
    if t.grad_clip is None:
        p.derive("trainer.grad_clip", clip, "algorithm.optimizer.clip_grad" if o.clip_grad else "default")
    budget = t.max_token_len_per_gpu or max(2048, 2 * lengths[0])
    if t.max_token_len_per_gpu is None:
        p.derive("trainer.max_token_len_per_gpu", budget, "2 x max_model_len, at least 2048")
    elif t.use_dynamic_bsz and budget < lengths[0]:
        p.error(
            "trainer.max_token_len_per_gpu",
            f"is {budget} tokens; the longest experience may have {lengths[0]} (max_model_len)",
            given=budget,
        )
    if not t.use_dynamic_bsz and t.micro_batch_size_per_gpu is None:
        p.error("trainer.micro_batch_size_per_gpu", "is required with use_dynamic_bsz: false")
    if t.use_dynamic_bsz and t.micro_batch_size_per_gpu is not None:
        p.warn("trainer.micro_batch_size_per_gpu has no effect with use_dynamic_bsz: true (micro-batches are cut by tokens)")
    dtype = t.param_dtype if t.param_dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    if t.param_dtype == "auto":
        p.derive("trainer.param_dtype", dtype, f"trainer on {device}")
    if device == "cpu" and dtype != "float32":
        p.error("trainer.param_dtype", f"{dtype} training on CPU takes minutes per step; use float32", given=dtype)
    if o.lr_warmup_steps > (steps or o.lr_warmup_steps):
        p.warn(f"algorithm.optimizer.lr_warmup_steps {o.lr_warmup_steps} is longer than the run ({steps} train steps)")
    threads = t.cpu_threads or max(1, facts.cpus // (world if device == "cpu" else 1))
    if t.cpu_threads is None:
        p.derive("trainer.cpu_threads", threads, f"{facts.cpus} cores for {world} rank(s)")
    return LearnerSettings(
        model_path=find(config.model.model_path),
        device=device,
        dtype=dtype,
        world_size=world,
        cpu_threads=threads,
        algorithm=algorithm,
        optim=OptimSettings(
            lr=o.lr,
            lr_warmup_steps=o.lr_warmup_steps,
            lr_warmup_steps_ratio=o.lr_warmup_steps_ratio,
            min_lr_ratio=o.min_lr_ratio,
            lr_scheduler_type=o.lr_scheduler_type,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            clip_grad=clip,
        ),
        total_steps=steps or 1,
        max_token_len_per_gpu=budget,
        use_dynamic_bsz=t.use_dynamic_bsz,
        micro_batch_size=t.micro_batch_size_per_gpu,
        max_response_tokens=lengths[2],
        share_prompts=t.share_prompts,
        logprob_chunk_tokens=t.logprob_chunk_tokens,
        gradient_checkpointing=t.enable_gradient_checkpointing,
        reshard_after_forward=t.reshard_after_forward,
        attn_implementation=t.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
        deterministic=config.deterministic,
    )


def _micro_batches(config: RunConfig, train: tuple[TasksetSettings, ...], learner: LearnerSettings, p: Problems) -> None:
    micro = learner.micro_batch_size
    if learner.use_dynamic_bsz or micro is None:
        return
    for runs in sorted({t.num_runs for t in train}):
        rows = config.buffer.train_batch_size or config.buffer.batch_size * runs
        if rows % (micro * learner.world_size):
            p.error(
                "trainer.micro_batch_size_per_gpu",
                f"is {micro}, and {micro} x {learner.world_size} rank(s) does not divide the {rows} experiences of a step "
                f"(batch_size {config.buffer.batch_size} x {runs} runs); change one of them, or use use_dynamic_bsz: true",
                given=micro,
            )
            return


def _monitor_args(config: RunConfig, p: Problems) -> dict[str, Any]:
    kinds, given = config.monitor.monitor_type, config.monitor.monitor_args or {}
    if not given:
        return {}
    if set(given) <= set(kinds):
        return dict(given)
    if len(kinds) == 1:
        return {kinds[0]: dict(given)}
    p.error(
        "monitor.monitor_args",
        f"has the keys {', '.join(map(str, given))}; with the trackers {', '.join(kinds) or 'none'} it needs one mapping per tracker",
    )
    return {}
