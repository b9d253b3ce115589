"""The console's API: the JSON of the commands over HTTP, to read only."""
