"""Batch, schedule and GPU arithmetic of a conversion: how many prompts, steps and GPUs a veRL run
means here.

Symbols as in the tables: B prompts of a veRL iteration, m prompts of an optimizer step, n runs of a
prompt, G data-parallel size of our trainer.  Depends on veRL's keys, on no YAML.  Invariant: B = m
x sync_interval, always.
"""

from __future__ import annotations

from dataclasses import dataclass

from rft.errors import ConfigError
from rft.extras.migrate.convert.draft import Draft
from rft.extras.migrate.convert.names import ACTOR, CRITIC_ESTIMATORS, RM, ROLLOUT, estimator_name

MAX_GPUS = 20_000
MINI = f"{ACTOR}.ppo_mini_batch_size"


def is_async(d: Draft) -> bool:
    """The fully asynchronous recipe, or a YAML file of it."""
    return d.launch.program == "fully_async" or any(
        k.startswith("async_training.") for k in d.given
    )


def ahead(d: Draft) -> bool:
    """The recipe that samples one iteration ahead of training."""
    return d.launch.program == "one_step_off"


def apart(d: Draft) -> bool:
    """Whether trainer and rollouter have GPUs of their own in veRL too."""
    return is_async(d) or ahead(d)


def colocated(d: Draft) -> bool:
    """Whether engines and trainer share their GPUs in turns: asked for, or there are too few to
    give each their own.
    """
    if apart(d):
        return False
    if d.colocate or (
        d.stated("actor_rollout_ref.hybrid_engine")
        and not d.terse
        and d.flag("actor_rollout_ref.hybrid_engine")
    ):
        return True
    return "mode" not in d.overridden and d.engine_num is None and not _splits(d)


def _splits(d: Draft) -> bool:
    """Whether some number of engines leaves GPUs that the trainer's sequences divide over."""
    count, per_node = nodes(d)
    remaining = count * per_node - reward_gpus(d)
    tp = _engine_gpus(d)
    sp = sequence_parallel(d)
    return any((remaining - e * tp) % sp == 0 for e in range(1, (remaining - 1) // tp + 1))


def _engine_gpus(d: Draft) -> int:
    stages = positive(d, f"{ROLLOUT}.pipeline_model_parallel_size")
    return stages * positive(d, f"{ROLLOUT}.tensor_model_parallel_size", 2)


def reward_tp(d: Draft) -> int:
    return positive(d, f"{RM}.rollout.tensor_model_parallel_size")


def reward_gpus(d: Draft) -> int:
    """GPUs of the reward model: a pool of its own where veRL gives it one, else a quarter of all."""
    if not d.flag(f"{RM}.enable"):
        return 0
    if d.flag(f"{RM}.enable_resource_pool"):
        return positive(d, f"{RM}.nnodes") * positive(d, f"{RM}.n_gpus_per_node", 8)
    count, per_node = nodes(d)
    tp = reward_tp(d)
    return max(1, count * per_node // 4 // tp) * tp


def has_critic(d: Draft) -> bool:
    if d.stated("critic.enable"):
        return d.flag("critic.enable")
    return estimator_name(d) in CRITIC_ESTIMATORS


def mini_batch(d: Draft) -> int:
    """Prompts of an optimizer step; a written mini batch above the batch is the batch."""
    mini = positive(d, MINI, 0)
    return min(mini, d.whole("data.train_batch_size")) if _too_large(d) else mini


def _too_large(d: Draft) -> bool:
    batch = d.whole("data.train_batch_size")
    return d.stated(MINI) and not is_async(d) and 0 < batch < d.whole(MINI)


def ask_about_mini_batch(d: Draft) -> None:
    """Say what a mini batch above the batch means, where one is written."""
    if _too_large(d):
        mini = d.whole(MINI)
        batch = d.whole("data.train_batch_size")
        d.questions.append(
            f"{MINI} {mini} is larger than data.train_batch_size {batch}: releases that do not "
            f"refuse it train the whole batch in one step, with the gradient divided by {mini}, "
            f"{batch / mini:.3g} of the one here.  Adam hardly notices; a gradient is clipped later "
            f"there.  Taken: {batch} prompts"
        )


def interval(d: Draft) -> int:
    """Optimizer steps of one veRL iteration, B / m.  Raises ConfigError where m does not divide B."""
    mini = mini_batch(d)
    if is_async(d):
        return positive(d, "async_training.trigger_parameter_sync_step", 4) * positive(
            d, "async_training.require_batches"
        )
    batch = d.whole("data.train_batch_size")
    if mini <= batch and batch % mini == 0:
        return batch // mini
    problem = f"the mini batch is larger than the batch{_default(d)}; lower it"
    if mini <= batch:
        problem = (
            f"{mini} does not divide {batch}{_default(d)}; an iteration must be whole "
            f"optimizer steps (veRL asserts it too)"
        )
    raise ConfigError(
        f"data.train_batch_size {batch}, {MINI} {mini}: {problem}", key=MINI, given=mini
    )


def _default(d: Draft) -> str:
    unstated = [k for k in (MINI, "data.train_batch_size") if not d.stated(k)]
    return f" ({' and '.join(unstated)} is veRL's default)" if unstated else ""


def runs(d: Draft) -> int:
    """Runs of a prompt, n."""
    return positive(
        d, f"{ROLLOUT}.n" if d.stated(f"{ROLLOUT}.n") or not d.stated("rollout.n") else "rollout.n"
    )


def positive(d: Draft, key: str, default: int = 1) -> int:
    value = d.whole(key, default)
    if value < 1:
        raise d.wrong(key, value, "at least 1")
    return value


def sequence_parallel(d: Draft) -> int:
    return max(1, d.whole(f"{ACTOR}.ulysses_sequence_parallel_size"))


def verl_ranks(d: Draft) -> int:
    """veRL's data-parallel size: all its trainer GPUs / sequence-parallel size."""
    gpus = d.whole("trainer.nnodes") * d.whole("trainer.n_gpus_per_node")
    return max(1, gpus // sequence_parallel(d))


def micro_batch(d: Draft, role: str = ACTOR) -> int | None:
    """Trajectories per GPU and pass; the deprecated global number is divided by veRL's
    data-parallel size.
    """
    if d.stated(f"{role}.ppo_micro_batch_size_per_gpu"):
        return d.whole(f"{role}.ppo_micro_batch_size_per_gpu")
    if d.stated(f"{role}.ppo_micro_batch_size"):
        return max(1, d.whole(f"{role}.ppo_micro_batch_size") // verl_ranks(d))
    return None


def nodes(d: Draft) -> tuple[int, int]:
    """(node_num, gpu_per_node) of the whole cluster.  In the asynchronous recipe trainer and
    rollouter have GPUs of their own.
    """
    count = positive(d, "trainer.nnodes")
    per_node = positive(d, "trainer.n_gpus_per_node", 8)
    rollout_nodes = theirs = 0
    if apart(d):
        rollout_nodes = positive(d, "rollout.nnodes")
        theirs = positive(d, "rollout.n_gpus_per_node", 8)
    elif d.flag(f"{RM}.enable") and d.flag(f"{RM}.enable_resource_pool"):
        rollout_nodes = positive(d, f"{RM}.nnodes")
        theirs = positive(d, f"{RM}.n_gpus_per_node", 8)
    total = count * per_node + rollout_nodes * theirs
    if total > MAX_GPUS:
        raise d.wrong(
            "trainer.nnodes", count, f"fewer: {total:,} GPUs in all are more than {MAX_GPUS:,}"
        )
    if not rollout_nodes:
        return count, per_node
    if per_node == theirs == 8:
        return count + rollout_nodes, per_node
    if count == rollout_nodes and per_node + theirs <= 8:
        d.note(
            f"trainer ({count} x {per_node} GPUs) and rollouter ({rollout_nodes} x {theirs}) are taken to "
            f"share {count} node(s) of "
            f"{per_node + theirs}; if they have nodes of their own, set cluster.node_num and "
            f"cluster.gpu_per_node"
        )
        return count, per_node + theirs
    if per_node == theirs:
        return count + rollout_nodes, per_node
    d.warn(
        f"trainer ({count} x {per_node} GPUs) and rollouter ({rollout_nodes} x {theirs}) have different "
        f"nodes; the result counts {total} GPUs on "
        "one node: set cluster.node_num and cluster.gpu_per_node to what is there"
    )
    return 1, total


@dataclass(frozen=True)
class Gpus:
    """Who gets how many GPUs, here and in veRL.  `local` and accumulation are None where they are
    no whole numbers.
    """

    total: int
    rollout: int
    auxiliary: int
    trainer: int
    data_parallel: int
    rows: int  # experiences of an optimizer step, n x m
    local_mini_batch: int | None
    actor_accumulation: int | None
    critic_accumulation: int | None
    verl: dict[str, int | None]
    shared: bool = False  # the rollout GPUs are the trainer's


def split(d: Draft, engine_num: int, auxiliary: int) -> Gpus:
    """R8 and R9 for `engine_num` engines and `auxiliary` GPUs of other models."""
    count, per_node = nodes(d)
    tp = _engine_gpus(d)
    shared = colocated(d)
    trainer = count * per_node - auxiliary - (0 if shared else engine_num * tp)
    ranks = max(0, trainer // sequence_parallel(d))
    rows = runs(d) * mini_batch(d)
    dynamic = d.flag(f"{ACTOR}.use_dynamic_bsz")
    actor = None if dynamic else micro_batch(d)
    critic_dynamic = d.flag("critic.use_dynamic_bsz", dynamic)
    critic = micro_batch(d, "critic") if has_critic(d) and not critic_dynamic else None
    local = _whole(rows, ranks)
    theirs = _whole(rows, verl_ranks(d))
    return Gpus(
        total=count * per_node,
        shared=shared,
        rollout=engine_num * tp,
        auxiliary=auxiliary,
        trainer=trainer,
        data_parallel=ranks,
        rows=rows,
        local_mini_batch=local,
        actor_accumulation=_whole(local, actor),
        critic_accumulation=_whole(local, critic),
        verl={
            "gpus": d.whole("trainer.nnodes") * d.whole("trainer.n_gpus_per_node"),
            "local_mini_batch": theirs,
            "actor_accumulation": _whole(theirs, actor),
            "critic_accumulation": _whole(theirs, critic),
        },
    )


def fits(d: Draft, gpus: Gpus) -> bool:
    """Whether every rank gets the same whole number of rows, and of fixed micro-batches."""
    if gpus.trainer < 1 or gpus.local_mini_batch is None or not whole_nodes(d, gpus.trainer):
        return False
    if d.flag(f"{ACTOR}.use_dynamic_bsz"):
        return True
    sizes = [m for m in (micro_batch(d), micro_batch(d, "critic") if has_critic(d) else None) if m]
    return all(gpus.local_mini_batch % m == 0 for m in sizes)


def whole_nodes(d: Draft, trainer: int) -> bool:
    """A trainer of more than one node has whole nodes, and sequences are divided over whole groups
    of its ranks.
    """
    per_node = nodes(d)[1]
    return (trainer <= per_node or trainer % per_node == 0) and trainer % sequence_parallel(d) == 0


def choose_engines(d: Draft, auxiliary: int) -> int:
    """Engines where none were asked for: a quarter of the GPUs.

    More of them where the trainer would get parts of nodes, and in the exact profile until the
    batch divides over the rest.
    """
    count, per_node = nodes(d)
    tp = _engine_gpus(d)
    if colocated(d):
        return max(1, (count * per_node - auxiliary) // tp)
    if apart(d):
        return max(
            1, positive(d, "rollout.nnodes") * positive(d, "rollout.n_gpus_per_node", 8) // tp
        )
    first = max(1, count * per_node // 4 // tp)
    most = (count * per_node - auxiliary - 1) // tp
    divisors = [
        e for e in range(first, most + 1) if whole_nodes(d, count * per_node - e * tp - auxiliary)
    ] or [first]
    return next((e for e in divisors if d.exact and fits(d, split(d, e, auxiliary))), divisors[0])


def _whole(rows: int | None, parts: int | None) -> int | None:
    return rows // parts if rows is not None and parts and rows % parts == 0 else None
