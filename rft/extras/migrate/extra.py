"""The extra that converts files of veRL and Trinity-RFT, and knows their names of keys."""

from rft.plugins import CliCommand, Extra

SCORES = "rft.extras.migrate.score_functions"
REFUSED = "rft.extras.migrate.compat.refused_plugins"
KEYS = "rft.extras.migrate.compat.keys"
EXTRA = Extra(
    plugins=(f"{SCORES}.geometry",),
    commands={
        "convert": CliCommand(
            "Turn a veRL launch script or a YAML file of Trinity-RFT into a configuration.",
            "rft convert verl run_grpo.sh",
            "rft.extras.migrate.convert_command:convert",
        ),
    },
    entries={
        "refused_reward": {"elsewhere": f"{REFUSED}:REWARDS"},
        "refused_workflow": {"elsewhere": f"{REFUSED}:WORKFLOWS"},
        "reward_alias": {"verl": f"{SCORES}.data_sources:translate"},
        "reward_form": {"verl": f"{SCORES}.adapt:adapt"},
        "file_hints": {"migrate": f"{KEYS}.not_offered:FILES"},
        "key_hint": {"migrate": f"{KEYS}.not_offered:key_hint"},
        "value_hint": {"migrate": f"{KEYS}.not_offered:value_hint"},
        "explain": {"names": "rft.extras.migrate.compat.key_names:describe"},
    },
)
