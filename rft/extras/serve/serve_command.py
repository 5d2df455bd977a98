"""`rft serve`: answer OpenAI requests, take rewards, and train on them; the same as `rft run` with
mode: serve.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rft.cli.options import Config, Overrides, PluginDirs


def serve(
    config: Config,
    overrides: Overrides = None,
    plugin_dir: PluginDirs = None,
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="one process, no Ray: transformers engine, one rank"),
    ] = False,
    new_key: Annotated[
        str | None,
        typer.Option(
            "--new-key", help="make a key for this client; nothing is started", show_default=False
        ),
    ] = None,
) -> None:
    """Serve the policy behind an OpenAI-compatible address and train it on the rewards that clients
    post.
    """
    if new_key is not None:
        from rft.extras.serve.access import line_of
        from rft.workflow.endpoint_sessions import new_key as made

        key = made()
        typer.echo(f"the key, shown this once:            {key}")
        typer.echo(f"line for explorer.serve.clients_file: {line_of(new_key, key)}")
        return
    from rft.cli.run_command import run

    run(config, ["mode=serve", *(overrides or [])], plugin_dir, in_process=in_process)
