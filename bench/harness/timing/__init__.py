"""Times calls: cases, timers, turns and roofs, and the rows that come of them."""
