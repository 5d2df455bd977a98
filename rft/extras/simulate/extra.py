"""The extra that forecasts a run on another cluster."""

from rft.plugins import Extra, Verb

EXTRA = Extra(
    verbs={
        "simulate": Verb(
            "Forecast step times, waits and staleness on a cluster.",
            "rft simulate cluster.yaml --config my.yaml",
            "rft.extras.simulate.simulate_command:simulate",
        ),
    },
)
