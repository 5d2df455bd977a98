"""The extra that foretells a run on a cluster that is not here."""

from rft.plugins import Extra, Verb

EXTRA = Extra(
    verbs={
        "simulate": Verb(
            "Foretell step times, waits and staleness on a cluster.",
            "rft simulate cluster.yaml --config my.yaml",
            "rft.extras.simulate.simulate_command:simulate",
        ),
    },
)
