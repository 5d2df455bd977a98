"""The extra that measures judges and scores stored answers again."""

from rft.plugins import Extra, Verb

EXTRA = Extra(
    verbs={
        "bench": Verb(
            "Score stored answers with a taskset's reward, split by source.",
            "rft bench -i answers.jsonl --reward-fn math_reward --truth-key answer",
            "rft.extras.judge_lab.judge_command:bench",
        ),
        "replay": Verb(
            "Score a run's stored rollouts with another reward.",
            "rft replay runs/rft/tiny --reward my_rewards.py:better",
            "rft.extras.judge_lab.replay_command:replay",
        ),
        "judge": Verb(
            "Measure how reliable a judge is.",
            "rft judge report --config my.yaml --input labelled.jsonl",
            "rft.extras.judge_lab.judge_command:judge",
        ),
    },
    entries={"stored_run": {"replay": "rft.extras.judge_lab.replay_command:rescored_run"}},
)
