"""The extra that runs programs which a model wrote: rewards, tools and workflows around them."""

from rft.plugins import Extra

EXTRA = Extra(
    plugins=(
        "rft.extras.sandbox.code_reward",
        "rft.extras.sandbox.code_workflow",
        "rft.extras.sandbox.react_workflow",
        "rft.extras.sandbox.repair_workflow",
    ),
)
