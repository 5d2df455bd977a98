"""The extra that forecasts a run on another cluster."""

from rft.plugins import CliCommand, Extra

EXTRA = Extra(
    commands={
        "simulate": CliCommand(
            "Forecast step times, waits and staleness on a cluster.",
            "rft simulate cluster.yaml --config my.yaml",
            "rft.extras.simulate.simulate_command:simulate",
        ),
    },
)
