"""Section `cluster`: the machines of the run."""

from __future__ import annotations

from rft.config.schema.base import Section, key, section


class RayInitConfig(Section):
    """How a local Ray is started."""

    num_cpus: int | None = key(
        None,
        "CPUs that a local Ray is told of; a fixed number helps under SLURM.  Null: the machine's, at least 8.",
        unit="CPUs",
        on_resume="safe",
        ge=1,
    )


class ClusterConfig(Section):
    """What is there.  Explorer engines take their GPUs first, the trainer gets the rest."""

    ray_address: str | None = key(
        None,
        "Join this Ray cluster, HOST:PORT or auto.  Null: a local Ray is started and stopped by the run; where processes of mode: train "
        "and mode: explore are to meet, auto.",
        on_resume="safe",
    )
    node_num: int = key(0, "Machines; 0 = found when the run starts (one for a local Ray).", unit="nodes", on_resume="safe", ge=0)
    gpu_per_node: int = key(0, "GPUs on each machine; 0 = found when the run starts.", unit="GPUs", on_resume="safe", ge=0)
    actor_start_timeout: float = key(
        900, "Longest wait for one process of the run to be ready.", unit="s", on_resume="safe", gt=0
    )
    stall_timeout: float | None = key(
        15.0,
        "A process of the run that for so long answers nothing and does not use its processors (trainer, explorer, buffer, coordinator; "
        "engines have a key of their own) counts as hung and ends the run.  Null: never.",
        unit="s",
        on_resume="safe",
        ge=1,
    )
    ray_init: RayInitConfig = section(RayInitConfig, "Starting a local Ray.")
