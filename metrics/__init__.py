"""What operators see of the system: the format of its log lines."""
