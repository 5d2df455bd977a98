"""Environments of other libraries: text games (textarena), verifiers, OpenEnv.  What they take stands in rft/workflow/adapters.

explorer_input:
  taskset: {path: "rft.taskset.seeds:seeds", default_workflow_type: text_game_workflow, workflow_args: {env_id: GuessTheNumber-v0}}
"""

from rft.workflow.adapters.openenv import OpenEnvArgs, OpenEnvWorkflow
from rft.workflow.adapters.textarena import TextGame, TextGameArgs
from rft.workflow.adapters.verifiers import VerifiersArgs, VerifiersWorkflow
from rft.workflow.base import workflow

workflow("text_game_workflow", args=TextGameArgs)(TextGame)
workflow("verifiers_workflow", args=VerifiersArgs)(VerifiersWorkflow)
workflow("openenv_workflow", args=OpenEnvArgs)(OpenEnvWorkflow)
