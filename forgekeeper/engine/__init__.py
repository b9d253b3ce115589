"""The loops of a run: limits, stop, pace, audit and bad records around each deletion."""
