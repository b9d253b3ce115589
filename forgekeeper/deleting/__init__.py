"""The safe loop: limits, stop, pace, audit and bad records around every deletion, the same for every batch."""
