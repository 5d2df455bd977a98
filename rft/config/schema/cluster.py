"""Section `cluster`: the machines of the run."""

from __future__ import annotations

from rft.config.schema.base import Section, key


class ClusterConfig(Section):
    """What is there.  Explorer engines take their GPUs first, the trainer gets the rest."""

    ray_address: str | None = key(
        None, "Join this Ray cluster.  Null: a local Ray is started and stopped by the run.", on_resume="safe"
    )
    node_num: int = key(0, "Machines; 0 = found when the run starts (one for a local Ray).", unit="nodes", on_resume="safe", ge=0)
    gpu_per_node: int = key(0, "GPUs on each machine; 0 = found when the run starts.", unit="GPUs", on_resume="safe", ge=0)
