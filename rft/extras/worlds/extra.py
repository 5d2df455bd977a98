"""The extra with environments, generators and filters of other libraries."""

from rft.plugins import Extra

EXTRA = Extra(
    plugins=(
        "rft.extras.worlds.environment_workflows",
        "rft.extras.worlds.frozen_lake_workflow",
        "rft.extras.worlds.gym_reward",
        "rft.extras.worlds.juicer_operators",
        "rft.extras.worlds.juicer_rows",
        "rft.extras.worlds.taxi_workflow",
        "rft.extras.worlds.text_world_workflows",
    ),
    entries={"taskset": {"reasoning_gym": "rft.extras.worlds.gym_tasksets:open_gym"}},
)
