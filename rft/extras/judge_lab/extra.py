"""The extra that measures judges and scores stored answers again."""

from rft.plugins import CliCommand, Extra

EXTRA = Extra(
    commands={
        "bench": CliCommand(
            "Measure a reward on a file of answers, by source.",
            "rft bench -i answers.jsonl --reward-fn math_reward --truth-key answer",
            "rft.extras.judge_lab.judge_command:bench",
        ),
        "replay": CliCommand(
            "Score the stored rows of a run with another reward.",
            "rft replay runs/rft/tiny --reward my_rewards.py:better",
            "rft.extras.judge_lab.replay_command:replay",
        ),
        "judge": CliCommand(
            "Measure how reliable a judge is.",
            "rft judge report --config my.yaml --input labelled.jsonl",
            "rft.extras.judge_lab.judge_command:judge",
        ),
    },
    entries={"stored_run": {"replay": "rft.extras.judge_lab.replay_command:rescored_run"}},
)
