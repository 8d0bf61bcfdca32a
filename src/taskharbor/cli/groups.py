"""A group of commands that forgives typing: it names the command that was probably meant."""

from __future__ import annotations

import difflib

import click


class Group(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], known, n=1, cutoff=0.5)
            suggestion = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
            raise click.UsageError(f"no command {args[0]!r}{suggestion}", ctx)
        return super().resolve_command(ctx, args)
