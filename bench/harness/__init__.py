"""How anything is timed, compared and kept: timers, turns, roofs, files, one report."""
