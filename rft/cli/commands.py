"""The commands of the core and of extras, whose functions it does not import."""

from __future__ import annotations

from rft.plugins import CliCommand, extras

CORE = {
    "run": CliCommand(
        "Train a model, or resume a run that was stopped.",
        "rft run --config my.yaml trainer.total_steps=50",
        "rft.cli.run_command:run",
    ),
    "check": CliCommand(
        "Show what a configuration will do, and everything that is wrong with it.",
        "rft check --config my.yaml",
        "rft.cli.check_command:check",
    ),
    "explain": CliCommand(
        "Explain a configuration key, with its names in veRL and Trinity-RFT.",
        "rft explain lr",
        "rft.cli.explain_command:explain",
    ),
    "quickstart": CliCommand(
        "Train a small pretrained model on single-digit sums.",
        "rft quickstart --seed 1",
        "rft.cli.quickstart_command:quickstart",
    ),
    "status": CliCommand(
        "Show what a run is doing or how it ended, read from its files.",
        "rft status runs/rft/tiny",
        "rft.cli.status_command:status",
    ),
    "chat": CliCommand(
        "Talk to the checkpoint of a run, or to a model folder.",
        "rft chat runs/rft/tiny",
        "rft.cli.chat_command:chat",
    ),
    "timeline": CliCommand(
        "Draw when each part of a run worked and when it waited.",
        "rft timeline runs/rft/tiny",
        "rft.cli.status_command:timeline",
    ),
    "eval": CliCommand(
        "Evaluate a model on a taskset, without a configuration file.",
        "rft eval runs/model questions.jsonl --reward math_reward --workflow math_workflow",
        "rft.cli.eval_command:evaluate",
    ),
    "debug": CliCommand(
        "Run one task, score one answer, or repeat one train step.",
        "rft debug workflow --config my.yaml --say 4",
        "rft.cli.debug_command:debug",
    ),
    "new": CliCommand(
        "Write the skeleton of a workflow, reward, judge ... and its test.",
        "rft new config sums, or: rft new workflow my_workflow",
        "rft.cli.new_command:new",
    ),
    "export": CliCommand(
        "Write a checkpoint as a Hugging Face model.",
        "rft export runs/rft/tiny -o exported",
        "rft.cli.export_command:export",
    ),
    "log": CliCommand(
        "Show a run's logs, merged by time.",
        "rft log runs/rft/tiny -l warning",
        "rft.cli.status_command:log",
    ),
    "plugins": CliCommand(
        "List workflows, rewards, losses and other plugins by name.",
        "rft plugins",
        "rft.cli.explain_command:plugins",
    ),
    "buffer": CliCommand(
        "Query, sample or audit the experiences of a run.",
        "rft buffer sample runs/rft/tiny --step 10 --worst 3",
        "rft.cli.buffer_command:buffer",
    ),
}


def all_commands() -> dict[str, CliCommand]:
    """Return all commands by name."""
    commands = dict(CORE)
    for extra in extras().values():
        commands |= extra.commands
    return commands
