"""The extra that learns from sessions of agents elsewhere, and its client."""

from rft.plugins import CliCommand, Extra

EXTRA = Extra(
    commands={
        "serve": CliCommand(
            "Serve an OpenAI-compatible API and train on the rewards posted to it.",
            "rft serve --config my.yaml",
            "rft.extras.serve.serve_command:serve",
        ),
    },
    entries={
        "service": {
            "clients": "rft.extras.serve.access:clients",
            "explorer": "rft.extras.serve.service:service_of_a_process",
        },
    },
)
