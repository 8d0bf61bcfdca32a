"""`taskharbor completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from taskharbor.cli.problems import BadInput
from taskharbor.cli.settings import shared_options

_INSTALL = {
    "bash": "echo 'eval \"$(taskharbor completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(taskharbor completion zsh)\"' >> ~/.zshrc",
    "fish": "taskharbor completion fish > ~/.config/fish/completions/taskharbor.fish",
}


@click.command(epilog="\b\nTo install:\n" + "\n".join(f"  {line}" for line in _INSTALL.values()))
@click.argument("shell", type=click.Choice(list(_INSTALL)))
@shared_options
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    completer = get_completion_class(shell)
    if completer is None:
        raise BadInput(f"no completion for {shell}")
    root = context.find_root().command
    click.echo(completer(root, {}, "taskharbor", "_TASKHARBOR_COMPLETE").source())
