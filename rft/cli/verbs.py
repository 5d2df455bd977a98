"""The commands (verbs) of the core and of extras, listed without importing them."""

from __future__ import annotations

from rft.plugins import Verb, extras

CORE = {
    "run": Verb(
        "Train: explore, judge, learn, synchronise; resumes where it was stopped.",
        "rft run --config my.yaml trainer.total_steps=50",
        "rft.cli.run_command:run",
    ),
    "check": Verb(
        "Show what a configuration will do, and everything that is wrong with it.",
        "rft check --config my.yaml",
        "rft.cli.check_command:check",
    ),
    "explain": Verb(
        "Explain a configuration key, with its names in veRL and Trinity-RFT.",
        "rft explain lr",
        "rft.cli.explain_command:explain",
    ),
    "quickstart": Verb(
        "A real pretrained model learns single-digit sums on this machine.",
        "rft quickstart --seed 1",
        "rft.cli.quickstart_command:quickstart",
    ),
    "status": Verb(
        "Show what a run is doing or how it ended, read from its files.",
        "rft status runs/rft/tiny",
        "rft.cli.status_command:status",
    ),
    "chat": Verb(
        "Talk to a checkpoint, or to a model.",
        "rft chat runs/rft/tiny",
        "rft.cli.chat_command:chat",
    ),
    "timeline": Verb(
        "Draw when each part of a run worked and when it waited.",
        "rft timeline runs/rft/tiny",
        "rft.cli.status_command:timeline",
    ),
    "eval": Verb(
        "Evaluate a model on a taskset, without a configuration file.",
        "rft eval runs/model questions.jsonl --reward math_reward --workflow math_workflow",
        "rft.cli.eval_command:evaluate",
    ),
    "debug": Verb(
        "Play one task, score one answer, or train one step again.",
        "rft debug workflow --config my.yaml --say 4",
        "rft.cli.debug_command:debug",
    ),
    "new": Verb(
        "Write the skeleton of a workflow, reward, judge ... and its test.",
        "rft new config sums, or: rft new workflow my_workflow",
        "rft.cli.new_command:new",
    ),
    "export": Verb(
        "Copy the verified Hugging Face model of a checkpoint.",
        "rft export runs/rft/tiny -o exported",
        "rft.cli.export_command:export",
    ),
    "log": Verb(
        "Show a run's logs, merged by time.",
        "rft log runs/rft/tiny -l warning",
        "rft.cli.status_command:log",
    ),
    "plugins": Verb(
        "List what a configuration can name.",
        "rft plugins",
        "rft.cli.explain_command:plugins",
    ),
    "buffer": Verb(
        "Look into a run's experience buffer.",
        "rft buffer sample runs/rft/tiny --step 10 --worst 3",
        "rft.cli.buffer_command:buffer",
    ),
}


def all_verbs() -> dict[str, Verb]:
    """Return all verbs by name."""
    verbs = dict(CORE)
    for extra in extras().values():
        verbs |= extra.verbs
    return verbs
