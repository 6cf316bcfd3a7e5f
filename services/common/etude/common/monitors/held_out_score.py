"""Monitor: the training reward rises and the held-out score does not."""

from etude.common.monitors.significance import slope_z_score
from etude.common.monitors.window import Action, Finding, Monitor, Reference, Window

LIMIT = 2.33
"""Normal deviate of p = 0.01, one-sided."""
_FLAT = 1.64
"""A held-out slope of fewer standard errors does not rise: p = 0.05, one-sided."""
FEWEST_STEPS = 12


def check(window: Window, reference: Reference) -> Finding | None:
    """Slope of the training reward and of its distance to the held-out score, both rising.

    The figure is the smaller of the two, in standard errors; 0 while the held-out score rises.
    """
    if len(window.scores) < FEWEST_STEPS:
        return None
    rise = slope_z_score([each.training for each in window.scores])
    parting = slope_z_score([each.training - each.held_out for each in window.scores])
    held_out = slope_z_score([each.held_out for each in window.scores])
    figure = min(rise, parting) if held_out < _FLAT else 0.0
    first, last = window.scores[0], window.scores[-1]
    return Finding(
        monitor="HeldOutScore",
        figure=figure,
        limit=LIMIT,
        is_raised=figure > LIMIT,
        action=Action.FREEZE,
        sentence=f"over {len(window.scores)} steps the training reward went from"
        f" {first.training:.3f} to {last.training:.3f}, the held-out score from"
        f" {first.held_out:.3f} to {last.held_out:.3f}",
    )


MONITOR = Monitor("HeldOutScore", check)
