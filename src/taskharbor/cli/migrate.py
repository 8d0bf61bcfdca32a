"""`taskharbor migrate`: bring a store's schema up to date."""

from __future__ import annotations

import asyncio

import click

from taskharbor.cli.output import emit
from taskharbor.cli.settings import Settings, shared_options
from taskharbor.drivers.registry import connect


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@shared_options
@click.pass_obj
def migrate(settings: Settings, dry_run: bool) -> None:
    """Bring the store's schema up to date."""
    steps = asyncio.run(_migrate(settings.url, dry_run))
    if settings.json:
        emit({"steps": steps, "dry_run": dry_run})
    elif not steps:
        click.echo("up to date")
    else:
        for step in steps:
            click.echo(f"{'would apply' if dry_run else 'applied'} {step}")


async def _migrate(url: str, dry_run: bool) -> list[str]:
    driver = connect(url)
    try:
        return await driver.migrate(dry_run=dry_run)
    finally:
        await driver.close()
