"""Delivery: Dramatiq's own Redis broker, and the three middlewares that it lacks."""
