"""The console: a page that shows what the command line says, and acts as it does (`docs/console.md`)."""
