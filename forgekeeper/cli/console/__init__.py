"""The console: a web page with the facts and acts of the command line (`docs/console.md`)."""
