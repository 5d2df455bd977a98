"""Environments of other libraries: text games (textarena), verifiers, OpenEnv.
rft/extras/worlds/adapters.py defines their arguments.

explorer_input:
  taskset: {path: "rft.taskset.generated_tasks:seeds", default_workflow_type: text_game_workflow,
            workflow_args: {env_id: GuessTheNumber-v0}}
"""

from rft import register
from rft.extras.worlds.adapters import (
    OpenEnvArgs,
    OpenEnvWorkflow,
    TextGame,
    TextGameArgs,
    VerifiersArgs,
    VerifiersWorkflow,
)

register.workflow("text_game_workflow", args=TextGameArgs)(TextGame)
register.workflow("verifiers_workflow", args=VerifiersArgs)(VerifiersWorkflow)
register.workflow("openenv_workflow", args=OpenEnvArgs)(OpenEnvWorkflow)
