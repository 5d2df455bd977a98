"""Values that several arguments decide together: sizes and schedule, tasksets, algorithm,
evaluation, reward model, GPU split.

Each function writes one group from what the launch says and from veRL's defaults.  Depends on
veRL's keys and ours.  Invariant: what R1 to R19 ask for is written here, whether an argument states
it or not.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

from rft.algorithm.catalog import losses
from rft.errors import ConfigError
from rft.extras.migrate.convert import releases
from rft.extras.migrate.convert.draft import EVAL, TRAIN, Draft
from rft.extras.migrate.convert.names import (
    ACTOR,
    ENGINE,
    KL,
    OPTIM,
    RM,
    ROLLOUT,
    TRACKERS,
    estimator,
    eval_samples,
    loss_reads,
    policy_loss,
)
from rft.extras.migrate.convert.sizes import (
    MINI,
    Gpus,
    ahead,
    ask_about_mini_batch,
    choose_engines,
    colocated,
    fits,
    has_critic,
    interval,
    is_async,
    micro_batch,
    mini_batch,
    nodes,
    positive,
    reward_gpus,
    reward_tp,
    runs,
    split,
    whole_nodes,
)

ARGS = "algorithm.policy_loss_fn_args"
AUXILIARY = "explorer.auxiliary_models"
INPUT = "buffer.explorer_input"
BYPASS = "algorithm.rollout_correction.bypass_mode"


def tasksets(d: Draft) -> None:
    """R16: one taskset per file, named after its folder."""
    d.trains = one_taskset_per_file(d, TRAIN, "data.train_files")
    d.evals = one_taskset_per_file(d, EVAL, "data.val_files")
    for i in range(d.trains):
        if d.exact or d.stated("data.shuffle"):
            order = "shuffle" if d.flag("data.shuffle") else "sequential"
            d.put(f"{TRAIN}[{i}].data_selector.selector_type", order, "data.shuffle")
        if i and not d.exact and not d.stated(f"{ROLLOUT}.temperature"):
            d.put(
                f"{TRAIN}[{i}].rollout_args.temperature",
                1.0,
                "as the guide does: for every set but the first",
            )
    d.put(
        f"{INPUT}.default_workflow_type",
        "simple_workflow",
        "one answer per prompt; multi-turn needs another workflow",
    )
    if not d.exact:
        d.note(
            "format.response_key: answer is the guide's guess; veRL's own data has the truth in "
            "reward_model.ground_truth"
        )


def one_taskset_per_file(d: Draft, sets: str, key: str) -> int:
    """How many there are.  A file whose folder only the environment tells is named whole."""
    files = _files(d, key)
    names = {t["name"] for t in d.read(TRAIN, [])}
    for i, file in enumerate(files):
        folder = posixpath.dirname(file) or "."
        split_name = posixpath.splitext(posixpath.basename(file))[0]
        where = (
            {"path": file}
            if "}" in posixpath.basename(file)
            else {"path": folder, "split": split_name}
        )
        name = _unique(_name(folder) + ("_eval" if sets is EVAL else ""), split_name, names)
        for part, value in {"name": name, "storage_type": "file", **where}.items():
            d.put(f"{sets}[{i}].{part}", value, said_by(d, key))
        if d.exact:
            d.put(f"{sets}[{i}].format.preset", "verl", "the columns of veRL's data")
        else:
            d.put(f"{sets}[{i}].format.prompt_key", "prompt", "veRL's default of data.prompt_key")
            d.put(f"{sets}[{i}].format.response_key", "answer", "the guide's guess; check the data")
    return len(files)


def _files(d: Draft, key: str) -> list[str]:
    value = d.get(key)
    files = (
        [str(v) for v in value]
        if isinstance(value, list)
        else []
        if value is None
        else [str(value)]
    )
    for file in files:
        if file.startswith("hdfs:"):
            raise ConfigError(
                "HDFS is not offered; copy or mount the file and name it locally",
                key=key,
                given=file,
            )
    if not files and key == "data.train_files":
        raise d.wrong(key, value, "at least one file")
    return files


def _name(folder: str) -> str:
    last = posixpath.basename(re.sub(r"\$\{[^}]*\}", "", folder).rstrip("/"))
    return re.sub(r"[^\w.+-]", "_", last).lstrip("._+-") or "data"


def _unique(name: str, split_name: str, names: set[str]) -> str:
    if name in names:
        name = f"{name}_{re.sub(r'[^a-zA-Z0-9_.+-]', '_', split_name)}"
    count = 2
    base = name
    while name in names:
        name = f"{base}_{count}"
        count = count + 1
    names.add(name)
    return name


def evaluation(d: Draft) -> None:
    """`val_kwargs`: greedy unless do_sample; n runs.  The exact profile states it for every set."""
    prefix = f"{ROLLOUT}.val_kwargs"
    args = f"{EVAL}[i].rollout_args"
    sampled = eval_samples(d)
    if sampled and not (
        d.flag(f"{prefix}.do_sample") or d.stated(f"{ROLLOUT}.mode") or d.release or is_async(d)
    ):
        d.questions.append(
            f"{prefix}.temperature is given without do_sample: asynchronous veRL samples "
            f"evaluations with it, as is written here; older "
            "veRL was greedy.  Is sampling meant?  Else write temperature=0"
        )
    if d.exact and not sampled:
        d.put(f"{args}.temperature", 0, "veRL evaluates greedily: do_sample is off")
    else:
        for name in ("temperature", "top_p", "top_k"):
            if d.stated(f"{prefix}.{name}") or (
                d.exact and (name == "temperature" or d.stated(f"{ROLLOUT}.{name}"))
            ):
                value = d.get(f"{prefix}.{name}")
                d.put(
                    f"{args}.{name}",
                    -1 if name == "top_k" and value == 0 else value,
                    f"{prefix}.{name}",
                )
    if d.exact or d.stated(f"{prefix}.n"):
        d.put(f"{EVAL}[i].repeat_times", d.whole(f"{prefix}.n"), f"{prefix}.n")


def batch(d: Draft) -> None:
    """R1 to R7."""
    d.interval = interval(d)
    mini = mini_batch(d)
    ask_about_mini_batch(d)
    n = runs(d)
    d.put("buffer.batch_size", mini, f"{MINI}, prompts of an optimizer step")
    d.put("buffer.train_batch_size", mini * n, f"{mini} prompts x {n} runs")
    d.put("algorithm.repeat_times", n, f"{ROLLOUT}.n")
    if is_async(d):
        d.put("synchronizer.sync_style", "fully_async", "the asynchronous recipe")
        d.put(
            "synchronizer.sync_interval",
            d.interval,
            "trigger_parameter_sync_step x require_batches",
        )
        d.update = positive(d, "async_training.require_batches")
    else:
        d.update, size = d.interval, d.whole("data.train_batch_size")
        d.put("synchronizer.sync_style", "fixed", "veRL's synchronous loop")
        d.put(
            "synchronizer.sync_interval",
            d.interval,
            f"data.train_batch_size {size} / ppo_mini_batch_size {mini}",
        )
        d.put(
            "synchronizer.sync_offset",
            d.interval if ahead(d) else 0 if d.exact else 1,
            "one iteration ahead"
            if ahead(d)
            else "an iteration trains on its own weights"
            if d.exact
            else "the guide's",
        )
    d.put("synchronizer.sync_timeout", 1200, "s; the guide's")


def algorithm(d: Draft) -> None:
    """R13 to R15, the clip range, and in the exact profile every other term of the loss."""
    kind, advantage = estimator(d)
    reason = said_by(d, "algorithm.adv_estimator")
    d.put("algorithm.algorithm_type", kind, reason)
    d.put("algorithm.advantage_fn", advantage, reason)
    _clip_range(d)
    corrected = any(k.startswith("algorithm.rollout_correction.") and d.stated(k) for k in d.given)
    if (
        corrected
        and not d.stated(BYPASS)
        and d.flag(BYPASS)
        and not d.flag("async_training.compute_prox_log_prob")
    ):
        d.put(BYPASS, True, "the asynchronous recipe takes old log-probs from the engines")
    if d.flag(f"{ACTOR}.use_kl_loss"):
        d.put("algorithm.kl_loss_fn", _kl(d, f"{ACTOR}.kl_loss_type"), f"{ACTOR}.kl_loss_type")
        d.put(
            "algorithm.kl_loss_fn_args.kl_coef",
            d.number(f"{ACTOR}.kl_loss_coef"),
            f"{ACTOR}.kl_loss_coef",
        )
    else:
        d.put("algorithm.kl_loss_fn", "none", f"{ACTOR}.use_kl_loss is off")
    if not d.flag("algorithm.use_kl_in_reward"):
        d.put("algorithm.kl_penalty_fn", "none", "algorithm.use_kl_in_reward is off")
        return
    d.put("algorithm.kl_penalty_fn", _kl(d, "algorithm.kl_penalty"), "algorithm.kl_penalty")
    args = "algorithm.kl_penalty_fn_args"
    adaptive = d.text("algorithm.kl_ctrl.type") == "adaptive"
    d.put(f"{args}.kl_coef", d.number("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_ctrl.kl_coef")
    d.put(f"{args}.adaptive", adaptive, "algorithm.kl_ctrl.type")
    if adaptive:
        d.put(
            f"{args}.target_kl",
            d.number("algorithm.kl_ctrl.target_kl"),
            "algorithm.kl_ctrl.target_kl",
        )
        d.put(f"{args}.horizon", d.whole("algorithm.kl_ctrl.horizon"), "algorithm.kl_ctrl.horizon")


def _kl(d: Draft, key: str) -> str:
    name = d.text(key)
    estimator = KL.get(name.removesuffix("+"))
    # an unknown name is refused by its rule
    return "none" if estimator is None else estimator + ("+" if name.endswith("+") else "")


def _clip_range(d: Draft) -> None:
    """veRL's file sets low and high to 0.2, so clip_ratio alone changes nothing there; it is taken
    at its word, with a warning.
    """
    stated = {side: d.stated(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high")}
    both = d.stated(f"{ACTOR}.clip_ratio") and not d.terse
    sides = not releases.up_to(d.release, releases.EARLY)
    if sides and both and not all(stated.values()) and d.number(f"{ACTOR}.clip_ratio") != 0.2:
        d.warn(
            f"{ACTOR}.clip_ratio {d.get(f'{ACTOR}.clip_ratio')} is applied to the sides that are "
            f"not given themselves; veRL would keep "
            "its 0.2 there, since its file sets clip_ratio_low and clip_ratio_high"
        )
    has_clip = policy_loss(d) in losses()  # veRL's file has these numbers for every loss
    for side in ("low", "high"):
        key = f"{ACTOR}.clip_ratio_{side}"
        if not loss_reads(d, f"clip_range_{side}"):
            continue
        if stated[side]:
            # CISPO's scripts write 10: a weight is never below 0
            whole = side == "low" and d.number(key) > 1
            d.put(f"{ARGS}.clip_range_{side}", 1.0 if whole else d.get(key), key)
        elif both:
            d.put(f"{ARGS}.clip_range_{side}", d.get(f"{ACTOR}.clip_ratio"), f"{ACTOR}.clip_ratio")
        elif (d.exact and has_clip) or any(stated.values()):
            d.put(f"{ARGS}.clip_range_{side}", d.get(key), f"veRL's default of {key}")


def names(d: Draft) -> None:
    """R17 and R18, and who the run is."""
    project = d.text("trainer.project_name")
    name = d.text("trainer.experiment_name")
    d.put("project", _folder(project), said_by(d, "trainer.project_name"))
    d.put("name", _folder(name), said_by(d, "trainer.experiment_name"))
    root = "./checkpoints"
    key = "trainer.default_local_dir"
    if d.stated(key):
        tail = f"/{project}/{name}"
        root = d.text(key).rstrip("/")
        if root.endswith(tail):
            root = root.removesuffix(tail) or "/"
        elif "${trainer." in root:
            root = root.partition("/${trainer.")[0] or "."
        else:
            d.note(f"checkpoints go to <checkpoint_root_dir>/<project>/<name>, below {root}")
    d.put("checkpoint_root_dir", root, key if d.stated(key) else "veRL's default")
    named = d.get("trainer.logger")
    kinds = [n for n in (named if isinstance(named, list) else [named]) if n in TRACKERS]
    kinds = kinds if d.exact else kinds[:1]
    if d.exact or d.stated("trainer.logger"):
        value: Any = "none" if not kinds else kinds[0] if len(kinds) == 1 else kinds
        d.put(
            "monitor.monitor_type",
            value,
            said_by(d, "trainer.logger") + (" without console" if kinds else ": console only"),
        )


def _folder(name: str) -> str:
    """A piece of a path: no slash."""
    return name.replace("/", "_").strip() or "verl"


def reward(d: Draft) -> None:
    """The reward function of a file, and the reward model as one more engine.

    Where there is a model, it alone scores what is trained on, and functions what is evaluated.
    """
    if d.stated("custom_reward_function.path"):
        value = f"{d.text('custom_reward_function.path')}:{d.text('custom_reward_function.name')}"
        d.put(f"{INPUT}.default_reward_fn_type", value, "custom_reward_function.path and .name")
    if not d.flag("reward_model.enable"):
        return
    d.put(
        f"{AUXILIARY}[0].model_path", d.text("reward_model.model.path"), "reward_model.model.path"
    )
    if d.exact:
        d.put(
            f"{AUXILIARY}[0].task",
            "score",
            "veRL's reward models are classifiers, which the engine scores with",
        )
        for i in range(d.trains):
            d.put(f"{TRAIN}[{i}].default_reward_fn_type", "reward_model", "reward_model.enable")
    tp = reward_tp(d)
    d.put(
        f"{AUXILIARY}[0].engine_num",
        max(1, reward_gpus(d) // tp),
        "its GPUs / tensor_parallel_size",
    )
    d.put(
        f"{AUXILIARY}[0].tensor_parallel_size",
        tp,
        said_by(d, f"{RM}.rollout.tensor_model_parallel_size"),
    )
    lengths = [
        d.whole(key)
        for name in ("prompt", "response")
        if d.stated(key := f"{RM}.rollout.{name}_length")
    ]
    if len(lengths) == 2:
        d.put(
            f"{AUXILIARY}[0].max_model_len",
            sum(lengths),
            f"{RM}.rollout.prompt_length + response_length",
        )
    if d.stated("custom_reward_function.path"):
        d.questions.append(
            f"{d.text('custom_reward_function.path')} may ask the reward model itself, as a "
            f"generative one; here the model scores and is "
            "not asked by functions.  For a generative one write a judge (`rft new judge NAME`) "
            "and name it as the reward"
        )
    if d.exact:
        d.note(
            "explorer.auxiliary_models[0] scores what is trained on (reward_model); evaluation "
            "keeps functions, as in veRL"
        )
    else:
        d.note(
            "explorer.auxiliary_models[0] is the reward model, which the guide leaves to a "
            "workflow; give it task: score and the training "
            "tasksets default_reward_fn_type: reward_model, as the profile exact does"
        )


def gpus(d: Draft) -> Gpus:
    """R8 and R9: the engines, the cluster, and whether the batch divides over the GPUs that are
    left.
    """
    count, per_node = nodes(d)
    d.put("cluster.node_num", count, said_by(d, "trainer.nnodes"))
    d.put("cluster.gpu_per_node", per_node, said_by(d, "trainer.n_gpus_per_node"))
    auxiliary = reward_gpus(d)
    if colocated(d):
        d.put("mode", "colocate", "engines and trainer share their GPUs in turns, as in veRL")
    if d.engine_num is not None:
        engines = d.engine_num
        reason = "--engine-num"
    else:
        engines = choose_engines(d, auxiliary)
        reason = "free choice (--engine-num): a quarter of the GPUs" + (
            ", or more until the batch divides" if d.exact else ""
        )
        reason = "one on every tensor_parallel_size GPUs" if colocated(d) else reason
    d.put(f"{ENGINE}.engine_num", engines, reason)
    if count > 1 and not (colocated(d) and engines == 1):
        d.put(
            "synchronizer.sync_method",
            "checkpoint",
            "weights move between nodes through the shared checkpoint folder",
        )
    gpus = split(d, engines, auxiliary)
    d.trainer_ranks = max(1, gpus.trainer)
    _tell_split(d, gpus, engines)
    return gpus


def _tell_split(d: Draft, gpus: Gpus, engines: int) -> None:
    if gpus.trainer < 1:
        d.warn(
            f"{engines} engines take {gpus.rollout} and other models {gpus.auxiliary} of "
            f"{gpus.total} GPUs; none is left for the "
            "trainer: lower --engine-num"
        )
        return
    if gpus.shared:
        d.note(
            f"mode colocate: {gpus.trainer} GPUs generate and train in turns, as in veRL; no GPU "
            f"has run it yet"
        )
        return
    served = f", {gpus.auxiliary} serve the reward model" if gpus.auxiliary else ""
    d.note(
        f"GPU split: veRL trains and generates on the same {gpus.verl['gpus']} GPUs; here "
        f"{gpus.rollout} generate{served} and "
        f"{gpus.trainer} train"
    )
    if not whole_nodes(d, gpus.trainer):
        d.warn(
            f"the trainer would get {gpus.trainer} GPUs, more than one node and no whole number "
            f"of nodes; choose another --engine-num"
        )
    elif gpus.local_mini_batch is None:
        d.warn(
            f"{gpus.rows} experiences of a step do not divide over {gpus.data_parallel} trainer "
            f"ranks; they are dealt by tokens, which "
            "fixed micro-batches do not allow.  Another --engine-num may fit"
        )
    elif not fits(d, gpus):
        d.warn(
            f"the {gpus.local_mini_batch} rows that a rank has of a step are no whole number of "
            f"micro-batches "
            f"({micro_batch(d)} rows"
            + (f", critic {micro_batch(d, 'critic')}" if has_critic(d) else "")
            + "); change one of them"
        )


def said_by(d: Draft, key: str) -> str:
    """Why a value of `key` is what it is."""
    return key if d.stated(key) else f"veRL's default of {key}"


def explain(d: Draft) -> None:
    """What a reader of the result must know: where the two programs differ whatever the keys say."""
    if d.interval > 1 and not is_async(d):
        how = (
            "frequencies, warm-up and total steps are multiplied by it"
            if d.exact
            else "the guide copies frequencies unchanged"
        )
        d.note(f"one veRL iteration is {d.interval} steps here; {how}")
        d.note(
            f"learning rate: veRL steps its schedule once per iteration, we once per step, so the "
            f"{d.interval} steps of a window have "
            "rates of their own"
        )
        d.note(
            "batches: veRL permutes a whole iteration before it cuts mini batches; here a mini "
            "batch is an explorer batch"
        )
        if d.whole(f"{ACTOR}.ppo_epochs") > 1:
            d.note(
                "ppo_epochs: each pass of veRL's is over a whole iteration; here a mini batch has "
                "all its passes at once"
            )
    if (
        estimator(d)[1] in ("ppo", "reinforceplusplus", "reinforceplusplus_baseline")
        and d.interval > 1
    ):
        d.note(
            "whitening: veRL whitens advantages over the whole iteration, here over each mini "
            "batch, so advantages differ by the "
            "batches' own mean and deviation"
        )
    if not is_async(d):
        whose = (
            "the same weights (sync_offset 0)"
            if d.exact
            else "the weights before for a window's first batch (sync_offset 1)"
        )
        d.note(
            "old log-probs: veRL computes them once per iteration with the weights it starts with; "
            "here they are the engine's, from "
            f"{whose}"
        )
    if not d.exact:
        _explain_guide(d)
    for key in (f"{ACTOR}.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps"):
        if d.stated(key) and not d.whole(key) and d.number(f"{key}_ratio"):
            d.warn(
                f"{key} 0 and a ratio: the ratio is taken, as newer veRL does; older FSDP workers "
                f"do not warm up then"
            )
    if d.number(f"{ACTOR}.optim.lr_warmup_steps_ratio") and not d.stated(
        "trainer.total_training_steps"
    ):
        d.note(
            f"{OPTIM}.lr_warmup_steps_ratio is a share of all steps, which are epochs x whole "
            f"batches of the tasksets"
        )
    if not is_async(d):
        d.note(
            "each epoch drops its incomplete last batch of m prompts; veRL drops one of B, so step "
            "counts differ slightly"
        )


def _explain_guide(d: Draft) -> None:
    """Where the values of the alignment guide differ from what veRL computes."""
    d.note(
        "sync_offset 1 is the guide's example: a window's first batch comes from the weights "
        "before; 0 is veRL's loop"
    )
    if d.stated(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"):
        d.note(
            "the guide says that no actor_rollout_ref.rollout key has an effect, and its own "
            "example keeps one of them"
        )
    if d.interval > 1 and (d.stated("trainer.save_freq") or d.stated("trainer.test_freq")):
        d.note(
            "save_interval and eval_interval count steps here and iterations in veRL; the "
            "guide copies the numbers"
        )
    if f"{ROLLOUT}.val_kwargs.temperature" not in d.given:
        d.note(
            "evaluation inherits the training temperature in the guide's profile; veRL "
            "evaluates greedily"
        )
