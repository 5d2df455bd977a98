"""The extra with environments, generators and filters of other libraries, and rewards of data sets."""

from rft.plugins import Extra

EXTRA = Extra(
    plugins=(
        "rft.extras.worlds.calibration_reward",
        "rft.extras.worlds.countdown_reward",
        "rft.extras.worlds.countdown_workflow",
        "rft.extras.worlds.dapo_reward",
        "rft.extras.worlds.environment_workflows",
        "rft.extras.worlds.frozen_lake_workflow",
        "rft.extras.worlds.gsm8k_reward",
        "rft.extras.worlds.gym_reward",
        "rft.extras.worlds.juicer_operators",
        "rft.extras.worlds.juicer_rows",
        "rft.extras.worlds.taxi_workflow",
        "rft.extras.worlds.text_world_workflows",
        "rft.extras.worlds.tool_call_workflow",
    ),
    entries={"taskset": {"reasoning_gym": "rft.extras.worlds.gym_tasksets:open_gym"}},
)
