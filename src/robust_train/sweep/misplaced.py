"""A launcher chosen where it has no effect: Hydra says nothing about it, so we do."""

from __future__ import annotations

from collections.abc import Sequence


def misplaced_launcher(
    chosen: str, running: str | None, typed: Sequence[str], *, in_sweep: bool
) -> str | None:
    """One line for the user; None where the launcher was chosen in a place where it counts.

    Args:
        chosen: ``hydra/launcher`` in the job's own config.
        running: the launcher that runs the sweep, None outside of one, or where it is not known.
        typed: Hydra's part of the command line.
        in_sweep: the job is one of a sweep.
    """
    if not in_sweep:
        option = next((o for o in typed if o.startswith("hydra/launcher=")), None)
        if option is None or option == "hydra/launcher=basic":
            return None
        return f"{option}: a launcher runs the jobs of a sweep, and this is none; add -m"
    if running is None or chosen == running:
        return None
    # hydra#2946: a file that the sweep varies is read per job, long after the launcher was chosen
    return (
        f"hydra/launcher: {chosen}: chosen in a file that the sweep itself selects, which is too "
        f"late ({running} is running it already); type hydra/launcher={chosen} on the command line"
    )
