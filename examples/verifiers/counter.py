"""An environment of NeMo Gym, as a taskset of verifiers (v1): a counter with two tools.

Its server needs Python 3.12 or 3.13, which `uv` finds or loads; runs share one that is named in
`task: {resources_url}`.
"""

from __future__ import annotations

from verifiers.v1.tasksets import nemo_gym

__all__ = ["Counter", "NeMoGymEnv"]

NeMoGymEnv = nemo_gym.NeMoGymEnv  # starts the server


class Counter(nemo_gym.NeMoGymTaskset):
    resource_server = (
        "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"
    )
