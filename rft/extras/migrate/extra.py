"""The extra that reads files of veRL and Trinity-RFT, and their spellings of keys."""

from rft.plugins import Extra, Verb

KEYS = "rft.extras.migrate.compat.keys"
EXTRA = Extra(
    verbs={
        "convert": Verb(
            "Turn a veRL launch script or YAML file into a configuration.",
            "rft convert verl run_grpo.sh",
            "rft.extras.migrate.convert_command:convert",
        ),
    },
    entries={
        "foreign_keys": {
            "not_offered": f"{KEYS}.not_offered:NotOffered",
            "trinity": f"{KEYS}.trinity_spellings:TrinityKeys",
            "verl": f"{KEYS}.verl_spellings:VerlKeys",
        },
        "explain": {"names": "rft.extras.migrate.compat.key_names:describe"},
    },
)
