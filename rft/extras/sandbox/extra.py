"""The extra for running programs of a model: rewards, tools and workflows."""

from rft.plugins import Extra

EXTRA = Extra(
    plugins=(
        "rft.extras.sandbox.code_reward",
        "rft.extras.sandbox.code_workflow",
        "rft.extras.sandbox.react_workflow",
        "rft.extras.sandbox.repair_workflow",
        "rft.extras.sandbox.terminal_workflow",
    ),
)
