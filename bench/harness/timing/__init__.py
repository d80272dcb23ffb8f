"""What is timed and how: cases, timers, turns, roofs, and the rows that come of them."""
