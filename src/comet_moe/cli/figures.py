"""The figures of a run as a few lines of text."""

from typing import Any

import typer


def show_figures(figures: dict[str, Any], title: str) -> None:
    """Print the losses, each task's metrics and the experts per sample, under ``title``."""
    typer.echo(title)
    typer.echo(f"  test loss x100        {figures['test_loss']:.3f}")
    typer.echo(f"  validation loss x100  {figures['validation_loss']:.3f}")
    typer.echo(f"  experts per sample    {figures['experts_per_sample']:.2f}")
    for task, metrics in figures["tasks"].items():
        said = ", ".join(
            f"{name} {'-' if value is None else f'{value:.4f}'}" for name, value in metrics.items()
        )
        typer.echo(f"  {task}: {said}")
