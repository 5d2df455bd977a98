"""The extra that learns from sessions of agents elsewhere, and its client."""

from rft.plugins import Extra, Verb

EXTRA = Extra(
    verbs={
        "serve": Verb(
            "Answer OpenAI requests and learn from the rewards that are posted.",
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
